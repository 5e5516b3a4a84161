from pathlib import Path

import pytest
import torch

from debubble.ir import InputError
from debubble.training import checkpoint
from debubble.training.checkpoint import CheckpointError, Progress

pytestmark = pytest.mark.usefixtures("process_group")


def state(value: float) -> dict:
    return {
        "model": {"embed.weight": torch.full((3, 2), value), "head.weight": torch.full((2,), value)},
        "optimizer": {"head.weight.step": torch.tensor(value), "head.weight.exp_avg": torch.full((2,), value)},
    }


def progress(step: int) -> Progress:
    return Progress(step=step, samples=8 * step, seed=5, model={"hidden_size": 4})


def test_a_checkpoint_gives_back_tensors_and_progress(tmp_path):
    checkpoint.save(tmp_path, state(2.5), progress(7), keep=1)
    newest = checkpoint.latest(tmp_path)
    assert checkpoint.progress_of(newest) == progress(7)
    loaded = state(0.0)
    checkpoint.load(newest, loaded)
    assert torch.equal(loaded["model"]["embed.weight"], torch.full((3, 2), 2.5))
    assert loaded["optimizer"]["head.weight.step"].item() == 2.5


def test_a_rank_loads_only_the_names_that_it_holds(tmp_path):
    checkpoint.save(tmp_path, state(1.5), progress(1), keep=1)
    part = {"model": {"head.weight": torch.zeros(2)}}
    checkpoint.load(checkpoint.latest(tmp_path), part)
    assert part["model"]["head.weight"].tolist() == [1.5, 1.5]


def test_only_the_newest_are_kept(tmp_path):
    for step in (2, 4, 10):
        checkpoint.save(tmp_path, state(step), progress(step), keep=2)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["step-000004", "step-000010"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000004", "step-000010"]


def test_an_unfinished_checkpoint_is_not_there(tmp_path):
    checkpoint.save(tmp_path, state(1), progress(1), keep=2)
    (tmp_path / ".step-000002.unfinished").mkdir()
    assert checkpoint.latest(tmp_path).name == "step-000001"


def test_a_place_that_cannot_be_written_keeps_the_old_checkpoint(tmp_path):
    checkpoint.save(tmp_path, state(1), progress(1), keep=1)
    (tmp_path / ".step-000002.unfinished").write_text("in the way")
    with pytest.raises(CheckpointError, match="could not be written"):
        checkpoint.save(tmp_path, state(2), progress(2), keep=1)
    loaded = state(0.0)
    checkpoint.load(checkpoint.latest(tmp_path), loaded)
    assert loaded["model"]["head.weight"].tolist() == [1.0, 1.0]


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    checkpoint.save(tmp_path, state(1), progress(1), keep=1)
    with pytest.raises(InputError, match=r"does not belong to this model: .*layers\.9"):
        checkpoint.load(checkpoint.latest(tmp_path), {"model": {"layers.9.weight": torch.zeros(2)}})


def test_a_folder_without_checkpoints_is_one_sentence(tmp_path):
    with pytest.raises(InputError, match="no checkpoint"):
        checkpoint.latest(Path(tmp_path))


def test_a_checkpoint_without_its_progress_is_refused(tmp_path):
    (tmp_path / "step-000003").mkdir()
    with pytest.raises(InputError, match="not a whole checkpoint"):
        checkpoint.progress_of(checkpoint.latest(tmp_path))
