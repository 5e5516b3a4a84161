from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from typing import Any

import pytest
from rich.console import Console, RenderableType

import debubble as db
from debubble.formatting import listed, size_words, time_words
from debubble.ir import CandidateSummary, Kind, PlannedUnit
from debubble.ir.degrees import ConfigurationSummary, Degrees, DegreeSearch, FasterPlan, MemoryParts, UsualChoice
from debubble.papers.chronospipe.offload import offload_states
from debubble.plans import Plan
from debubble.simulator import Cause, Timeline
from debubble.views import Scene, views
from debubble.views.plan_screen import framework_to_plan_for
from debubble.views.plan_table import render as render_plan
from debubble.views.rows import chosen_degrees_words, chosen_words, configuration_rows, planner_rows
from debubble.views.scene_table import render_scenes
from debubble.views.summary import as_dict, bound_words, device_figures, kind_figures, stage_figures, why_not_faster
from debubble.views.terminal import bubble_table, device_table, headline, stage_table
from tests.views.scenes import small_plan, surrounded


def printed(renderable: RenderableType) -> str:
    console = Console(width=100, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_table_shows_shares_and_peak_of_devices() -> None:
    text = printed(render_scenes([Scene.predicted(small_plan())]))

    rows = [line.split() for line in text.splitlines()]
    assert ["device", "busy", "warm-up", "cool-down", "dependency", "transfer", "peak"] in rows
    assert ["0", "63.2%", "15.8%", "5.3%", "15.8%", "3", "(50%)"] in rows
    assert ["1", "63.2%", "5.3%", "10.5%", "5.3%", "15.8%", "2", "(33%)"] in rows
    assert ["■", "backward", "8", "2", "16"] in rows
    kinds = {kind: (k.count, k.total) for kind, k in kind_figures(Scene.predicted(small_plan())).items()}
    assert kinds == {Kind.F: (8, 8), Kind.B: (8, 16), Kind.SEND_F: (4, 4), Kind.SEND_B: (4, 4)}


def test_shares_are_of_the_pipelines_time_by_title_too() -> None:
    scene = replace(Scene.predicted(small_plan(schedule="interleaved", chunks=2)), tail=100)
    titles = [str(table(scene).title) for table in (device_table, stage_table, bubble_table)]

    assert [title.partition(",")[0] for title in titles] == [
        "Share of the pipeline's time", "Share of the pipeline's time", "Idle share of the pipeline's time"
    ]  # fmt: skip
    page = unescape(views["html"]([scene]).decode())
    assert all(f"Share of the pipeline's time, per {row}" in page for row in ("device", "stage"))
    for d in device_figures(scene):
        assert d.busy + sum(d.bubbles.values()) == scene.timeline.makespan == scene.step_time - 100


def test_recomputation_has_a_column() -> None:
    schedule = db.schedules["1f1b"](devices=2, micro_batches=4, recomputed_stages=1)
    timeline = db.simulate(schedule, db.StageCosts.of(stages=2))

    assert " recompute " in printed(render_scenes([Scene(timeline, title="")]))


def test_stages_are_summed_over_their_micro_batches() -> None:
    schedule = db.schedules["1f1b"](devices=2, micro_batches=4, recomputed_stages=1)
    costs = db.StageCosts.of(stages=2, recompute=3, communication=5)

    scene = Scene(db.simulate(schedule, costs), title="")
    stages, operations = stage_figures(scene), scene.timeline.by_name

    assert [d.recompute for d in device_figures(scene)] == [12, 0]
    assert [scene.recompute_share(operations[name]) for name in ("0B0", "1B0", "0F0")] == [3 / 5, 0, 0]
    assert [(s.stage, s.device, s.compute, s.recompute, s.sending) for s in stages] == [
        (0, 0, 12, 12, 20),
        (1, 1, 12, 0, 20),
    ]


def test_critical_path_explains_the_step() -> None:
    """1F1B on two devices: F on device 0, then only device 1, then B on device 0."""
    sentence = why_not_faster(Scene.predicted(small_plan(communication=0)))

    assert sentence == "The critical path spends 80.0% computing on device 1, 20.0% computing on other devices."


def test_the_json_summary_has_the_promised_figures() -> None:
    plan = small_plan()
    summary = as_dict(Scene.predicted(plan))

    assert summary["makespan"] == 19
    assert summary["peak_memory"] == [3, 2]
    assert summary["operations"] == 32
    assert sum(summary["per_device"][0]["bubbles"].values()) == 19 - 12
    assert [(d["forward_bubbles"], d["backward_bubbles"]) for d in summary["per_device"]] == [(4, 3), (0, 2)]
    rows = [line.split() for line in printed(render_scenes([Scene.predicted(plan)])).splitlines()]
    assert ["1", "0.0%", "10.5%", "26.3%"] in rows


def test_a_plan_is_shown_with_its_layers_and_the_other_planners() -> None:
    plan = replace(
        small_plan(),
        lower_bound=16,
        partition=(
            (PlannedUnit("embedding", None), *(PlannedUnit(t, i) for i in (0, 1) for t in ("attention", "mlp"))),
            (PlannedUnit("attention", 2, "full"), PlannedUnit("head", None)),
        ),
        candidates=(
            CandidateSummary(planner="slow", makespan=20.0, gap=0.2, schedule="gpipe"),
            CandidateSummary(planner="big", rejected="Device 0 lacks 3."),
        ),
    )

    text = printed(render_plan(plan, Scene.predicted(plan)))

    assert "embedding, layers 0-1" in text
    assert "attention 2, head" in text
    assert "No plan takes less than 16: the gap is 15.8%." in text
    assert "Device 0 lacks 3." in text


@pytest.mark.parametrize(
    ("target", "orders"),
    [
        (None, "."),
        (
            "megatron",
            "; the bound holds for every order of operations, and Megatron-LM runs 1f1b and interleaved alone.",
        ),
    ],
)
def test_wide_gap_is_explained(target: str | None, orders: str) -> None:
    plan = db.plan("llama3-8b", "4xH100-80GB", micro_batches=4, planner="adapipe", target=target)
    scene = Scene.predicted(plan)
    assert scene.why is not None

    _, _, between = bound_words(replace(plan, lower_bound=0.5 * float(scene.step_time)), scene).partition("  Besides ")

    assert between == f"computing, the step has {listed(scene.why.losses)}{orders}"
    assert scene.why.losses[0].startswith("filling and draining the pipeline (")
    assert not [loss for loss in scene.why.losses if loss.startswith("optimizer")]
    assert "Besides" not in bound_words(replace(plan, lower_bound=0.95 * float(scene.step_time)), scene)


def test_plan_names_optimizers_on_the_host() -> None:
    plan = small_plan()
    plan = replace(plan, schedule=offload_states(plan.schedule, chunks=[0]))

    assert "all optimizers on the host" in printed(render_plan(plan, Scene.predicted(plan)))


def headline_of(plan: Plan, **changes: Any) -> str:
    return headline(replace(Scene.predicted(plan), **changes))


def test_headline_shows_step_and_pipeline_time() -> None:
    assert headline_of(small_plan()).startswith("19 per step, 36.8% idle")
    assert headline_of(small_plan(), tail=2).startswith(
        "21 per step (the pipeline 19, gradients and optimizer after it 2), 36.8% idle"
    )


def test_with_post_validation_the_longest_span_counts() -> None:
    plan = small_plan(schedule="zb-h2", communication=0, memory_limit=None)
    timeline = plan.simulate()
    assert (timeline.makespan, timeline.span) == (13, 12)
    assert headline_of(plan, post_validation=True).startswith("12 per step (the pipeline 13, its longest span 12),")


def test_measured_step_includes_phases_around_the_program() -> None:
    plan = small_plan()
    measured = Scene.pair(plan, surrounded(plan))[1]
    assert measured.step_time == 27
    assert headline(measured).startswith("27 s per step (the pipeline 19 s, before and after it 8 s),")


def test_planners_are_sorted_by_full_step() -> None:
    first = CandidateSummary(planner="first", step_time=21, makespan=20, gap=0.2, schedule="chronos")
    second = CandidateSummary(planner="second", step_time=22, makespan=18, gap=0.3, schedule="1f1b")
    third = replace(second, planner="third", step_time=23)
    plan = replace(small_plan(), candidates=(first, third, second))
    rows = [line.split() for line in printed(render_plan(plan, Scene.predicted(plan))).splitlines()]
    places = [
        rows.index(["first", "chronos", "21", "20", "20.0%"]),
        rows.index(["second", "1f1b", "22", "18", "30.0%"]),
        rows.index(["third", "1f1b", "23", "18", "30.0%"]),
    ]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ((100,), None),
        ((100, 100.5), "a is taken: b is 0.50% slower."),
        (
            (125, 100),
            "a is taken, 25.00% slower than b: a plan that neither recomputes, offloads nor steps on hosts wins on"
            " CPUs, whose hosts are the same cores.",
        ),
        ((100, 100, 100), "a is taken: b and c are as fast, and asked later."),
        (
            (100.4, 100, 101),
            "a is taken, 0.40% slower than b: a plan that neither recomputes, offloads nor steps on hosts wins within"
            " 1%.",
        ),
    ],
)
def test_planner_table_explains_the_choice(steps: tuple[float, ...], words: str | None) -> None:
    candidates = tuple(
        CandidateSummary(planner=name, step_time=step, makespan=step) for name, step in zip("abc", steps, strict=False)
    )

    assert chosen_words(replace(small_plan(), candidates=candidates)) == words


