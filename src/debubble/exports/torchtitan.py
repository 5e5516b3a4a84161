"""torchtitan 0.3: a Python recipe with the order as CSV, the modules of each stage, and recomputation per layer.

The schedule's name still decides where the stages are placed; the CSV replaces its order.
"""

from __future__ import annotations

from pprint import pformat

from debubble.exports.layers import rounded_up, stage_layers
from debubble.exports.module_names import torchtitan_names
from debubble.exports.reduction import compute_only
from debubble.exports.registry import Export, exporter
from debubble.exports.torch_csv import to_csv
from debubble.exports.torch_hosts import placing_schedule, refuse_tied, split_losses
from debubble.ir import Plan

_RECIPE = '''\
"""A plan of debubble for torchtitan: `apply` changes a Trainer.Config; schedule.csv belongs beside this file."""

from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan.distributed.activation_checkpoint import FullAC

RECOMPUTED_LAYERS = {recomputed}

MODULES = {modules}


class PlannedAC(FullAC):
    """Recomputes the layers of the plan and no others."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        pass

    def apply(self, model):
        layers = model.get_submodule("layers")
        for name, block in list(layers.named_children()):
            if int(name) in RECOMPUTED_LAYERS:
                layers.register_module(name, self._wrap_block(block, base_fqn=f"layers.{{name}}"))


def apply(config):
    """The config with the plan's parallelism."""
    parallelism = replace(
        config.parallelism,
        pipeline_parallel_degree={devices},
        pipeline_parallel_schedule="{schedule}",
        pipeline_parallel_schedule_csv=str(Path(__file__).with_name("schedule.csv")),
        num_pp_microbatches={micro_batches},
        module_fqns_per_model_part=MODULES,
        tensor_parallel_degree={tensor},
        context_parallel_degree={context},
    )
    return replace(config, parallelism=parallelism, activation_checkpoint={checkpointing})
'''


@exporter("torchtitan")
def torchtitan(plan: Plan) -> Export:
    """`plan.py`, which changes a trainer config, and `schedule.csv`."""
    refuse_tied(plan, target="torchtitan")
    stages = stage_layers(plan, target="torchtitan")
    schedule = placing_schedule(plan, target="torchtitan")
    reduction = compute_only(plan, target="torchtitan")
    recomputed, losses = rounded_up(stages, target="torchtitan")
    recipe = _RECIPE.format(
        recomputed=pformat(set(recomputed) or (), width=110, compact=True),
        modules=pformat(torchtitan_names(stages), width=110, compact=True),
        devices=plan.devices,
        schedule=schedule,
        micro_batches=plan.micro_batches,
        tensor=plan.options.tensor,
        context=plan.options.context,
        checkpointing="PlannedAC.Config()" if recomputed else "None",
    )
    files = {"plan.py": recipe, "schedule.csv": to_csv(reduction.schedule)}
    return Export(files=files, losses=(*reduction.losses, *losses, *split_losses(plan)))
