"""The schedules of ChronosPipe's Figures 1b, 2 and 5 to 8, drawn from their simulation."""

from __future__ import annotations

from fractions import Fraction

from debubble.ir import StageCosts
from debubble.ir.stage_costs import CommunicationModel
from debubble.reproduce.drawings import Timelines
from debubble.schedules import schedules
from debubble.schedules.chronos.offload import offload_activations, offload_states
from debubble.simulator import simulate

PLAIN = StageCosts.of(stages=4, forward=2, backward_input=2, backward_weight=2, activation=2)
"""1F1B's stages in T_unit, beside chunks that take half."""
CHUNKS = StageCosts.of(stages=8)
"""The stages of two chunks on each of 4 devices."""


def drawn(*lines: tuple[str, str, StageCosts]) -> Timelines:
    """Schedules under each other: the title of each, its name, and the costs of its stages."""
    timelines = {}
    for title, name, costs in lines:
        entry = schedules[name]
        devices = costs.stages // entry.default_chunks
        timelines[title] = simulate(
            entry(devices=devices, micro_batches=8, chunks=entry.default_chunks, costs=costs), costs
        )
    return Timelines.of(timelines)


def messages() -> Timelines:
    """Figure 5b: Chronos-Pipe with messages that take time."""
    models: dict[CommunicationModel, str] = {
        "blocking": "messages block both ends",
        "receiver": "the receiver waits",
        "latency": "asynchronous messages",
    }
    slow = CHUNKS.replace(communication=Fraction(1, 4))
    return drawn(
        *(
            (f"Chronos-Pipe, T_c = T_unit / 4, {words}", "chronos", slow.replace(communication_model=model))
            for model, words in models.items()
        )
    )


def offload() -> Timelines:
    """Figure 8, and the activations of the shallow chunk offloaded beside it."""
    costs = CHUNKS.replace(gradient_offload=1.5, host_step=2.5, parameter_load=2, offload=2)
    made = schedules["chronos"](devices=4, micro_batches=8, chunks=2, costs=costs)
    states = offload_states(made, chunks=[1])
    both = offload_activations(states, chunks=[0], costs=costs)
    return Timelines.of(
        {
            "Chronos-Offload of chunk 1 (Figure 8)": simulate(states, costs),
            "With the activations of chunk 0 offloaded beside it": simulate(both, costs),
        }
    )
