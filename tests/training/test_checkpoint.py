import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from debubble.ir import InputError
from debubble.runtime.distributed.sharding import ShardBlock, TensorShard
from debubble.training import resume as checkpoint
from debubble.training.checkpoint import folder as checkpoint_folder
from debubble.training.checkpoint.folder import DamagedError, Digest, RunProgress, SavedRecipe
from debubble.training.checkpoint.saver import CheckpointError, Saver
from tests.support import gloo_ranks

pytestmark = pytest.mark.usefixtures("process_group")


def full_shard(*values: float) -> TensorShard:
    return TensorShard.unsharded(torch.tensor(values).float())


def rows(first: int, content: list[list[float]], *, row_count: int) -> TensorShard:
    tensor = torch.tensor(content).float().reshape(-1, 2)
    blocks = (ShardBlock((0, 0), tuple(tensor.shape), (first, 0)),) if content else ()
    return TensorShard(tensor, torch.Size([row_count, 2]), blocks)


def state(value: float) -> dict[str, TensorShard]:
    step = TensorShard.unsharded(torch.tensor(value))
    return {"model.head.weight": full_shard(value, value + 1), "optimizer.head.weight.step": step}


def progress(step: int) -> RunProgress:
    return RunProgress(step=step, samples=8 * step, seed=5, model={"hidden_size": 4}, recipe=SavedRecipe(clip=0.5))


def save(folder: Path, content: dict[str, TensorShard], step: int, *, keep: int = 1) -> None:
    saver = Saver(folder, keep=keep)
    saver.save(content, progress(step))
    saver.wait()


def loaded(folder: Path) -> dict[str, TensorShard]:
    content = state(0.0)
    checkpoint.load(checkpoint_folder.latest(folder), content)
    return content


def test_a_checkpoint_gives_back_tensors_and_progress(tmp_path: Path) -> None:
    save(tmp_path, state(2.5), 7)
    assert checkpoint_folder.progress_of(checkpoint_folder.latest(tmp_path)) == progress(7)
    assert loaded(tmp_path)["model.head.weight"].tensor.tolist() == [2.5, 3.5]
    assert loaded(tmp_path)["optimizer.head.weight.step"].tensor.item() == 2.5


@pytest.mark.parametrize(
    ("written", "masters", "message"),
    [
        (torch.float32, "bf16", "fp32 weights and optimizer states are rounded to bf16"),
        (torch.bfloat16, "fp32", "fp32 masters are made of them"),
        (torch.float32, "fp32", None),
        (torch.bfloat16, "bf16", None),
    ],
)
def test_changed_master_dtypes_are_noted(tmp_path: Path, written: Any, masters: str, message: str | None) -> None:
    save(tmp_path, {"model.head.weight": TensorShard.unsharded(torch.zeros(2, dtype=written))}, 1)
    note = checkpoint.precision_note(checkpoint_folder.latest(tmp_path), masters)
    assert note is None if message is None else message in str(note)


def test_checkpoint_excludes_changes_during_the_write(tmp_path: Path) -> None:
    content = state(2.5)
    saver = Saver(tmp_path, keep=1)
    saver.save(content, progress(1))
    content["model.head.weight"].tensor.zero_()
    saver.wait()
    assert loaded(tmp_path)["model.head.weight"].tensor.tolist() == [2.5, 3.5]


@pytest.mark.parametrize(("first", "size"), [(0, 5), (1, 3), (2, 0)])
def test_any_rows_of_a_full_tensor_can_be_read(tmp_path: Path, first: int, size: int) -> None:
    table = [[i, i + 0.5] for i in range(5)]
    save(tmp_path, {"model.table": rows(0, table, row_count=5)}, 1)
    wanted = {"model.table": rows(first, [[-1.0, -1.0]] * size, row_count=5)}
    checkpoint.load(checkpoint_folder.latest(tmp_path), wanted)
    assert wanted["model.table"].tensor.tolist() == table[first : first + size]


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    saver = Saver(tmp_path, keep=2)
    for step in (2, 4, 10):
        saver.save(state(step), progress(step))
    saver.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000004", "step-000010"]
    assert saver.newest == checkpoint_folder.latest(tmp_path) == tmp_path / "step-000010"


def test_an_unfinished_checkpoint_is_removed_by_the_next_run(tmp_path: Path) -> None:
    save(tmp_path, state(1), 1)
    unfinished = tmp_path / ".step-000002.unfinished"
    unfinished.mkdir()
    assert checkpoint_folder.latest(tmp_path).name == "step-000001"
    Saver(tmp_path, keep=1)
    assert not unfinished.exists()


def test_failed_write_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, state(1), 1)
    saver = Saver(tmp_path, keep=1)
    (tmp_path / ".step-000002.unfinished").write_text("in the way")
    saver.save(state(2), progress(2))
    with pytest.raises(CheckpointError, match=r"step-000002 could not be written: .*; those before it are whole"):
        saver.wait()
    assert loaded(tmp_path)["model.head.weight"].tensor.tolist() == [1.0, 2.0]


