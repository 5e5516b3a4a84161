"""Code in the documentation runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked import run_forked

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def losses_in(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", printed)]


@pytest.mark.slow
def test_the_example_of_a_loop_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_forked(ROOT / "examples/own_loop.py", ranks=2)
    losses = losses_in(capsys.readouterr().out)
    assert len(losses) == 10
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "needs", "launcher"),
    [
        ("accelerate_loop.py", "accelerate", TORCHRUN),
        ("lightning_loop.py", "lightning_fabric", []),
        ("torchtitan_trainer.py", "torchtitan", TORCHRUN),
    ],
)
def test_the_example_of_another_frameworks_loop_learns(
    example: str, needs: str, launcher: list[str], tmp_path: Path
) -> None:
    pytest.importorskip(needs)
    command = [sys.executable, *launcher, str(ROOT / "examples" / example)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    losses = losses_in(ended.stdout)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert len(losses) == 10
    assert losses[-1] < losses[0]


def test_first_readme_snippet_prints_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uses a built-in model instead of the reader's config, and a planner without a search."""
    snippet = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    snippet = snippet.replace('db.Model.from_hf("config.json")', 'db.models["llama2-13b"]')
    snippet = snippet.replace("sequence_length=4096)", 'sequence_length=4096, planner="merak")')
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1] == "117"
    assert (tmp_path / "plan.json").exists()
