"""Training through random disturbances, seeded: killed and stopped ranks, a killed launcher, a full disk, slow ranks.

A small model trains on two ranks.  Every so often something happens to it; a run that ends is started again with
`--auto-resume`.  At the end the losses must be those of a run that nothing happened to, no process may be left, and
every end must have been explained in one sentence, with a checkpoint not older than the last one before it.  A full
disk needs leave to mount a file system in memory, and is left out without.

Then runs of twenty layouts are killed at random points of their start, steps, saves and end, and resumed
(`soak_kills.py`).  Writes `benchmarks/results/soak.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from provenance import measured_by
from soak_kills import LAYOUTS, MOMENTS, TRAIN, Kill, kill_runs, newest

import debubble as db

MODEL = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
TEXT = "".join(f"{i} green bottles, hanging on the wall;\n" for i in range(2000))
RANKS, SAVE_EVERY, HANG_TIMEOUT, PATIENCE = 2, 40, 8, 180


@dataclass
class Event:
    """Something that happened to the run, and how it ended."""

    what: str
    checkpoint: int
    """Steps of the newest checkpoint when it happened."""
    exit_code: int | None
    """None: the run went on."""
    resumed_from: int | None
    """Steps of the checkpoint that the next run began with."""
    explained: str
    """The last line on standard error."""
    left: int
    """Processes of the run that were left ten seconds later."""
    seconds: float
    """From what happened to the end of the launcher."""


def children(process: int) -> list[int]:
    """The processes that this one has started and that still run, and theirs."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == process and fields[0] != "Z":
                found += [int(entry.name), *children(int(entry.name))]
    return found


