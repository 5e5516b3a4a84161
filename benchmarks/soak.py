"""Training runs of twenty layouts through random disturbances, seeded: what each says, what it loses, what it leaves.

    python benchmarks/soak.py [LAYOUT ...]

A small model trains.  At a random point of its start, steps, saves or end a rank or the launcher is killed, or a rank
stops for good, or stands still now and then, or the disk is full; the run is resumed from its newest checkpoint.  A
layout is well if every run began with the step after the newest checkpoint, no disturbance cost more than an interval
between checkpoints besides the steps taken while one was written, no process was left ten seconds later, nothing but
the cause was reported, and the losses at the end are, to the bit, those of a run that nothing happened to.  A full
disk needs leave to mount a file system in memory; without, other disturbances take its place.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmark import Benchmark, Row, table
from even_plan import even_plan

import debubble as db
from debubble.ir import PlannedUnit, RunOptions

TRAIN = [sys.executable, "-P", "-m", "debubble", "train"]
MODEL = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
WANDB = """
from pathlib import Path

def init(project, config):
    return Run(project)

class Run:
    def __init__(self, project):
        self.file = Path(project).open("w", buffering=1)

    def log(self, figures, step):
        print(step, file=self.file)

    def finish(self, exit_code):
        pass
"""
"""A fake module of Weights & Biases that records every step, as the printed lines omit some."""
TEXT = "".join(f"{i} green bottles, hanging on the wall;\n" for i in range(2000))
STEPS = 100
"""Steps of a run, which take some seconds; most disturbances come before the last."""
SEED, DISTURBANCES, TIMEOUT, ORPHAN_SECONDS, HANG_TIMEOUT = 0, 10, 180, 10, 8
MARK = "DEBUBBLE_SOAK_RUN"
"""Environment variable that marks all processes of a run, whatever their parent."""
MOMENTS = {"start": 8.0, "step": 0.5, "save": 0.02, "end": 1.5}
"""Longest wait in seconds after the moment has come."""
KINDS = (
    ("rank", "SIGKILL"), ("rank", "SIGTERM"), ("rank", "SIGSEGV"), ("launcher", "SIGKILL"), ("launcher", "SIGTERM"),
    ("launcher", "SIGINT"), ("launcher", "SIGUSR1"), ("rank", "SIGSTOP"), ("rank", "slow"), ("disk", "full"),
)  # fmt: skip
"""Victim and kind of disturbance."""


@dataclass(frozen=True)
class Layout:
    """Parallelism and options of a small model's training."""

    schedule: str = "1f1b"
    devices: int = 2
    options: RunOptions = field(default_factory=RunOptions)
    arguments: tuple[str, ...] = ()
    save_every: int = 3

    def save(self, path: Path) -> None:
        """Write its plan."""
        schedule = db.schedules[self.schedule](devices=self.devices, micro_batches=4)
        halves = [PlannedUnit(kind, layer) for layer in range(2) for kind in ("attention", "mlp")]
        units = [PlannedUnit("embedding", None), *halves, PlannedUnit("head", None)]
        costs = db.StageCosts.of(stages=schedule.stages, static=2, gathered=1 if self.options.zero == 3 else 0)
        options = replace(self.options, sequence_length=32, dtype="fp32")
        ranks = self.devices * options.data * options.tensor * options.context
        cluster = db.Cluster.parse(f"{ranks}xCPU")
        even_plan(schedule, units, options, model=MODEL, costs=costs, cluster=cluster).save(path)


def layout_of(entry: dict[str, Any]) -> Layout:
    """Parse a layout of the file."""
    options = RunOptions(**entry.get("options", {}))
    return Layout(**{**entry, "options": options, "arguments": tuple(entry.get("arguments", ()))})


LAYOUTS = {
    name: layout_of(entry)
    for name, entry in json.loads((Path(__file__).parent / "cases" / "soak.json").read_text()).items()
}


def newest(folder: Path) -> int:
    """Step of the newest complete checkpoint."""
    complete = [p for p in folder.glob("step-*") if (p / "manifest.json").exists()]
    return max((int(p.name.removeprefix("step-")) for p in complete), default=0)


def processes_of(run: str) -> dict[int, bool]:
    """Processes of a run, and whether each is a rank."""
    processes = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and f"{MARK}={run}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                processes[int(entry.name)] = b"debubble.training.rank" in (entry / "cmdline").read_bytes()
    return processes


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a file system of 16 MiB at this folder; False if that is not permitted."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and not subprocess.run(mount, stderr=subprocess.DEVNULL).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


