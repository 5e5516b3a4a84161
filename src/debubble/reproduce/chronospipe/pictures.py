"""The schedules of ChronosPipe's Figures 5 to 8, drawn from their simulation."""

from __future__ import annotations

from pathlib import Path

from debubble.ir import StageCosts
from debubble.schedules import schedules
from debubble.schedules.chronos.offload import offload_activations, offload_states
from debubble.simulator import simulate
from debubble.views import Scene, views


def draw(folder: Path) -> tuple[Path, ...]:
    """Write the pictures; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, scenes in (("chronos-pipe", _pipe()), ("chronos-recomp", _recomp()), ("chronos-offload", _offload())):
        path = folder / f"{name}.png"
        path.write_bytes(views["png"](scenes))
        paths.append(path)
    return tuple(paths)


def _pipe() -> list[Scene]:
    return [
        _scene("1f1b", "1F1B", StageCosts.of(stages=4, forward=2, backward_input=2, backward_weight=2, activation=2)),
        _scene("interleaved", "Interleaved 1F1B, v = 2", StageCosts.of(stages=8)),
        _scene("chronos", "Chronos-Pipe, v = 2 (Figure 5a)", StageCosts.of(stages=8)),
        _scene("chronos-zero2", "ZeRO-2 variant, g = 2 (Figure 7)", StageCosts.of(stages=8, gradient_reduce=2)),
    ]


def _recomp() -> list[Scene]:
    return [
        _scene("chronos-recomp", "Chronos-Recomp, p = 4 (Figure 6a)", StageCosts.of(stages=8)),
        _scene("chronos-recomp", "Chronos-Recomp, p = 8 (Figure 6b)", StageCosts.of(stages=16), devices=8),
    ]


def _offload() -> list[Scene]:
    costs = StageCosts.of(stages=8, gradient_offload=1.5, host_step=2.5, parameter_load=2, offload=2)
    made = schedules["chronos"](devices=4, micro_batches=8, chunks=2, costs=costs)
    states = offload_states(made, chunks=[1])
    both = offload_activations(states, chunks=[0], costs=costs)
    return [
        Scene.of(simulate(states, costs), title="Chronos-Offload of chunk 1 (Figure 8)"),
        Scene.of(simulate(both, costs), title="With the activations of chunk 0 offloaded beside it"),
    ]


def _scene(name: str, title: str, costs: StageCosts, *, devices: int = 4) -> Scene:
    chunks = costs.stages // devices
    made = schedules[name](devices=devices, micro_batches=8, chunks=chunks, costs=costs)
    return Scene.of(simulate(made, costs), title=title)
