"""Kills of training runs at random points of their start, steps, saves and end, over twenty layouts (see `soak.py`)."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import debubble as db
from debubble.ir import PlannedUnit, RunOptions
from debubble.plans import ModelOnCluster

TRAIN = [sys.executable, "-P", "-m", "debubble", "train"]
PATIENCE = 180
ORPHAN_SECONDS = 10
MARK = "DEBUBBLE_SOAK_RUN"
"""Environment variable by which the processes of a run are found, whoever their parent is."""


PLAIN = RunOptions()


@dataclass(frozen=True)
class Layout:
    """How a small model is trained."""

    name: str
    schedule: str = "1f1b"
    devices: int = 2
    options: RunOptions = PLAIN
    arguments: tuple[str, ...] = ()
    save_every: int = 3

    def save(self, model: dict[str, object], path: Path) -> None:
        """Write its plan."""
        schedule = db.schedules[self.schedule](devices=self.devices, micro_batches=4)
        halves = [PlannedUnit(kind, layer) for layer in range(2) for kind in ("attention", "mlp")]
        units = [PlannedUnit("embedding", None), *halves, PlannedUnit("head", None)]
        ends = [round(stage * len(units) / schedule.stages) for stage in range(schedule.stages + 1)]
        costs = db.StageCosts.of(stages=schedule.stages, static=2, gathered=1 if self.options.zero == 3 else 0)
        db.Plan(
            planner="soak", schedule=schedule, costs=costs, lower_bound=0,
            model_on_cluster=ModelOnCluster(db.Model.from_hf(model), db.Cluster.parse(f"{self.devices}xCPU")),
            partition=tuple(tuple(units[a:b]) for a, b in pairwise(ends)),
            options=replace(self.options, sequence_length=32, dtype="fp32"),
        ).save(path)  # fmt: skip


LAYOUTS = (
    Layout("1f1b"),
    Layout("one device", devices=1),
    Layout("four devices", devices=4, save_every=10),
    Layout("gpipe", schedule="gpipe", save_every=7),
    Layout("interleaved", schedule="interleaved", save_every=4),
    Layout("breadth-first", schedule="breadth-first"),
    Layout("zb-h1", schedule="zb-h1", save_every=7),
    Layout("zb-h2", schedule="zb-h2"),
    Layout("zb-v", schedule="zb-v", save_every=10),
    Layout("v-half", schedule="v-half"),
    Layout("hanayo", schedule="hanayo", save_every=4),
    Layout("dualpipe-v", schedule="dualpipe-v"),
    Layout("data 2", devices=1, options=RunOptions(data=2), save_every=7),
    Layout("ZeRO-1", devices=1, options=RunOptions(data=2, zero=1)),
    Layout("ZeRO-3", devices=1, options=RunOptions(data=2, zero=3), save_every=4),
    Layout("tensor 2", devices=1, options=RunOptions(tensor=2)),
    Layout("context 2", devices=1, options=RunOptions(context=2), save_every=10),
    Layout("momentum, averages", arguments=("--optimizer", "momentum", "--ema", "0.9"), save_every=7),
    Layout("post-validation", schedule="zb-v", options=RunOptions(post_validation=True)),
    Layout("pipeline 2 x data 2, ZeRO-2", options=RunOptions(data=2, zero=2), save_every=4),
)

MOMENTS = ("start", "step", "save", "end")
VICTIMS = (
    ("rank", signal.SIGKILL), ("rank", signal.SIGTERM), ("rank", signal.SIGSEGV), ("launcher", signal.SIGKILL),
    ("launcher", signal.SIGTERM), ("launcher", signal.SIGINT), ("launcher", signal.SIGUSR1),
)  # fmt: skip


@dataclass(frozen=True)
class Kill:
    """A kill, and what came of it."""

    layout: str
    moment: str
    victim: str
    signal: str
    exit_code: int
    said: tuple[str, ...]
    """Lines on standard error, without those of steps."""
    explained: bool
    """Whether these name the cause and nothing else."""
    steps: int
    """Steps that had been reported."""
    checkpoint: int
    """Steps of the newest checkpoint afterwards."""
    lost_more: bool
    """Whether more than one interval was lost, or a checkpoint that was there before."""
    orphans: int
    """Processes of the run ten seconds later."""
    seconds: float
    """From the signal to the end of the launcher."""


def newest(folder: Path) -> int:
    """Steps of the newest whole checkpoint."""
    whole = [p for p in folder.glob("step-*") if (p / "manifest.json").exists()]
    return max((int(p.name.removeprefix("step-")) for p in whole), default=0)


def processes_of(run: str) -> list[int]:
    """The processes of a run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and f"{MARK}={run}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