def is_rank(process: int) -> bool:
    """Tell whether a process is a rank of the training."""
    try:
        return b"debubble.training.rank" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A file system of 16 MiB at this folder; False if it may not be mounted."""
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], stderr=subprocess.DEVNULL, check=False
        ).returncode
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


class Soak:
    """One run through disturbances, in a folder of its own."""

    def __init__(self, folder: Path, checkpoints: Path, *, steps: int, chance: random.Random) -> None:
        self.folder, self.checkpoints, self.steps, self.chance = folder, checkpoints, steps, chance
        self.events: list[Event] = []

    def command(self, *more: str) -> list[str]:
        """The command line of a run to the end."""
        texts = ["--data", str(self.folder / "text.txt"), "--steps", str(self.steps), "--json"]
        return [*TRAIN, str(self.folder / "plan.json"), *texts, "--hang-timeout", str(HANG_TIMEOUT), *more]

    def run(self, disturbances: list[Callable[[subprocess.Popen[str]], str]]) -> list[float]:
        """Train to the end, with these disturbances after each other.  Returns the losses of the last run."""
        process = self._start()
        for disturb in disturbances:
            self._wait_for(newest(self.checkpoints) + SAVE_EVERY * self.chance.randint(1, 3), process)
            time.sleep(self.chance.random())
            before, known, begin = newest(self.checkpoints), children(process.pid), time.monotonic()
            what = disturb(process)
            if what.startswith("slowed"):
                self.events.append(Event(what, before, None, None, "", 0, 0.0))
                continue
            _, said = process.communicate(timeout=PATIENCE)
            seconds = time.monotonic() - begin
            time.sleep(10)
            left = [p for p in known if Path(f"/proc/{p}").exists() and is_rank(p)]
            (self.folder / "stuff").unlink(missing_ok=True)
            (self.checkpoints / "stuff").unlink(missing_ok=True)
            lines = [line for line in said.strip().splitlines() if not line.startswith("step ")]
            resumed = newest(self.checkpoints)
            self.events.append(
                Event(what, before, process.returncode, resumed, lines[-1] if lines else "", len(left), seconds)
            )
            print(self.events[-1], file=sys.stderr, flush=True)
            process = self._start()
        out, _ = process.communicate(timeout=10 * PATIENCE)
        losses: list[float] = json.loads(out)["losses"]
        return losses

    def _start(self) -> subprocess.Popen[str]:
        more = ["--checkpoint", str(self.checkpoints), "--save-every", str(SAVE_EVERY), "--auto-resume"]
        return subprocess.Popen(self.command(*more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def _wait_for(self, step: int, process: subprocess.Popen[str]) -> None:
        while newest(self.checkpoints) < min(step, self.steps - 2 * SAVE_EVERY) and process.poll() is None:
            time.sleep(0.05)

    def disturbances(self, *, full_disk: bool) -> list[Callable[[subprocess.Popen[str]], str]]:
        """What may happen, each at least once, in a random order."""
        what: list[Callable[[subprocess.Popen[str]], str]] = [
            self.kill_rank,
            self.kill_rank,
            self.kill_launcher,
            self.interrupt,
            self.stop_rank,
            self.slow_rank,
            self.slow_rank,
        ]
        what += [self.fill_disk] if full_disk else []
        self.chance.shuffle(what)
        return what

    def _rank(self, process: subprocess.Popen[str]) -> int:
        ranks = sorted(p for p in children(process.pid) if is_rank(p))
        return self.chance.choice(ranks)

    def kill_rank(self, process: subprocess.Popen[str]) -> str:
        """SIGKILL for a rank."""
        os.kill(self._rank(process), signal.SIGKILL)
        return "killed a rank"

    def kill_launcher(self, process: subprocess.Popen[str]) -> str:
        """SIGKILL for the launcher."""
        process.kill()
        return "killed the launcher"

    def interrupt(self, process: subprocess.Popen[str]) -> str:
        """Ctrl-C for the launcher."""
        process.send_signal(signal.SIGINT)
        return "interrupted the launcher"

    def stop_rank(self, process: subprocess.Popen[str]) -> str:
        """SIGSTOP for a rank, which does not answer from then on."""
        os.kill(self._rank(process), signal.SIGSTOP)
        return "stopped a rank for good"

    def slow_rank(self, process: subprocess.Popen[str]) -> str:
        """A rank that stands still now and then."""
        rank = self._rank(process)
        for _ in range(4):
            os.kill(rank, signal.SIGSTOP)
            time.sleep(0.5)
            os.kill(rank, signal.SIGCONT)
            time.sleep(0.2)
        return "slowed a rank down"

    def fill_disk(self, process: subprocess.Popen[str]) -> str:
        """A disk without room for another checkpoint."""
        with (self.checkpoints / "stuff").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return "filled the disk"


def plan_file(path: Path) -> None:
    """Write a 1F1B plan of the model for two ranks."""
    model, cluster = db.Model.from_hf(MODEL), db.Cluster.parse(f"{RANKS}xCPU")
    db.plan(model, cluster, sequence_length=32, dtype="fp32", micro_batches=4, planner="dapple").save(path)


def soak_one(steps: int, seed: int) -> tuple[dict[str, Any], bool]:
    """One run through disturbances: what came of it, and whether all was well."""
    with tempfile.TemporaryDirectory() as name:
        folder, checkpoints = Path(name), Path(name) / "checkpoints"
        checkpoints.mkdir()
        (folder / "text.txt").write_text(TEXT)
        plan_file(folder / "plan.json")
        soak = Soak(folder, checkpoints, steps=steps, chance=random.Random(seed))
        undisturbed = json.loads(subprocess.run(soak.command(), capture_output=True, text=True, check=True).stdout)
        with small_disk(checkpoints) as full_disk:
            losses = soak.run(soak.disturbances(full_disk=full_disk))
    same = losses == undisturbed["losses"][-len(losses) :]
    ends = [event for event in soak.events if event.exit_code is not None]
    result: dict[str, Any] = {
        "steps": steps,
        "seed": seed,
        "losses_equal": same,
        "steps_after_the_last_end": len(losses),
        "older_checkpoints": [event.what for event in ends if (event.resumed_from or 0) < event.checkpoint],
        "processes_left": sum(event.left for event in ends),
        "unexplained": [e.what for e in ends if not e.explained and e.what != "killed the launcher"],
        "events": [asdict(event) for event in soak.events],
    }
    return result, same and not any(result[name] for name in ("older_checkpoints", "processes_left", "unexplained"))


def soak_layouts(count: int, seed: int) -> tuple[dict[str, Any], bool]:
    """So many kills over all layouts: what came of them, and whether all was well."""
    kills: list[Kill] = []
    equal: list[bool] = []
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "text.txt").write_text(TEXT)
        layouts = kill_runs(count, Path(name), model=MODEL, text=Path(name) / "text.txt", chance=random.Random(seed))
        for of_layout, same in layouts:
            kills, equal = [*kills, *of_layout], [*equal, same]
            print(*of_layout, f"losses equal: {same}", sep="\n", file=sys.stderr, flush=True)
    tried = [layout.name for layout in LAYOUTS[: len(equal)]]
    result: dict[str, Any] = {
        "kills": len(kills),
        "layouts": len(equal),
        "layouts_with_other_losses": [name for name, same in zip(tried, equal, strict=True) if not same],
        "lost_more_than_an_interval": [asdict(kill) for kill in kills if kill.lost_more],
        "unexplained": [asdict(kill) for kill in kills if not kill.explained],
        "orphans": sum(kill.orphans for kill in kills),
        "longest_end_seconds": max((kill.seconds for kill in kills), default=0.0),
        "had_ended": sum(kill.exit_code == 0 for kill in kills),
        "by_moment": {moment: sum(kill.moment == moment for kill in kills) for moment in MOMENTS},
    }
    wrong = ("layouts_with_other_losses", "lost_more_than_an_interval", "unexplained", "orphans")
    return result, not any(result[name] for name in wrong)


def main() -> None:
    """Run both soaks, and print and save what came of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="of the run through disturbances; 0: leave it out")
    parser.add_argument("--kills", type=int, default=200, help="over all layouts; 0: leave them out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results") / "soak.json")
    arguments = parser.parse_args()
    # What is left out stays as it was found before.
    found = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    well = True
    if arguments.steps:
        one, well = soak_one(arguments.steps, arguments.seed)
        found = {**one, **measured_by(), "killed_layouts": found.get("killed_layouts")}
    if arguments.kills:
        layouts, all_well = soak_layouts(arguments.kills, arguments.seed)
        well = well and all_well
        found["killed_layouts"] = {**layouts, **measured_by()}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
