"""The deepest LLaMA2-70B that fits into a memory limit, as our cost model has it: ChronosPipe's Figure 9b, unfitted.

    python benchmarks/chronos_layers.py [--limit 32e9] [--json FILE]

Pipeline 8, tensor 8, micro-batches of 2 sequences of 4096 tokens, embedding and head included, as `debubble plan`
prices them.  No time is compared: a schedule fits if lowering admits every operation under the limit.  `ALL` has the
optimizer states of the deep chunk on the host.  In two rows devices keep the copies that take their updates back (plans
made with --post-validation); a run whose devices wait for the norm of all gradients needs none.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from provenance import measured_by

from debubble.costs import Cluster, model_units
from debubble.costs.units import Partition
from debubble.ir import OutOfMemoryError, RunOptions, Schedule, StageCosts, lower
from debubble.models import Model, models
from debubble.papers.chronospipe.figures.memory_model import ALL, CHRONOS, HALF, PLAIN, RECOMP, Method
from debubble.papers.chronospipe.offload import offload_states
from debubble.planners.partitioning.balance import balanced_counts, even_counts
from debubble.schedules import schedules

PIPELINE, MICRO_BATCHES = 8, 24
"""The peak is reached long before the 24th micro-batch."""
OPTIONS = RunOptions(tensor=8, micro_batch_size=2, sequence_length=4096)
CLUSTER = Cluster.parse("64xRTX5090-32GB")


@dataclass(frozen=True)
class Case:
    """A method of Figure 9b, and whether devices keep copies of what they step."""

    method: Method
    copies: bool = False

    @property
    def name(self) -> str:
        return self.method.name + (", devices keep copies" if self.copies else "")


CASES = (
    Case(PLAIN),
    Case(HALF),
    Case(CHRONOS),
    Case(RECOMP),
    Case(ALL),
    Case(PLAIN, copies=True),
    Case(ALL, copies=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--limit", type=float, default=32e9, help="bytes per device")
    parser.add_argument("--json", type=Path, help="write the answer here")
    arguments = parser.parse_args()
    largest: dict[str, int] = {}
    for case in CASES:
        largest[case.name] = deepest(case, arguments.limit)
        ratio = largest[case.name] / largest[PLAIN.name]
        print(f"{case.name:45} {largest[case.name]:4} layers  {ratio:.2f} of 1F1B", file=sys.stderr)
    answer = {"limit": arguments.limit, "layers": largest}
    print(json.dumps(answer, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**measured_by(), **answer}, indent=1) + "\n")


def deepest(case: Case, limit: float) -> int:
    """Layers of the largest model that fits; a multiple of the number of stages."""
    step = PIPELINE * case.method.chunks
    layers = 0
    while any(fits(schedule, costs) for schedule, costs in configurations(case, layers + step, limit)):
        layers += step
    return layers


def configurations(case: Case, layers: int, limit: float) -> Iterator[tuple[Schedule, StageCosts]]:
    """The method's schedule with both ways to divide so many layers among the stages."""
    method = case.method
    model = Model.from_hf({**models["llama2-70b"].config, "num_hidden_layers": layers})
    options = replace(OPTIONS, post_validation=case.copies)
    units = replace(model_units(model, CLUSTER, options, pipeline=PIPELINE), memory_limit=(limit,))
    stages = PIPELINE * method.chunks
    for counts in dict.fromkeys((tuple(even_counts(units, stages)), tuple(balanced_counts(units, stages)))):
        made = scheduled(method)
        recomputing = (
            set(range(PIPELINE)) if made.explicit_recompute else set(range(stages)) if method.recomputed else set()
        )
        share = 1 if made.explicit_recompute else method.recomputed
        partition = list(Partition.cut(units, counts))
        for stage in recomputing:
            first = round(len(partition[stage]) * share)
            whole = [
                (index, "full" if "full" in units.units[index].strategies else "none") for index, _ in partition[stage]
            ]
            partition[stage] = (*whole[:first], *partition[stage][first:])
        if not made.explicit_recompute:
            made = replace(made, fused_recompute=frozenset(recomputing))
        if method.on_host:
            made = offload_states(made, chunks=[method.chunks - 1])
        yield made, units.stage_costs(partition, made.placement, on_host=made.host_steps)


def scheduled(method: Method) -> Schedule:
    """The order of operations, without recomputation that is fused into backwards."""
    return schedules[method.schedule](devices=PIPELINE, micro_batches=MICRO_BATCHES, chunks=method.chunks)


def fits(schedule: Schedule, costs: StageCosts) -> bool:
    """Whether every device's list can be admitted under its limit."""
    try:
        lower(schedule, costs)
    except OutOfMemoryError:
        return False
    return True


if __name__ == "__main__":
    main()