class LayoutRuns:
    """Runs of one layout, each of which goes on from the checkpoint of the one before it."""

    def __init__(self, layout: Layout, folder: Path, *, model: dict[str, object], text: Path) -> None:
        self.layout, self.folder, self.checkpoints = layout, folder, folder / "checkpoints"
        self.checkpoints.mkdir(parents=True)
        layout.save(model, folder / "plan.json")
        self._log, self._text, self._run = folder / "log", text, 0
        self._steps = 0

    def kill(self, moment: str, victim: str, number: signal.Signals, chance: random.Random) -> Kill:
        """Start a run, kill it, and look at what is left."""
        before = newest(self.checkpoints)
        self._steps = before + 4 * self.layout.save_every
        process = self._start(self._saving(before), steps=self._steps)
        self._await(moment, process, before, chance)
        process_id = process.pid if victim == "launcher" else self._rank(process, chance)
        whole, begin = newest(self.checkpoints), time.monotonic()
        if process_id is not None and process.poll() is None:
            os.kill(process_id, number)
        code = process.wait(timeout=PATIENCE)
        seconds = time.monotonic() - begin
        orphans = self._orphans()
        after, said = newest(self.checkpoints), self._said()
        reported = max(
            (int(step) for step in re.findall(r"^step (\d+)/", self._log.read_text(), re.MULTILINE)), default=0
        )
        return Kill(
            self.layout.name, moment, victim, number.name, code, said,
            explained=_explains(said, code, moment, victim, number), steps=reported, checkpoint=after,
            lost_more=after < max(whole, reported - self.layout.save_every), orphans=orphans, seconds=round(seconds, 2),
        )  # fmt: skip

    def finish(self) -> bool:
        """Run to the end, and tell whether the losses are those of a run that nothing happened to."""
        before = newest(self.checkpoints)
        self._steps = before + self.layout.save_every + 12
        resumed = self._losses(self._saving(before))
        whole = self._losses(())
        return resumed == whole[before:] and len(resumed) == self._steps - before

    def _saving(self, before: int) -> Sequence[str]:
        every = str(self.layout.save_every)
        resume = ["--resume"] if before else []
        return "--checkpoint", str(self.checkpoints), "--save-every", every, *resume

    def _start(self, more: Sequence[str], *, steps: int) -> subprocess.Popen[str]:
        self._run += 1
        options = ["--data", str(self._text), "--steps", str(steps), "--lr-schedule", "constant", "--warmup", "2"]
        with self._log.open("w") as log, (self.folder / "answer").open("w") as answer:
            return subprocess.Popen(
                [*TRAIN, str(self.folder / "plan.json"), *options, "--json", *self.layout.arguments, *more],
                stdout=answer, stderr=log, text=True, env={**os.environ, MARK: self._name}, start_new_session=True,
            )  # fmt: skip

    @property
    def _name(self) -> str:
        return f"{self.folder}/{self._run}"

    def _losses(self, more: Sequence[str]) -> list[float]:
        if self._start(more, steps=self._steps).wait(timeout=5 * PATIENCE):
            print(self._log.read_text(), file=sys.stderr)
            return []
        losses: list[float] = json.loads((self.folder / "answer").read_text())["losses"]
        return losses

    def _await(self, moment: str, process: subprocess.Popen[str], before: int, chance: random.Random) -> None:
        """Wait for a random point of this kind."""

        def reached() -> bool:
            match moment:
                case "step":
                    return newest(self.checkpoints) > before
                case "save":
                    return any(self.checkpoints.glob(".step-*.unfinished"))
                case "end":
                    return f"step {self._steps}/{self._steps}" in self._log.read_text()
            return True

        begin = time.monotonic()
        while not reached() and process.poll() is None and time.monotonic() - begin < PATIENCE:
            time.sleep(0.001 if moment == "save" else 0.02)
        longest = {"start": 8.0, "step": 0.5, "save": 0.02, "end": 1.5}[moment]
        time.sleep(chance.uniform(0, longest))

    def _rank(self, process: subprocess.Popen[str], chance: random.Random) -> int | None:
        """One of the ranks, as soon as there are any; None if the run has ended."""
        while process.poll() is None:
            ranks = sorted(p for p in processes_of(self._name) if _is_rank(p))
            if ranks:
                return chance.choice(ranks)
            time.sleep(0.02)
        return None

    def _orphans(self) -> int:
        """The processes that are left, after some seconds at most."""
        begin = time.monotonic()
        while (left := len(processes_of(self._name))) and time.monotonic() - begin < ORPHAN_SECONDS:
            time.sleep(0.1)
        return left

    def _said(self) -> tuple[str, ...]:
        return tuple(line for line in self._log.read_text().splitlines() if not re.match(r"step \d+/", line))


def _is_rank(process: int) -> bool:
    try:
        return b"debubble.training.rank" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def _explains(said: Sequence[str], code: int, moment: str, victim: str, number: signal.Signals) -> bool:
    """Tell whether what a run said names the cause of its end, and nothing else."""
    if code == 0:
        return not said  # it had ended before
    if code == -number and not said:
        return number == signal.SIGKILL or moment == "start"  # nobody was there to say anything
    name = number.name
    requested = rf"The run was ended by {name}(\.| after step \d+ of \d+: go on from \S+ with --resume\.)"
    if victim == "rank":
        sentence = rf"debubble: (Rank \d was (killed|ended) by {name}.*; the other ranks were ended\.|{requested})"
    else:
        sentence = r"debubble: interrupted\." if number == signal.SIGINT else f"debubble: {requested}"
    return len(said) == 1 and re.fullmatch(sentence, said[0]) is not None


def kill_runs(
    count: int, folder: Path, *, model: dict[str, object], text: Path, chance: random.Random
) -> Iterator[tuple[Sequence[Kill], bool]]:
    """Kill runs of all layouts, `count` times.  Yields each layout's kills, and whether its losses were equal."""
    kinds = [(moment, *victim) for moment in MOMENTS for victim in VICTIMS]
    order = [kind for _ in range(-(-count // len(kinds))) for kind in chance.sample(kinds, len(kinds))][:count]
    for index, layout in enumerate(LAYOUTS):
        own = order[index :: len(LAYOUTS)]
        if own:
            runs = LayoutRuns(layout, folder / str(index), model=model, text=text)
            yield [runs.kill(moment, victim, number, chance) for moment, victim, number in own], runs.finish()
