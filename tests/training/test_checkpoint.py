from pathlib import Path

import pytest
import torch

from debubble.ir import InputError
from debubble.runtime.parallel.pieces import Block, Piece
from debubble.training import checkpoint, checkpoint_folder
from debubble.training.checkpoint import CheckpointError, Saver
from debubble.training.checkpoint_folder import Progress

pytestmark = pytest.mark.usefixtures("process_group")


def whole(*values: float) -> Piece:
    return Piece.whole(torch.tensor(values).float())


def rows(first: int, content: list[list[float]], *, of: int) -> Piece:
    tensor = torch.tensor(content).float().reshape(-1, 2)
    blocks = (Block((0, 0), tuple(tensor.shape), (first, 0)),) if content else ()
    return Piece(tensor, torch.Size([of, 2]), blocks)


def state(value: float) -> dict[str, Piece]:
    step = Piece.whole(torch.tensor(value))
    return {"model.head.weight": whole(value, value + 1), "optimizer.head.weight.step": step}


def progress(step: int) -> Progress:
    return Progress(step=step, samples=8 * step, seed=5, model={"hidden_size": 4}, recipe={"clip": 0.5})


def save(folder: Path, content: dict[str, Piece], step: int, *, keep: int = 1) -> None:
    saver = Saver(folder, keep=keep)
    saver.save(content, progress(step))
    saver.wait()


def loaded(folder: Path) -> dict[str, Piece]:
    content = state(0.0)
    checkpoint.load(checkpoint_folder.latest(folder), content)
    return content


def test_a_checkpoint_gives_back_tensors_and_progress(tmp_path):
    save(tmp_path, state(2.5), 7)
    assert checkpoint_folder.progress_of(checkpoint_folder.latest(tmp_path)) == progress(7)
    assert loaded(tmp_path)["model.head.weight"].tensor.tolist() == [2.5, 3.5]
    assert loaded(tmp_path)["optimizer.head.weight.step"].tensor.item() == 2.5


def test_what_changes_while_a_checkpoint_is_written_is_not_in_it(tmp_path):
    content = state(2.5)
    saver = Saver(tmp_path, keep=1)
    saver.save(content, progress(1))
    content["model.head.weight"].tensor.zero_()
    saver.wait()
    assert loaded(tmp_path)["model.head.weight"].tensor.tolist() == [2.5, 3.5]


def test_a_rank_loads_only_the_names_that_it_holds(tmp_path):
    save(tmp_path, state(1.5), 1)
    part = {"model.head.weight": whole(0, 0)}
    checkpoint.load(checkpoint_folder.latest(tmp_path), part)
    assert part["model.head.weight"].tensor.tolist() == [1.5, 2.5]


@pytest.mark.parametrize(("first", "size"), [(0, 5), (0, 2), (1, 3), (4, 1), (2, 0)])
def test_any_rows_can_be_read_of_what_was_written_whole(tmp_path, first, size):
    table = [[i, i + 0.5] for i in range(5)]
    save(tmp_path, {"model.table": rows(0, table, of=5)}, 1)
    wanted = {"model.table": rows(first, [[-1.0, -1.0]] * size, of=5)}
    checkpoint.load(checkpoint_folder.latest(tmp_path), wanted)
    assert wanted["model.table"].tensor.tolist() == table[first : first + size]


def test_only_the_newest_are_kept(tmp_path):
    saver = Saver(tmp_path, keep=2)
    for step in (2, 4, 10):
        saver.save(state(step), progress(step))
    saver.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000004", "step-000010"]
    assert saver.newest == checkpoint_folder.latest(tmp_path) == tmp_path / "step-000010"


def test_an_unfinished_checkpoint_is_not_there_and_the_next_run_removes_it(tmp_path):
    save(tmp_path, state(1), 1)
    unfinished = tmp_path / ".step-000002.unfinished"
    unfinished.mkdir()
    assert checkpoint_folder.latest(tmp_path).name == "step-000001"
    Saver(tmp_path, keep=1)
    assert not unfinished.exists()


def test_a_place_that_cannot_be_written_keeps_the_old_checkpoint(tmp_path):
    save(tmp_path, state(1), 1)
    saver = Saver(tmp_path, keep=1)
    (tmp_path / ".step-000002.unfinished").write_text("in the way")
    saver.save(state(2), progress(2))
    with pytest.raises(CheckpointError, match=r"step-000002 could not be written: .*; those before it are whole"):
        saver.wait()
    assert loaded(tmp_path)["model.head.weight"].tensor.tolist() == [1.0, 2.0]


def test_a_full_disk_is_named_and_keeps_the_old_checkpoint(small_disk):
    save(small_disk, state(1), 1)
    saver = Saver(small_disk, keep=1)
    saver.save({"model.big": whole(*range(400_000))}, progress(2))
    with pytest.raises(CheckpointError, match="could not be written: the disk is full; those before it are whole"):
        saver.wait()
    assert [p.name for p in small_disk.iterdir()] == ["step-000001"]
    assert loaded(small_disk)["model.head.weight"].tensor.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"model.layers.9": whole(0)}, r"does not belong to this model: it has no 'model\.layers\.9'"),
        ({"model.head.weight": whole(0, 0, 0)}, r"has shape \[2\] there, \[3\] here"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, wanted, message):
    save(tmp_path, state(1), 1)
    with pytest.raises(InputError, match=message):
        checkpoint.load(checkpoint_folder.latest(tmp_path), wanted)


def test_a_folder_without_checkpoints_is_one_sentence(tmp_path):
    with pytest.raises(InputError, match="no checkpoint"):
        checkpoint_folder.latest(Path(tmp_path))


def test_a_checkpoint_without_its_progress_is_refused(tmp_path):
    (tmp_path / "step-000003").mkdir()
    with pytest.raises(InputError, match="not a whole checkpoint"):
        checkpoint_folder.progress_of(checkpoint_folder.latest(tmp_path))