def test_a_full_disk_is_named_and_keeps_the_old_checkpoint(small_disk: Any) -> None:
    save(small_disk, state(1), 1)
    saver = Saver(small_disk, keep=1)
    saver.save({"model.big": full_shard(*range(400_000))}, progress(2))
    with pytest.raises(CheckpointError, match="could not be written: the disk is full; those before it are whole"):
        saver.wait()
    assert [p.name for p in small_disk.iterdir()] == ["step-000001"]
    assert loaded(small_disk)["model.head.weight"].tensor.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"model.layers.9": full_shard(0)}, r"does not belong to this model: it has no 'model\.layers\.9'"),
        ({"model.head.weight": full_shard(0, 0, 0)}, r"has shape \[2\] there, \[3\] here"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, wanted: Any, message: str) -> None:
    save(tmp_path, state(1), 1)
    with pytest.raises(InputError, match=message):
        checkpoint.load(checkpoint_folder.latest(tmp_path), wanted)


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for step in (1_000_000, 999_999, 1):
        (tmp_path / f"step-{step:06d}").mkdir()
    assert [p.name for p in checkpoint_folder.checkpoints(tmp_path)] == ["step-000001", "step-999999", "step-1000000"]


SHARD = "__0_0.distcp"


def flip(path: Any) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


def cut(path: Any) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero(path: Any) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(
    ("damage", "name", "message", "manifest"),
    [
        (flip, SHARD, "", True),
        (cut, ".metadata", "", True),
        (zero, "progress.json", "", True),
        (Path.unlink, SHARD, "", True),
        (cut, "manifest.json", "cannot be read", True),
        (cut, SHARD, "bytes instead of", False),
        (Path.unlink, SHARD, "is missing", False),
    ],
)
def test_damage_is_refused_and_the_file_named(
    tmp_path: Path, damage: Any, name: str, message: str, manifest: bool
) -> None:
    save(tmp_path, state(1), 1)
    newest = checkpoint_folder.latest(tmp_path)
    if not manifest:  # As earlier versions wrote checkpoints.
        (newest / "manifest.json").unlink()
    assert checkpoint.verify(newest) == manifest
    damage(newest / name)
    with pytest.raises(DamagedError, match=rf"step-000001 is damaged: .*{re.escape(name)}.*{message}"):
        checkpoint.verify(newest)


def without_manifest(folder: Any) -> Any:
    """A checkpoint as earlier versions wrote it."""
    save(folder, state(1.5), 1)
    newest = checkpoint_folder.latest(folder)
    (newest / "manifest.json").unlink()
    return newest


def test_a_checkpoint_without_a_manifest_is_loaded_unchecked(tmp_path: Path) -> None:
    assert not checkpoint.verify(without_manifest(tmp_path))
    assert loaded(tmp_path)["model.head.weight"].tensor.tolist() == [1.5, 2.5]


def test_unreadable_tensors_are_reported_as_damage(tmp_path: Path) -> None:
    newest = without_manifest(tmp_path)
    zero(newest / SHARD)
    with pytest.raises(DamagedError, match=r"step-000001 is damaged: its tensors cannot be read \(UnpicklingError\)"):
        checkpoint.load(newest, state(0))


class Payload:
    """Runs a command when unpickled."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> Any:
        return os.system, (self._command,)


def crafted(folder: Any, *, listed: bool) -> Any:
    """A checkpoint with a metadata file that touches `ran`; `listed`: its checksum is in the manifest."""
    newest = without_manifest(folder)
    (newest / ".metadata").write_bytes(pickle.dumps(Payload(f"touch {folder / 'ran'}")))
    if listed:
        names = (SHARD, ".metadata", "progress.json")
        checkpoint_folder.write_manifest(newest, {name: Digest.from_file(newest / name) for name in names})
    return newest


@pytest.mark.parametrize(
    ("read", "listed"), [(checkpoint.verify, True), (lambda newest: checkpoint.load(newest, state(0)), False)]
)
def test_metadata_with_code_is_refused_and_not_run(tmp_path: Path, read: Any, listed: bool) -> None:
    newest = crafted(tmp_path, listed=listed)
    with pytest.raises(DamagedError, match=r"\.metadata names (posix|nt)\.system, which no checkpoint does"):
        read(newest)
    assert not (tmp_path / "ran").exists()


def verified(rank: Any, folder: Any, newest: Any) -> None:
    """This rank's verdict on a checkpoint."""
    try:
        checkpoint.verify(newest)
    except DamagedError as error:
        (folder / f"rank{rank}").write_text(str(error))


@pytest.mark.parametrize("name", ["__0_0.distcp", "progress.json"])
def test_all_ranks_report_damage_that_one_read(tmp_path: Path, name: str) -> None:
    """Two ranks share three files; the shard and the progress are read by different ranks."""
    save(tmp_path, state(1), 1)
    newest = checkpoint_folder.latest(tmp_path)
    flip(newest / name)
    answers = gloo_ranks.spawn(2, verified, newest)
    first, second = ((answers / f"rank{rank}").read_text() for rank in range(2))
    assert (
        first
        == second
        == f"The checkpoint {newest} is damaged: the checksum of {name} is not that of what was written."
    )


def test_a_checkpoint_without_its_progress_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step-000003").mkdir()
    with pytest.raises(InputError, match="not a whole checkpoint"):
        checkpoint_folder.progress_of(checkpoint_folder.latest(tmp_path))
