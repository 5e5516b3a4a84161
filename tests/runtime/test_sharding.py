"""torch's tools see the sharded parameters of a pipeline as DTensors of the full parameters."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import debubble as db
from tests.support import gloo_ranks
from tests.support.reference_model import ReferenceModel
from tests.support.runtime_cases import assert_gradients, plan_of, reference_gradients, run_threads, tokens_of, train
from tests.support.tiny_models import GPT2, LLAMA, MIXTRAL

FAMILIES = {"llama": LLAMA, "mixtral": MIXTRAL}
TOKENS = tokens_of(LLAMA, rows=2)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder, and by family the answers of two Gloo ranks."""
    folder, schedule = tmp_path_factory.mktemp("plans"), db.schedules["1f1b"](devices=1, micro_batches=2)
    plans = {name: folder / f"{name}.json" for name in FAMILIES}
    for name, path in plans.items():
        plan_of(schedule, FAMILIES[name], tensor=2).save(path)
    answers_folder = gloo_ranks.spawn(2, gloo_ranks.as_torch_sees_them, plans, TOKENS)
    ranks = [torch.load(answers_folder / f"rank{rank}.pt") for rank in range(2)]
    return answers_folder, {name: [rank[name] for rank in ranks] for name in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_full_gradients_and_norm_match_one_process(family: Any, answers: Any) -> None:
    _, expected = reference_gradients(FAMILIES[family], TOKENS, micro_batches=2)
    distinct = {id(gradient): gradient for gradient in expected.values()}.values()
    norm = torch.stack([gradient.square().sum() for gradient in distinct]).sum().sqrt()
    for answer in answers[1][family]:
        assert answer["mesh"] == {"dp": 1, "pp": 1, "tp": 2}
        torch.testing.assert_close(answer["norm"], norm, rtol=1e-12, atol=0)
        assert_gradients(answer["gradients"], expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_checkpoint_loads_sharded_and_full(answers: Any) -> None:
    folder, by_family = answers
    expected = by_family["llama"][0]["before"]
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    for name, tensor in expected.items():
        assert torch.equal(by_family["llama"][1]["again"][name], tensor), name
        assert torch.equal(state[name], tensor), name


def test_optimizer_of_full_matrices_gets_them(answers: Any) -> None:
    """Muon makes an update orthogonal, and the update of a shard is not a shard of the full update."""
    model = ReferenceModel(LLAMA, dtype=torch.float64)
    _, gradients = reference_gradients(LLAMA, TOKENS, micro_batches=2)
    parameters = model.hf_parameters()
    for name, parameter in parameters.items():
        parameter.grad = gradients[name]
    torch.optim.Muon([p for p in parameters.values() if p.dim() == 2], lr=0.1).step()
    for answer in answers[1]["llama"]:
        for name, tensor in answer["after"].items():
            update = parameters[name].detach() - answer["before"][name]
            # It orthogonalizes in bf16; updates of separate shards would be off by 0.6 to 0.95.
            assert (tensor - parameters[name].detach()).norm() <= 0.2 * update.norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"data": 2, "zero": 2}, {"dtype": "bf16"}], ids=["whole", "zero", "bf16"])
def test_training_with_dtensors_matches_plain_shards(options: Any, tmp_path: Path) -> None:
    """Parameters are DTensors over Gloo and plain shards over threads."""
    schedule, batches = (
        db.schedules["1f1b"](devices=2, micro_batches=2),
        [tokens_of(LLAMA, rows=4, seed=i) for i in (1, 2, 3)],
    )
    plans = [plan_of(schedule, config, tensor=2, **options) for config in (GPT2, MIXTRAL)]
    for number, plan in enumerate(plans):
        plan.save(tmp_path / f"{number}.json")
    folder = gloo_ranks.spawn(plans[0].ranks, gloo_ranks.trained, [tmp_path / "0.json", tmp_path / "1.json"], batches)

    make = partial(torch.optim.AdamW, lr=1e-2, fused=True)
    for number, plan in enumerate(plans):
        expected = run_threads(plan, lambda p: train(p, batches, max_norm=0.5), optimizer=make)
        for rank in range(plan.ranks):
            synchronous, ahead = torch.load(folder / f"rank{rank}.pt")[number]
            assert synchronous == ahead == pytest.approx(expected[rank], rel=1e-12)
