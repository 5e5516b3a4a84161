"""Megatron-LM: its command-line arguments, with the partition as a layout string.

In the layout, `E` is the embedding, `t` a decoder layer, `m` a multi-token-prediction layer, `L` the loss, `|` the
end of a stage; stages come in model order, and stage s lives on device s mod p.  The order is Megatron's own 1F1B or
interleaved one.  Recomputation is the same for all stages: `block` takes the first N layers of each.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from debubble.exports.layers import Layer, StageLayers, stage_layers
from debubble.exports.reduction import compute_only, require_order
from debubble.exports.registry import Export, exporter
from debubble.ir import Plan

_MODULES = {"norm": "layernorm", "core": "core_attn", "activation": "mlp", "multiply": "mlp", "mlp": "mlp"}
"""Our operators as `--recompute-modules`; of the MLP's parts it can only recompute all."""


@exporter("megatron")
def megatron(plan: Plan) -> Export:
    """`megatron-arguments.txt`, one option per line."""
    reduction = compute_only(plan, target="Megatron-LM")
    require_order(reduction.schedule, target="Megatron-LM", names=("1f1b", "interleaved"))
    stages = stage_layers(plan, target="Megatron-LM")
    options = plan.options
    recompute, losses = _recompute(stages)
    arguments = [
        f"--num-layers {sum(len(stage.layers) for stage in stages)}",
        f"--seq-length {options.sequence_length}",
        f"--micro-batch-size {options.micro_batch_size}",
        f"--global-batch-size {options.micro_batch_size * plan.micro_batches * options.data}",
        f"--tensor-model-parallel-size {options.tensor}",
        f"--context-parallel-size {options.context}",
        f"--pipeline-model-parallel-size {plan.devices}",
        f'--pipeline-model-parallel-layout "{layout(stages)}"',
        *(["--use-distributed-optimizer"] if options.zero else []),
        *recompute,
    ]
    return Export(files={"megatron-arguments.txt": "\n".join(arguments) + "\n"}, losses=(*reduction.losses, *losses))


def layout(stages: Sequence[StageLayers]) -> str:
    """The layout string, such as `Et*3|(tt|)*29,m|L`; equal stages in a row are written once."""
    parts = [_stage(stage) for stage in stages]
    words: list[str] = []
    for word, run in itertools.groupby(parts[:-1]):
        count = len(list(run))
        words.append(f"{word}|" if count == 1 else f"({word}|)*{count}")
    return "".join(words) + parts[-1]


def _stage(stage: StageLayers) -> str:
    layers = len(stage.layers)
    decoders = "t" if layers == 1 else f"t*{layers}" if layers else ""
    return f"{'E' * stage.embedding}{decoders}{'m' * stage.mtp}{'L' * stage.head}"


def _recompute(stages: Sequence[StageLayers]) -> tuple[list[str], list[str]]:
    """The arguments for recomputation, never less than planned, and what is lost."""
    layers = [layer for stage in stages for layer in stage.layers]
    if not any(layer.recomputes for layer in layers):
        return [], []
    modules = _modules(layers)
    if modules is None:
        return _block(stages)
    lost = (
        []
        if _same(layers) and _exact(layers)
        else [
            "Megatron-LM recomputes the same modules in every layer: here"
            f" {' and '.join(modules)} in all of them, which is slower than planned."
        ]
    )
    return [f"--recompute-granularity selective --recompute-modules {' '.join(modules)}"], lost


def _modules(layers: Sequence[Layer]) -> list[str] | None:
    """The modules that cover what is recomputed; None if only whole layers do."""
    operators = {name.partition(":")[2] for layer in layers for name in layer.operators}
    return sorted({_MODULES[o] for o in operators}) if operators <= _MODULES.keys() else None


def _same(layers: Sequence[Layer]) -> bool:
    return len({layer.operators for layer in layers}) == 1


def _exact(layers: Sequence[Layer]) -> bool:
    operators = {name.partition(":")[2] for layer in layers for name in layer.operators}
    return "mlp" in operators or not operators & {"activation", "multiply"}


def _block(stages: Sequence[StageLayers]) -> tuple[list[str], list[str]]:
    """Whole layers: the first N of every stage, N the largest that any stage needs."""
    counts = [sum(layer.recomputes for layer in stage.layers) for stage in stages]
    most = max(counts)
    losses: list[str] = []
    more = [s for s, stage in enumerate(stages) if counts[s] < min(most, len(stage.layers))]
    if more:
        where = f"stage{'s' * (len(more) > 1)} {', '.join(map(str, more))}"
        losses.append(
            f"Megatron-LM recomputes equally many layers in every stage: {most}, which is more than planned, and"
            f" slower, on {where}."
        )
    if any(layer.recomputes and not layer.whole for stage in stages for layer in stage.layers):
        losses.append("Layers that recompute some operators recompute all, which is slower than planned.")
    return [f"--recompute-granularity full --recompute-method block --recompute-num-layers {most}"], losses
