"""Every causal family of transformers: whether a pipeline's loss and gradients are those of its model in one process.

    python benchmarks/families.py [FAMILY ...]      # ten minutes for all
    python benchmarks/families.py --docs            # the table of docs/notes/families.md

A tiny model of each family trains one step of 8 sequences of 12 tokens on two devices, under 1F1B, under ZB-V, and
under 1F1B with full recomputation, all in fp64; what transformers computes in fp32 whatever the dtype stays in fp64
on both sides.  The error is the largest difference of a gradient as a share of its largest entry, or of the loss.
`cases/families.json` has the entries of the tiny configs: of every family, of those that know them, and of single ones.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
import transformers
from benchmark import Benchmark, Row, table
from even_plan import even_plan
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import debubble as db
from debubble.errors import DebubbleError
from debubble.ir import RunOptions, StageCosts
from debubble.models import ModelConfig
from debubble.plans import Plan
from debubble.runtime import Pipeline
from debubble.runtime.distributed.thread_transport import ThreadTransport

FAMILIES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
ENTRIES: Mapping[str, Mapping[str, Any]] = json.loads(
    (Path(__file__).parent / "cases" / "families.json").read_text()
)  # fmt: skip
RANDOM = ("dropout", "pdrop", "jitter")
"""Words in the names of entries that make a model draw random numbers; these entries are set to zero."""
TOLERANCE = 1e-12
LARGEST = 3_000_000
"""Largest parameter count of a tiny model."""
RUNS = (("1f1b", "none"), ("zb-v", "none"), ("1f1b", "full"))


class Wide(TorchFunctionMode):
    """Keeps fp64 where transformers computes in fp32."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if bool(args) and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            to_single = function is torch.Tensor.to and torch.float32 in args[1:]
            if function is torch.Tensor.float or to_single:
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


def tiny_config(family: str) -> dict[str, Any]:
    """The complete config of a family's tiny model."""
    kind = type(transformers.AutoConfig.for_model(family))
    known = {*kind().to_dict(), *inspect.signature(kind.__init__).parameters}
    entries = dict(ENTRIES["every"]) | {name: value for name, value in ENTRIES["where_known"].items() if name in known}
    entries |= {name: 0.0 for name in known if any(word in name for word in RANDOM)}
    read = kind.from_dict({**entries, "model_type": family, **ENTRIES["of_family"].get(family, {})})
    return {**read.to_dict(), "model_type": family}


def tiny_model(config: Mapping[str, Any]) -> Any:
    """The model in fp64, with weights, biases and norms drawn at random.  Raises ValueError if it is large."""
    read = type(transformers.AutoConfig.for_model(config["model_type"])).from_dict(dict(config))
    build: Any = transformers.AutoModelForCausalLM.from_config
    with torch.device("meta"):
        size = sum(p.numel() for p in build(read).parameters())
    if size > LARGEST:
        raise ValueError(f"the tiny config makes {size:.0e} parameters")
    torch.manual_seed(1)
    model = build(read, experts_implementation="eager")
    single = {name: buffer for name, buffer in model.named_buffers() if "inv_freq" in name}
    model = model.double()
    for name, buffer in single.items():
        path, _, buffer_name = name.rpartition(".")
        model.get_submodule(path)._buffers[buffer_name] = buffer
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * (0.1 if "norm" in name and not name.endswith("bias") else 0.05))
            else:
                p.copy_(torch.randn_like(p) * 0.2 * (8 / max(8, p.shape[-1])) ** 0.5)
    return model.train()


