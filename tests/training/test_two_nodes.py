"""Two nodes as network namespaces: one dies, restarts, and the run continues."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def namespaces_are_permitted() -> bool:
    if shutil.which("ip") is None:
        return False
    name = f"debubble-test-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    return made


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not namespaces_are_permitted(), reason="needs iproute2 and the right to make network namespaces")
def test_run_on_two_nodes_survives_the_loss_of_one(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    ended = subprocess.run(
        [str(ROOT / "examples/two_nodes.sh"), str(tmp_path), "40"], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    died = re.search(r"node b has died; the newest checkpoint is step-(\d+)", ended.stdout)
    resumed = re.search(r"the run went on from step (\d+) and ended at step 40", ended.stdout)
    assert died is not None
    assert resumed is not None
    assert int(resumed[1]) >= int(died[1])
    assert int(resumed[1]) % 10 == 0
