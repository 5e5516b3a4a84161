"""The schedules of ChronosPipe's Figures 1b, 2 and 5 to 8, drawn from their simulation."""

from __future__ import annotations

from fractions import Fraction

from debubble.ir import StageCosts
from debubble.ir.stage_costs import CommunicationModel
from debubble.reproduce.drawings import Timelines
from debubble.schedules import schedules
from debubble.schedules.chronos.offload import offload_activations, offload_states
from debubble.simulator import simulate
from debubble.views import Scene

PLAIN = StageCosts.of(stages=4, forward=2, backward_input=2, backward_weight=2, activation=2)
"""1F1B's stages in T_unit, beside chunks that take half."""


def one_f_one_b() -> Timelines:
    """Figure 1b: tasks that depend on each other are far apart in the early stages."""
    return Timelines((_scene("1f1b", "1F1B, p = 4", PLAIN),))


def others() -> Timelines:
    """Figure 2: interleaved 1F1B, and the order in groups of micro-batches that ZeRO asks for."""
    return Timelines(
        (
            _scene("interleaved", "Interleaved 1F1B, v = 2 (Figure 2a)", StageCosts.of(stages=8)),
            _scene("breadth-first", "Breadth-first, v = 2 (Figure 2b)", StageCosts.of(stages=8)),
        )
    )


def pipe() -> Timelines:
    """Figure 5a, beside 1F1B."""
    return Timelines(
        (
            _scene("1f1b", "1F1B", PLAIN),
            _scene("chronos", "Chronos-Pipe, v = 2 (Figure 5a)", StageCosts.of(stages=8)),
        )
    )


def messages() -> Timelines:
    """Figure 5b: the same with messages that take time."""
    models: dict[CommunicationModel, str] = {
        "blocking": "messages block both ends",
        "receiver": "the receiver waits",
        "latency": "asynchronous messages",
    }
    return Timelines(
        tuple(
            _scene(
                "chronos",
                f"Chronos-Pipe, T_c = T_unit / 4, {words}",
                StageCosts.of(stages=8, communication=Fraction(1, 4), communication_model=model),
            )
            for model, words in models.items()
        )
    )


def recomp() -> Timelines:
    """Figure 6."""
    return Timelines(
        (
            _scene("chronos-recomp", "Chronos-Recomp, p = 4 (Figure 6a)", StageCosts.of(stages=8)),
            _scene("chronos-recomp", "Chronos-Recomp, p = 8 (Figure 6b)", StageCosts.of(stages=16), devices=8),
        )
    )


def zero2() -> Timelines:
    """Figure 7, as we read it."""
    return Timelines((_scene("chronos-zero2", "ZeRO-2 variant, g = 2", StageCosts.of(stages=8, gradient_reduce=2)),))


def offload() -> Timelines:
    """Figure 8, and the activations of the shallow chunk offloaded beside it."""
    costs = StageCosts.of(stages=8, gradient_offload=1.5, host_step=2.5, parameter_load=2, offload=2)
    made = schedules["chronos"](devices=4, micro_batches=8, chunks=2, costs=costs)
    states = offload_states(made, chunks=[1])
    both = offload_activations(states, chunks=[0], costs=costs)
    return Timelines(
        (
            Scene.of(simulate(states, costs), title="Chronos-Offload of chunk 1 (Figure 8)"),
            Scene.of(simulate(both, costs), title="With the activations of chunk 0 offloaded beside it"),
        )
    )


def _scene(name: str, title: str, costs: StageCosts, *, devices: int = 4) -> Scene:
    chunks = costs.stages // devices
    made = schedules[name](devices=devices, micro_batches=8, chunks=chunks, costs=costs)
    return Scene.of(simulate(made, costs), title=title)
