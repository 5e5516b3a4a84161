"""Ranks in processes over Gloo match one process."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import StageCosts
from tests.support import gloo_ranks
from tests.support.covering import one_per_schedule
from tests.support.runtime_cases import plan_of, tokens_of
from tests.support.schedule_cases import explicit, offloading, on_one_link, schedule_of
from tests.support.tiny_models import GPT2, LLAMA_TIED


def check(plans: Any, folder: Any) -> None:
    batches = [tokens_of(plan.model, rows=plan.micro_batches, length=6) for plan in plans]
    gloo_ranks.assert_gradients_over_gloo(plans, batches, folder)


def test_two_gloo_ranks_match_one_process(tmp_path: Path) -> None:
    """Two of the plans send activations to a peer or share a link."""

    def made(name: Any) -> Any:
        return db.schedules[name](devices=2, micro_batches=4)

    shared = StageCosts.of(stages=2, offload=1, link_groups=[[0, 1]], host_link="half-duplex")
    plans = [plan_of(made(name), LLAMA_TIED) for name in ("interleaved", "dualpipe-v")]
    plans += [plan_of(explicit(offloading(made("1f1b"))), GPT2, strategy="full", counts=[3, 7])]
    plans += [plan_of(replace(offloading(made("gpipe")), peers={0: 1}), LLAMA_TIED)]
    plans += [plan_of(on_one_link(offloading(made("gpipe"))), LLAMA_TIED, costs=shared)]
    check(plans, tmp_path)


def test_a_run_switches_to_an_order_of_a_shared_link(tmp_path: Path) -> None:
    plain = plan_of(offloading(schedule_of("gpipe", devices=2)), LLAMA_TIED, dtype="fp32")
    paths = [tmp_path / "plain.json", tmp_path / "ordered.json"]
    for path, schedule in zip(paths, (plain.schedule, on_one_link(plain.schedule)), strict=True):
        replace(plain, schedule=schedule).save(path)
    batches = [tokens_of(plain.model, rows=4, length=6, seed=step) for step in range(2)]
    answers = gloo_ranks.spawn(2, gloo_ranks.moved, [paths, paths[:1] * 2], batches)
    (losses, _), (expected, _) = torch.load(answers / "rank0.pt")
    assert losses == expected


@pytest.mark.slow
def test_all_schedules_on_four_gloo_ranks_match_one_process(tmp_path: Path) -> None:
    check([replace(case, devices=4).plan() for case in one_per_schedule(first_family=1)], tmp_path)


def test_death_of_a_peer_is_reported_at_once(tmp_path: Path) -> None:
    plan = plan_of(db.schedules["1f1b"](devices=2, micro_batches=4), LLAMA_TIED)
    plan.save(tmp_path / "plan.json")
    answers = gloo_ranks.spawn(
        2, gloo_ranks.die_in_the_second_step, tmp_path / "plan.json", tokens_of(LLAMA_TIED, rows=4)
    )
    # Which of the two depends on how fast the peer died.
    assert re.search("onnection (closed|reset)", (answers / "told").read_text())