def reference(model: Any, tokens: Tensor, micro_batches: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the full model in one process, micro-batch by micro-batch."""
    total, counted = torch.zeros((), dtype=torch.float64), tokens[:, 1:].numel()
    with Wide():
        for rows in tokens.chunk(micro_batches):
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits
            loss = functional.cross_entropy(logits.flatten(0, 1).double(), rows[:, 1:].flatten(), reduction="sum")
            (loss / counted).backward()
            total += loss.detach() / counted
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def plan_of(name: str, strategy: str, config: Mapping[str, Any]) -> Plan:
    """A plan for two devices and four micro-batches, in equal runs of units with the same recomputation."""
    stages = 4 if name == "zb-v" else 2
    schedule = db.schedules[name](devices=2, micro_batches=4, costs=StageCosts.of(stages=stages))
    if strategy != "none":
        schedule = replace(schedule, fused_recompute=frozenset(range(stages)))
    units = [replace(unit, strategy=strategy) for unit in ModelConfig.from_hf(config).units]
    return even_plan(schedule, units, RunOptions(dtype="fp64"), model=config)


def error_of(model: Any, plan: Plan, tokens: Tensor, loss: Tensor, gradients: Mapping[str, Tensor]) -> float:
    """Largest error of a plan's step."""

    def step(transport: Any) -> tuple[Tensor, dict[str, Tensor]]:
        pipeline = Pipeline(copy.deepcopy(model), plan, transport=transport)
        with Wide():
            loss = pipeline.step(tokens)
        return loss, {name: p.grad for name, p in pipeline.named_parameters() if p.grad is not None}

    answers = ThreadTransport.run(plan.ranks, step)
    actual = {name: gradient for _, gradients in answers for name, gradient in gradients.items()}
    errors = [_relative(answers[0][0], loss)]
    # Some gradients are zero, such as those of key biases; their rounding is relative to the others.
    floor = 1e-6 * max(float(gradient.abs().max()) for gradient in gradients.values())
    errors += [_relative(actual[name], gradient, floor) for name, gradient in gradients.items()]
    return max(errors)


def _relative(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(floor))


def judge(family: str) -> Row:
    """Compare a family's tiny model under every run of RUNS.

    Returns:
        `outcome` (agrees, differs, refused, fails or not built), the largest `error` of all runs, and `why` it did not
        run: the sentence that refuses it, or what transformers says of the tiny config.
    """
    torch.set_num_threads(1)
    try:
        config = tiny_config(family)
        model = tiny_model(config)
        tokens = torch.randint(3, config.get("vocab_size", 61), (8, 13), generator=torch.Generator().manual_seed(5))
        loss, gradients = reference(copy.deepcopy(model), tokens, 4)
    except Exception as error:  # any error of a tiny config that transformers does not build or run
        return _row("not built", f"{type(error).__name__}: {_first_line(error)}")
    errors = []
    for name, strategy in RUNS:
        try:
            plan = plan_of(name, strategy, model.config.to_dict())
            errors.append(error_of(model, plan, tokens, loss, gradients))
        except DebubbleError as error:
            return _row("refused", str(error))
        except Exception as error:
            return _row("fails", f"{type(error).__name__}: {_first_line(error)}")
    return {**_row("agrees" if max(errors) < TOLERANCE else "differs"), "error": max(errors)}


def _row(outcome: str, why: str = "") -> Row:
    return {"outcome": outcome, "error": None, "why": why}


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:160]


def page(rows: list[Row]) -> str:
    """The page: families by outcome."""
    families = {
        outcome: [row["case"] for row in rows if row["outcome"] == outcome]
        for outcome in ("agrees", "refused", "not built")
    }
    worst = max(row["error"] or 0.0 for row in rows if row["outcome"] == "agrees")
    summary = (
        f"Of {len(rows)} causal families of transformers, tiny models of {len(families['agrees'])} train as in one"
        f" process (largest error {worst:.0e}), {len(families['refused'])} are refused with a sentence, and of"
        f" {len(families['not built'])} the benchmark has no tiny model (encoders, decoders of encoders, several"
        " modalities)."
    )
    words = {"agrees": "train", "refused": "are refused", "not built": "no tiny model"}
    lines = [(words[outcome], ", ".join(names)) for outcome, names in families.items()]
    return f"{summary}\n\n{table(('', 'families'), lines)}"


def quiet() -> None:
    """Silence warnings of transformers about tiny configs."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


BENCHMARK = Benchmark(
    name="families", about=__doc__, cases={family: family for family in FAMILIES}, measure=judge, prepare=quiet,
    pages={"notes/families.md#families": page},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