def test_the_table_of_planners_groups_them_by_frameworks() -> None:
    a = CandidateSummary(planner="a", step_time=21, makespan=20, runs_in=("debubble", "torch"))
    candidates = (
        replace(a, planner="b", runs_in=("debubble",)),
        replace(a, planner="c"),
        replace(a, planner="d", runs_in=()),
    )
    rows = planner_rows(replace(small_plan(), candidates=(a, *candidates)), seconds=True)

    assert rows.caption.endswith("Plans run in these frameworks: a and c in debubble and torch; b in debubble.")


@pytest.mark.parametrize(("cluster", "is_shown"), [("8xA100-80GB", False), ("2x4xA100-80GB", True)])
def test_the_answer_names_an_assumed_network(cluster: str, is_shown: bool) -> None:
    plan = db.plan("llama2-7b", cluster, planner="dapple", micro_batches=8)

    answer = printed(render_plan(plan, Scene.predicted(plan)))
    assert ("network 25 GB/s assumed" in answer) is is_shown


def test_a_network_of_a_cluster_file_is_not_assumed() -> None:
    cluster = db.Cluster.from_dict({"devices": "2x4xA100-80GB", "network_bandwidth": 25e9})
    plan = db.plan("llama2-7b", cluster, planner="dapple", micro_batches=8)

    assert "GB/s assumed" not in printed(render_plan(plan, Scene.predicted(plan)))