class Runs:
    """Runs of one layout, each of which continues from the last checkpoint of the previous one."""

    def __init__(self, layout: Layout, folder: Path, chance: random.Random) -> None:
        self.layout, self.folder, self.checkpoints, self.chance = layout, folder, folder / "checkpoints", chance
        (folder / "text.txt").write_text(TEXT)
        (folder / "wandb.py").write_text(WANDB)
        layout.save(folder / "plan.json")
        self._log, self._taken, self._run, self._steps = folder / "log", folder / "steps", 0, 0

    def disturb(self, moment: str, victim: str, how: str) -> Row:
        """Start a run, disturb it, and collect the outcome."""
        before = newest(self.checkpoints)
        self._steps = before + STEPS
        process = self._start(self._saving(before))
        self._await(moment, process, before)
        newest_before, begin = newest(self.checkpoints), time.monotonic()
        if process.poll() is None:
            self._harm(process, victim, how)
        code = self._end_of(process)
        seconds = time.monotonic() - begin
        (self.checkpoints / "stuff").unlink(missing_ok=True)
        log, after = self._log.read_text(), newest(self.checkpoints)
        messages = [line for line in log.splitlines() if not re.match(r"step \d+[/:]", line)]
        taken = [int(step) for step in self._taken.read_text().split()] if self._taken.exists() else []
        reported = max(taken, default=before)
        return {
            "moment": moment, "victim": victim, "how": how, "exit_code": code, "said": messages,
            "explained": explains(messages, code, victim, how, began=bool(taken)), "before": before, "steps": reported,
            "checkpoint": after, "resumed": taken[:1] in ([], [before + 1]),
            "lost_more": after < max(newest_before, certain_checkpoint(reported, self.layout.save_every)),
            "orphans": self._orphans(), "seconds": round(seconds, 2),
        }  # fmt: skip

    def finish(self) -> bool:
        """Run to the end; returns whether the losses are those of an undisturbed run."""
        before = newest(self.checkpoints)
        self._steps = before + self.layout.save_every + 12
        resumed, uninterrupted = self._losses(self._saving(before)), self._losses(())
        return resumed == uninterrupted[before:] and len(resumed) == self._steps - before

    def _saving(self, before: int) -> Sequence[str]:
        resume = ["--resume"] if before else []
        return "--checkpoint", str(self.checkpoints), "--save-every", str(self.layout.save_every), *resume

    def _start(self, more: Sequence[str]) -> subprocess.Popen[str]:
        self._run += 1
        self._taken.unlink(missing_ok=True)
        options = ["--data", str(self.folder / "text.txt"), "--steps", str(self._steps), "--lr-schedule", "constant"]
        options += ["--warmup", "2", "--hang-timeout", str(HANG_TIMEOUT), "--json", *self.layout.arguments, *more]
        options += ["--wandb", str(self._taken)]
        path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH")]))
        with self._log.open("w") as log, (self.folder / "answer").open("w") as answer:
            return subprocess.Popen(
                [*TRAIN, str(self.folder / "plan.json"), *options], stdout=answer, stderr=log, text=True,
                env={**os.environ, MARK: self._name, "PYTHONPATH": path}, start_new_session=True,
            )  # fmt: skip

    @property
    def _name(self) -> str:
        return f"{self.folder}/{self._run}"

    def _losses(self, more: Sequence[str]) -> list[float]:
        if self._start(more).wait(timeout=5 * TIMEOUT):
            print(self._log.read_text(), file=sys.stderr)
            return []
        losses: list[float] = json.loads((self.folder / "answer").read_text())["losses"]
        return losses

    def _await(self, moment: str, process: subprocess.Popen[str], before: int) -> None:
        """Wait for a random point of this moment."""
        reached: dict[str, Callable[[], bool]] = {
            "start": lambda: True,
            "step": lambda: newest(self.checkpoints) > before,
            "save": lambda: any(self.checkpoints.glob(".step-*.unfinished")),
            "end": lambda: f"step {self._steps}/{self._steps}" in self._log.read_text(),
        }
        begin = time.monotonic()
        while not reached[moment]() and process.poll() is None and time.monotonic() - begin < TIMEOUT:
            time.sleep(0.001 if moment == "save" else 0.02)
        time.sleep(self.chance.uniform(0, MOMENTS[moment]))

    def _harm(self, process: subprocess.Popen[str], victim: str, how: str) -> None:
        if victim == "disk":
            with suppress(OSError), (self.checkpoints / "stuff").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            return
        target = process.pid if victim == "launcher" else self._rank(process)
        signals = ["SIGSTOP", "SIGCONT"] * 4 if how == "slow" else [how]
        for name in signals if target is not None else ():
            with suppress(ProcessLookupError):
                os.kill(target or 0, signal.Signals[name])
            time.sleep(0.5 if how == "slow" else 0)

    def _end_of(self, process: subprocess.Popen[str]) -> int | None:
        """Exit code of a run; None if it did not end and was killed."""
        try:
            return process.wait(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            for number in processes_of(self._name):
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            process.wait()
            return None

    def _rank(self, process: subprocess.Popen[str]) -> int | None:
        """One of the ranks, once there are any; None if the run has ended."""
        while process.poll() is None:
            if ranks := sorted(p for p, is_rank in processes_of(self._name).items() if is_rank):
                return self.chance.choice(ranks)
            time.sleep(0.02)
        return None

    def _orphans(self) -> int:
        """Number of remaining processes, after a grace period."""
        begin = time.monotonic()
        while (remaining := len(processes_of(self._name))) and time.monotonic() - begin < ORPHAN_SECONDS:
            time.sleep(0.1)
        return remaining


def certain_checkpoint(steps: int, save_every: int) -> int:
    """Checkpoint that is certainly complete after this many steps: the last but one that was begun."""
    return max(0, (steps - 1) // save_every - 1) * save_every


def explains(messages: Sequence[str], code: int | None, victim: str, how: str, *, began: bool) -> bool:
    """Whether the messages of a run name the cause of its end and nothing else."""
    if code == 0 or how == "slow":
        return code == 0 and not messages  # it had already ended, or continued
    if not messages and how.startswith("SIG") and code == -signal.Signals[how]:
        return how == "SIGKILL" or not began  # nobody was left to say anything
    requested = rf"The run was ended by {how}(\.| after step \d+ of \d+: go on from \S+ with --resume\.)"
    sentence = {
        "full": r".*the disk is full.*", "SIGINT": r"debubble: interrupted\.",
        "SIGSTOP": r"debubble: (The run hangs|Rank \d was stopped by a signal).*",
    }.get(how, f"debubble: {requested}")  # fmt: skip
    if victim == "rank" and how != "SIGSTOP":
        sentence = rf"debubble: (Rank \d was (killed|ended) by {how}.*; the other ranks were ended\.|{requested})"
    return len(messages) == 1 and re.fullmatch(sentence, messages[0]) is not None


def measure(name: str) -> Row:
    """Outcome of a layout's disturbances, and whether all is well."""
    chance = random.Random(f"{SEED} {name}")
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Path(folder) / "checkpoints"
        checkpoints.mkdir()
        with small_disk(checkpoints) as mounted:
            kinds = [kind for kind in KINDS if mounted or kind[0] != "disk"]
            runs = Runs(LAYOUTS[name], Path(folder), chance)
            chosen = [*kinds, *chance.choices(kinds, k=DISTURBANCES - len(kinds))]
            chance.shuffle(chosen)
            events: list[Row] = []
            for victim, how in chosen:
                events.append(runs.disturb("save" if victim == "disk" else chance.choice([*MOMENTS]), victim, how))
                print(name, events[-1], file=sys.stderr)
            equal = runs.finish()
    well = equal and not any(e["lost_more"] or e["orphans"] or not (e["explained"] and e["resumed"]) for e in events)
    return {"well": well, "losses_equal": equal, "events": events}


def page(rows: list[Row]) -> str:
    """Outcomes of the disturbances by kind."""
    events = [event for row in rows for event in row["events"]]
    lines = []
    for victim, how in KINDS:
        selected = [e for e in events if (e["victim"], e["how"]) == (victim, how)]
        moments = ", ".join(f"{sum(e['moment'] == moment for e in selected)} {moment}" for moment in MOMENTS)
        named = sum(e["explained"] for e in selected)
        lost = max((e["steps"] - e["checkpoint"] for e in selected), default=0)
        orphans, seconds = sum(e["orphans"] for e in selected), max((e["seconds"] for e in selected), default=0)
        lines.append(
            (f"{victim}: {how}", str(len(selected)), moments, str(named), str(lost), str(orphans), f"{seconds:.0f} s")
        )
    ill = [row["case"] for row in rows if not row["well"]]
    head = ("who and how", "times", "when", "cause named", "steps lost at most", "processes left", "ended within")
    summary = f"{len(events)} disturbances of {len(rows)} layouts; not well: {', '.join(ill) or 'none'}."
    return f"{summary}\n\n{table(head, lines)}"


BENCHMARK = Benchmark(
    name="soak", about=__doc__, cases={name: name for name in LAYOUTS}, measure=measure,
    pages={"notes/long-runs.md#soak": page},
)  # fmt: skip

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs and their runs would ignore it
    BENCHMARK.main()
    sys.exit(not all(row["well"] for row in BENCHMARK.rows()))
