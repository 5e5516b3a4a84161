"""What OptPipe's reproduction shows, on the settings that take no time."""

from __future__ import annotations

import pytest

from debubble.reproduce.optpipe import PRINTED, room, row, toy
from debubble.reproduce.optpipe_pictures import draw
from debubble.reproduce.optpipe_runs import BASELINES, METHODS, Setting, attempt, samples_needed, searched
from debubble.reproduce.report import Table
from debubble.simulator import simulate

SMALL = [Setting(4, "1.5B", 8, size) for size in (4, 32)]
UNEXPLAINED = {(4, "1.5B", 16, 16, "ZB-V"), (4, "3.6B", 16, 8, "ZB")}
"""They fit with 8 micro-batches in the paper, and reach their peak with fewer: they cannot break with 16."""


@pytest.mark.parametrize(
    ("devices", "model"),
    [
        (4, "1.5B"),
        pytest.param(4, "3.6B", marks=pytest.mark.slow),
        pytest.param(8, "7.1B", marks=pytest.mark.slow),
        pytest.param(16, "14.2B", marks=pytest.mark.slow),
    ],
)
def test_baselines_run_out_of_memory_where_the_papers_do(devices: int, model: str) -> None:
    group = [s for s in PRINTED if (s.devices, s.model) == (devices, model)]
    different = {
        (s.devices, s.model, s.micro_batches, s.size, method)
        for s in group
        for method in BASELINES
        if (samples_needed(s, method) > room(devices, model)) != (PRINTED[s][method] is None)
    }
    assert different == {cell for cell in UNEXPLAINED if cell[:2] == (devices, model)}


@pytest.mark.parametrize("method", BASELINES)
def test_what_a_baseline_needs_is_its_simulated_peak(method: str) -> None:
    setting = SMALL[0]
    schedule, costs = setting.schedule(method)
    peaks = simulate(schedule, costs).peak_memory
    held = max(float(peak - costs.static_of(d)) for d, peak in enumerate(peaks))
    samples = held / (float(sum(costs.activation)) / setting.devices) * setting.size
    assert samples_needed(setting, method) == pytest.approx(samples)


@pytest.mark.parametrize("setting", SMALL, ids=lambda s: f"size {s.size}")
def test_optpipe_runs_everywhere_and_is_never_slower_than_what_fits(setting: Setting) -> None:
    found = row(setting)
    assert {m: found.ours[m] is None for m in METHODS} == {m: found.printed[m] is None for m in METHODS}
    assert found.ours["OptPipe"] == min(time for time in found.ours.values() if time is not None)


def test_what_optpipe_found_fits_the_room() -> None:
    setting = SMALL[-1]
    found = searched(setting, room(4, "1.5B"))
    assert found is not None
    limit = found.program.costs.memory_limit
    assert limit is not None
    assert all(peak <= most for peak, most in zip(found.peak_memory, limit, strict=True))
    assert attempt(setting, "1F1B", room(4, "1.5B")) is None


def test_figure_4s_idle_time_is_halved() -> None:
    makespans = {name: timeline.makespan for name, timeline in toy(4).items()}
    assert makespans == {"no offload, optimal": 18, "PipeOffload": 21, "AdaOffload": 18, "OptPipe, optimal": 15}


def test_the_three_figures_are_drawn(tmp_path) -> None:
    memory = Table(
        title="Figure 5", columns=(), basis="fitted",
        rows=((4, "1.5B", 16, 4, "PipeOffload", 8.9, 12.1, 16.4), (4, "1.5B", 16, 4, "OptPipe", 37.4, 39.3, 41.1)),
    )  # fmt: skip
    many = Table(
        title="Figure 6", columns=(), basis="measured", rows=((16, 5156.3, 2185.1, 57.6), (32, 9922.0, 4087.2, 58.8))
    )
    timeline = attempt(SMALL[0], "PipeOffload", room(4, "1.5B"))
    assert timeline is not None
    places = draw(tmp_path / "pictures", toy={"PipeOffload": timeline}, memory=memory, many=many)
    assert [place.name for place in places] == [f"optpipe-figure-{number}.png" for number in (4, 5, 6)]
    assert all(place.read_bytes().startswith(b"\x89PNG") for place in places)