@pytest.mark.parametrize(("ratio", "is_shown"), [(0.998, False), (0.98, True)])
def test_the_answer_names_a_planner_that_is_faster(ratio: float, is_shown: bool) -> None:
    plan = db.plan("llama2-7b", "4xA100-80GB", planner="dapple", micro_batches=4)
    step = float(plan.simulate().makespan)
    first = replace(plan.candidates[0], step_time=step, makespan=step)
    other = replace(first, planner="b", step_time=ratio * step, makespan=ratio * step)
    compared = replace(plan, candidates=(first, other))

    answer = printed(render_plan(compared, Scene.predicted(compared)))
    assert ("2.0% less time by b" in answer) is is_shown


def test_simpler_plan_shows_its_slowdown() -> None:
    plan = db.plan("llama2-7b", "4xA100-80GB", planner="dapple", micro_batches=4)
    first = replace(plan.candidates[0], remark="its own words", plain_excess=0.0049)
    plainer = replace(plan, candidates=(first,))
    remark = "0.5% slower than with recomputation, offload or steps on hosts"
    assert first.remarks == ("its own words", remark)
    answer = " ".join(printed(render_plan(plainer, Scene.predicted(plainer))).split())
    assert f"this plan is {remark} · it wins within 1% · --fastest takes the other" in answer


def test_answer_shows_the_tolerance_for_simpler_plans() -> None:
    plan = db.plan("llama2-7b", "4xA100-80GB", planner="dapple", micro_batches=4)
    step = float(plan.simulate().makespan)
    first = replace(plan.candidates[0], step_time=step, makespan=step)
    compared = replace(plan, candidates=(first, replace(first, planner="b", step_time=0.993 * step)))
    answer = printed(render_plan(compared, Scene.predicted(compared)))
    assert "a plan without recomputation or offload wins within 1%" in answer


@pytest.mark.parametrize(
    ("devices", "shown"), [("6xA100-80GB", [0, 4]), ("3xA100-40GB+3xA100-80GB", [0, 3, 4])], ids=["alike", "mixed"]
)
def test_fullest_device_of_a_type_has_a_bar(devices: str, shown: list[int]) -> None:
    plan = db.plan("llama2-7b", devices, planner="dapple", micro_batches=8)
    answer = printed(render_plan(plan, Scene.predicted(plan), details=False))
    assert [int(device) for device in re.findall(r" (\d+) [█·]+ ", answer)] == shown


@pytest.mark.parametrize(("rank", "named"), [(0, "megatron"), (8, "torch")])
def test_the_usual_framework_is_named_unless_there_are_adapters(rank: int, named: str) -> None:
    plan = db.plan("llama-tiny", "2xA100-80GB", planner="dapple", micro_batches=4, lora=rank)
    assert framework_to_plan_for(replace(plan, other_targets={"torch": 1.0, "megatron": 1.001})) == named


def search(*steps: float, fastest: float | None = None, tolerance: float = 0.02) -> DegreeSearch:
    """A search of degrees whose best choices have these steps; the first is the plan's."""
    parts = MemoryParts(weights=1, gradients=1, optimizer=1, activations=1, workspace=1)
    summary = ConfigurationSummary(
        degrees=Degrees(), step_time=1, tokens_per_second_per_device=1, mfu=0.5, peak_memory=5, memory=parts,
        planner="joint", schedule="1f1b",
    )  # fmt: skip
    return DegreeSearch(
        configurations=tuple(replace(summary, step_time=step) for step in steps),
        legal=9, too_large=0, slower=0, planned=9,
        fastest=None if fastest is None else FasterPlan(configuration=replace(summary, step_time=fastest), levers=()),
        tolerance=tolerance,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("degree_search", "beginning"),
    [
        (search(1.0, 1.03), ""),
        (search(1.0, 1.01), "  The first is taken: within 2% of the fastest the plan with the fewest"),
        (search(1.01, fastest=1.0), "  The plan has fewer levers than the fastest of these degrees, which takes 1.0%"),
        (search(1.01, 1.0, fastest=1.0), "  The first (1.0% slower) is taken: within 2% of the fastest the plan with"),
        (search(1.0, 1.005, tolerance=0.0), "  The first is the fastest that was found."),
        (search(1.0, 1.02, tolerance=0.0), ""),
    ],
)
def test_degrees_table_explains_the_choice(degree_search: DegreeSearch, beginning: str) -> None:
    words = chosen_degrees_words(degree_search)

    assert words.startswith(beginning)
    assert bool(words) == bool(beginning)


def test_the_table_of_degrees_names_levers_and_quick_plans() -> None:
    degree_search = search(1.0, 1.2)
    first, other = degree_search.configurations
    first = replace(first, levers=("pipeline 2", "recomputation"))
    shown = replace(degree_search, configurations=(first, replace(other, planner="quick plan")))

    degrees = [row[0] for row in configuration_rows(shown, None).rows]
    assert degrees == [f"{Degrees()}, recomputation", f"{Degrees()} (quick plan)"]


def test_usual_choices_are_in_the_order_of_steps() -> None:
    degree_search = search(1.0, 3.0)
    usual = (
        UsualChoice(name="too large", reason="It misses 1 GiB."),
        UsualChoice(name="FSDP", configuration=replace(degree_search.configurations[0], step_time=2.0)),
    )
    table = configuration_rows(replace(degree_search, usual=usual), None)

    assert [row[1] for row in table.rows] == ["1 s", "2 s", "3 s", "does not fit"]
    assert table.title == "Degrees: the best 2 of 9, and usual ones"


def test_times_and_sizes_are_readable() -> None:
    assert time_words(0.0123456, seconds=True) == "12.35 ms"
    assert time_words(2, seconds=True) == "2 s"
    assert time_words(3.5e-6, seconds=True) == "3.5 µs"
    assert time_words(0, seconds=True) == "0 µs"
    assert time_words(17, seconds=False) == "17"
    assert size_words(3 * 2**30) == "3.00 GiB"
    assert size_words(None) == "-"


def test_the_stages_of_a_device_make_up_the_step() -> None:
    costs = db.StageCosts.of(stages=8, forward=[1, 2, 3, 4, 4, 3, 2, 1], communication=1)
    timeline = db.simulate(db.schedules["interleaved"](devices=4, micro_batches=8, chunks=2), costs)
    stages = stage_figures(Scene(timeline, title=""))
    for device in range(4):
        device_stages = [s for s in stages if s.device == device]
        assert sum(s.compute + s.recompute + sum(s.bubbles.values()) for s in device_stages) == timeline.makespan


def all_causes() -> Timeline:
    """ChronosPipe with two chunks per device: recomputation, the optimizer of the deep chunk on the host, messages."""
    made = offload_states(db.schedules["chronos-recomp"](devices=4, micro_batches=8, chunks=2), chunks=[1])
    costs = db.StageCosts.of(
        stages=8, forward=[3, 5, 3, 5, 3, 5, 3, 5], static=60 * 2**30, activation=2**20, communication=1, host_step=90,
        gradient_offload=2, parameter_load=2, memory_limit=72 * 2**30,
    )  # fmt: skip
    return db.simulate(made, costs)


def test_the_optimizer_on_the_host_has_a_column_in_80_characters() -> None:
    scene = Scene(all_causes(), title="")
    console = Console(width=80, highlight=False)
    with console.capture() as capture:
        console.print(device_table(scene), stage_table(scene))
    assert {cause for d in device_figures(scene) for cause, time in d.bubbles.items() if time} == {
        cause.value for cause in Cause if cause is not Cause.OVERHEAD
    }
    assert capture.get().count("host") == 2
    assert "\N{HORIZONTAL ELLIPSIS}" not in capture.get()


@pytest.mark.parametrize(
    ("changes", "differ"),
    [
        ({"rope_theta": 1e4, "rms_norm_eps": 1e-6, "_name_or_path": "mine"}, False),
        ({"vocab_size": 128512}, False),
        ({"num_hidden_layers": 30}, True),
    ],
)
def test_plans_are_compared_if_their_models_cost_the_same(changes: dict[str, Any], differ: bool) -> None:
    asked: dict[str, Any] = {"micro_batches": 4, "planner": "adapipe"}
    config = db.models["llama3-8b"].config
    plans = [db.plan(db.Model.from_hf({**config, **more}), "4xH100-80GB", **asked) for more in ({}, changes)]

    text = printed(render_scenes([Scene.predicted(plan) for plan in plans]))

    assert ("Their models differ" in text) is differ


@pytest.mark.parametrize(("share", "wide"), [(0.8, True), (0.9, False)])
def test_wide_gap_suggests_a_longer_search(share: float, wide: bool) -> None:
    plan = db.plan("llama-tiny", "2xA100-80GB", micro_batches=4, sequence_length=128, effort=0.1)
    bounded = replace(plan, lower_bound=share * plan.step_time)
    text = printed(render_plan(bounded, Scene.predicted(bounded)))
    assert ("a longer search (--effort 12)" in " ".join(text.split())) == wide


@pytest.mark.parametrize(("cut_off", "remedy"), [(False, "--effort 12"), (True, "more --deadline")])
def test_unexplored_choices_name_the_remedy(cut_off: bool, remedy: str) -> None:
    plan = db.plan("llama-tiny", "2xA100-80GB", global_batch=4, sequence_length=128, effort=0.1)
    assert plan.degree_search is not None
    with_unplanned = replace(plan, degree_search=replace(plan.degree_search, unplanned=5, cut_off=cut_off))
    text = printed(render_plan(with_unplanned, Scene.predicted(with_unplanned)))
    assert f"5 choices of degrees and CPU optimizers ({remedy})" in " ".join(text.split())


def test_remaining_gap_is_named_as_the_time_a_search_may_save() -> None:
    plan = db.plan("llama-tiny", "2xA100-80GB", global_batch=4, sequence_length=128, effort=0.1)
    assert plan.degree_search is not None
    searched = replace(plan.degree_search, unplanned=0)
    bounded = replace(plan, lower_bound=0.987 * plan.step_time, degree_search=searched)
    text = printed(render_plan(bounded, Scene.predicted(bounded)))
    assert "a longer search for at most 1.3% less time (--fastest)" in " ".join(text.split())
