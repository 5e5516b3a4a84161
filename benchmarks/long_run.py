"""A long run on four ranks, killed, resumed under other layouts and reordered meanwhile, beside one process.

    python benchmarks/long_run.py [--case llama-100m] [--size full] [--folder FOLDER] [--output RESULT.json]

`debubble train --online` trains on real text with a validation set.  A rank is killed, and the run is resumed on a
shorter pipeline with replicas; the launcher is killed, and the run is resumed with tensor parallelism.  The reference
is transformers' own model with torch's AdamW in one process.  With `--rounding STEPS` a second one takes rows one by
one, the last one first, which says how far rounding alone leads two runs apart, and a third one takes a few steps in
fp64, which says whose rounding it is.  What is done in a folder that is given is not done again.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
import transformers
from provenance import commit, measured_by
from soak import children, is_rank
from soak_kills import newest
from torch.nn.functional import cross_entropy

import debubble as db
from debubble.training.data.text import Sequences, load_tokens
from debubble.training.optimizer import learning_rate

RANKS, ROWS, SEED, WINDOWS = 4, 4, 0, 32
"""Ranks; sequences of a step, one per micro-batch; seed of the data's order; sequences of the validation set."""
RATE, WARMUP, DECAY, CLIP = 5e-4, 10, 0.01, 1.0
HELD_OUT = "argparse.py"
"""The module of the standard library that validates; the other single modules train."""
EXACT_STEPS = 10
"""Steps that are taken in fp64, too."""
PATIENCE = 3600
TRAIN = [sys.executable, "-P", "-m", "debubble", "train"]

LLAMA = {
    "model_type": "llama", "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14,
    "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 256, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 256,
    "num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.02,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # fmt: skip


class Layout(TypedDict, total=False):
    """Degrees of parallelism, and the ZeRO level, as `plan` takes them."""

    pipeline: int
    data: int
    tensor: int
    expert: int
    zero: int


LAYOUTS: Mapping[str, Sequence[Layout]] = {
    "llama-100m": ({"pipeline": 4}, {"pipeline": 2, "data": 2, "zero": 2}, {"pipeline": 2, "tensor": 2}),
    "mixtral-8-experts": ({"pipeline": 4}, {"pipeline": 2, "data": 2, "expert": 2}, {"pipeline": 2, "tensor": 2}),
}
"""How the four ranks are used, one after the other."""
MODELS: Mapping[str, Mapping[str, Any]] = {"llama-100m": LLAMA, "mixtral-8-experts": MIXTRAL}


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is trained."""

    model: Mapping[str, Any]
    """What replaces the model's own sizes."""
    length: int
    steps: int
    save_every: int
    patience: int
    """Steps that are waited for another order before the run is ended all the same."""


SIZES = {
    "full": Size(model={}, length=32, steps=200, save_every=25, patience=40),
    "tiny": Size(model=SMALL, length=16, steps=160, save_every=20, patience=40),
}


def write_texts(folder: Path, length: int) -> None:
    """Write single modules of Python's standard library, and the beginning of another one for validation."""
    library = Path(sysconfig.get_path("stdlib"))
    (folder / "train").mkdir()
    for source in library.glob("*.py"):
        if source.name != HELD_OUT:
            shutil.copy(source, folder / "train")
    # The token that ends a text is the last target.
    (folder / "validation.txt").write_bytes((library / HELD_OUT).read_bytes()[: WINDOWS * length])


def sequences(path: Path, length: int) -> Sequences:
    """A text as sequences of bytes."""
    return Sequences(tokens=load_tokens(path), sequence_length=length, seed=SEED)


# The reference: one process


def mean_loss(model: Any, rows: torch.Tensor, *, learns: bool, apart: bool = False) -> float:
    """The mean loss over the rows, at once or each apart; their gradients add up on the parameters if it learns.

    Routers have an auxiliary loss for every micro-batch, which is a row.
    """
    total, routed = 0.0, bool(getattr(model.config, "output_router_logits", False))
    for part in rows.split(1 if routed or apart else len(rows)):
        output = model(input_ids=part[:, :-1])
        loss = cross_entropy(output.logits.flatten(0, 1), part[:, 1:].flatten())
        if routed:
            loss = loss + model.config.router_aux_loss_coef * output.aux_loss
        share = len(part) / len(rows)
        if learns:
            (share * loss).backward()
        total += share * float(loss.detach())
    return total


def reference(
    folder: Path, size: Size, *, steps: int, control: bool = False, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Losses of one process, of each step and of the validation set.

    Args:
        folder: Where the initial model and the texts are.
        size: How much is trained.
        steps: How many steps of it are taken.
        control: Whether rows are added up one by one, the last one first.
        dtype: What it computes in.
    """
    # torch's grouped products know no fp64.
    experts = {} if dtype == torch.float32 else {"experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype, **experts)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True)
    text, held_out = sequences(folder / "train", size.length), sequences(folder / "validation.txt", size.length)
    losses, validation = [], {}
    for step in range(steps):
        rate = learning_rate(step, peak=RATE, warmup=WARMUP, steps=size.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = torch.from_numpy(text.batch(step * ROWS, count=ROWS))
        losses.append(mean_loss(model, rows.flip(0) if control else rows, learns=True, apart=control))
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % validation_interval(size) == 0:
            with torch.no_grad():
                validation[step + 1] = mean_loss(model, validation_rows(held_out), learns=False)
    return {"losses": losses, "validation": validation, "parameters": sum(p.numel() for p in model.parameters())}


def validation_rows(held_out: Sequences) -> torch.Tensor:
    """All sequences of the validation set."""
    return torch.from_numpy(held_out.windows(np.arange(WINDOWS)))


def validation_interval(size: Size) -> int:
    """Steps between two validations."""
    return size.steps // 4


# The run: four ranks


@dataclass(frozen=True)
class Part:
    """What one launch of the run did."""

    layout: Layout
    resumed_from: int
    """Steps of the checkpoint that it began with."""
    ended_at: int
    """The last step whose loss it wrote."""
    end: str
    switches: Sequence[str]
    """What came of the search for better orders."""
    seconds: float
    commit: str


class Run:
    """A run of four ranks in a folder that has the initial model and the texts."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.folder, self.size, self.checkpoints = folder, size, folder / "checkpoints"
        (folder / "figures").mkdir(exist_ok=True)
        self._done = folder / "parts.json"
        self.parts = [Part(**part) for part in json.loads(self._done.read_text())] if self._done.exists() else []

    def under(self, model: Mapping[str, Any], layouts: Sequence[Layout]) -> None:
        """Train to the end, under one layout after the other."""
        ends = [self.kill_rank, self.kill_launcher, None]
        for number, (layout, end) in list(enumerate(zip(layouts, ends, strict=True)))[len(self.parts) :]:
            plan = self.folder / f"layout{number}.json"
            save_plan(plan, model, layout, self.size.length)
            begin, resumed = time.monotonic(), newest(self.checkpoints)
            process = self._start(plan)
            if end is None:
                ended = "all steps were done"
            else:
                self._wait_until((number + 1) * self.size.steps // 4, plan, process)
                ended = end(process)
            process.communicate(timeout=PATIENCE)
            if end is None and process.returncode:
                raise SystemExit((self.folder / "log.txt").read_text()[-2000:])
            switches = [f"step {entry['step']}: {entry['event']}" for entry in self._journal(plan)]
            seconds = time.monotonic() - begin
            done = max(self.figures("train/loss"))
            self.parts.append(Part(layout, resumed, done, ended, switches, seconds, commit()))
            self._done.write_text(json.dumps([vars(part) for part in self.parts]))
            print(self.parts[-1], file=sys.stderr, flush=True)

    def figures(self, name: str) -> dict[int, float]:
        """A figure of every step, as the run has written it; what a resumed run did again counts."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(self.folder / "figures"), {"scalars": 0})
        events.Reload()
        return {e.step: e.value for e in events.Scalars(name)} if name in events.Tags()["scalars"] else {}

    def kill_rank(self, process: subprocess.Popen[bytes]) -> str:
        """SIGKILL for a rank."""
        ranks = sorted(p for p in children(process.pid) if is_rank(p))
        os.kill(random.Random(SEED).choice(ranks), signal.SIGKILL)
        return "a rank was killed"

    def kill_launcher(self, process: subprocess.Popen[bytes]) -> str:
        """SIGKILL for the launcher."""
        process.kill()
        return "the launcher was killed"

    def _start(self, plan: Path) -> subprocess.Popen[bytes]:
        folder, size = self.folder, self.size
        arguments = {
            "--data": folder / "train", "--validation": folder / "validation.txt",
            "--validate-every": validation_interval(size), "--steps": size.steps, "--load": folder / "model",
            "--lr": RATE, "--warmup": WARMUP, "--weight-decay": DECAY, "--clip": CLIP, "--seed": SEED,
            "--checkpoint": self.checkpoints, "--save-every": size.save_every, "--tensorboard": folder / "figures",
        }  # fmt: skip
        given = [str(word) for option in arguments.items() for word in option]
        with (folder / "log.txt").open("a") as log:
            return subprocess.Popen(
                [*TRAIN, str(plan), *given, "--online", "--auto-resume", "--json"], stdout=subprocess.PIPE, stderr=log
            )

    def _wait_until(self, step: int, plan: Path, process: subprocess.Popen[bytes]) -> None:
        """Wait for this step, and for another order, or for the step at which none is waited for any more."""
        while process.poll() is None:
            time.sleep(0.5)
            done = max(self.figures("train/loss"), default=0)
            adopted = any(entry["event"] == "adopted" for entry in self._journal(plan))
            if done >= step and newest(self.checkpoints) and (adopted or done >= step + self.size.patience):
                return

    def _journal(self, plan: Path) -> list[dict[str, Any]]:
        log = self.checkpoints / f"{plan.stem}.online.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def save_plan(path: Path, model: Mapping[str, Any], layout: Layout, length: int) -> None:
    """Write a plan in GPipe's order, which leaves the search something to find."""
    micro_batches = ROWS // layout.get("data", 1)
    plan = db.plan(
        db.Model.from_hf(dict(model)), db.Cluster.parse(f"{RANKS}xCPU"), planner="dapple", dtype="fp32",
        sequence_length=length, micro_batches=micro_batches, **layout,
    )  # fmt: skip
    gpipe = db.schedules["gpipe"](devices=plan.devices, micro_batches=micro_batches, costs=plan.costs)
    replace(plan, schedule=gpipe).save(path)


# Both beside each other


def largest_difference(losses: Mapping[int, float], reference: Mapping[int, float]) -> dict[str, float]:
    """The largest relative difference, and the step that has it."""
    differences = {step: abs(loss - reference[step]) / reference[step] for step, loss in losses.items()}
    step = max(differences, key=differences.__getitem__)
    return {"relative": differences[step], "step": step}


def once(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What is in the file, or else what is made and written there."""
    if not path.exists():
        path.write_text(json.dumps(make()))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def compare(case: str, size: Size, folder: Path, *, rounding: int) -> dict[str, Any]:
    """Train a model on four ranks and in one process, and so many steps of it in one process with other sums."""
    model = {**MODELS[case], **size.model}
    if not (folder / "model").exists():
        write_texts(folder, size.length)
        torch.manual_seed(SEED)
        config = transformers.AutoConfig.for_model(**model)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    run = Run(folder, size)
    run.under(model, LAYOUTS[case])
    losses, validation = run.figures("train/loss"), run.figures("validation/loss")
    one = once(folder / "reference.json", lambda: reference(folder, size, steps=size.steps))
    expected = dict(enumerate(one["losses"], 1))
    expected_validation = {int(step): loss for step, loss in one["validation"].items()}
    if losses.keys() != expected.keys():
        raise SystemExit(f"The run has {len(losses)} losses of {len(expected)} steps.")
    result = {
        "model": model,
        "parameters": one["parameters"],
        "steps": size.steps,
        "tokens_per_step": ROWS * size.length,
        "parts": [vars(part) for part in run.parts],
        "loss": largest_difference(losses, expected),
        "validation": largest_difference(validation, expected_validation),
        "losses": [losses[step] for step in sorted(losses)],
        "reference_losses": one["losses"],
        "validation_losses": validation,
        "reference_validation_losses": expected_validation,
    }
    if rounding:
        other = once(folder / "control.json", lambda: reference(folder, size, steps=rounding, control=True))
        steps = len(other["losses"])
        result["rounding"] = {
            "steps": steps,
            "loss": largest_difference({step: losses[step] for step in range(1, steps + 1)}, expected),
            "control": largest_difference(dict(enumerate(other["losses"], 1)), expected),
        }
        result["control_losses"] = other["losses"]
        exact = once(folder / "exact.json", lambda: reference(folder, size, steps=EXACT_STEPS, dtype=torch.float64))
        fp64 = dict(enumerate(exact["losses"], 1))
        result["fp64"] = {
            "steps": EXACT_STEPS,
            "loss": largest_difference({step: losses[step] for step in fp64}, fp64),
            "reference": largest_difference({step: expected[step] for step in fp64}, fp64),
        }
    return result


def main() -> None:
    """Run the cases, and print and save what came of them."""
    torch.set_num_threads(1)  # as every rank has
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it says of every resumed run what is read again
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=[*MODELS], help="one of the models; both unless given")
    parser.add_argument("--size", choices=[*SIZES], default="full")
    parser.add_argument("--folder", type=Path, help="keeps what is done; a temporary one unless given")
    parser.add_argument("--rounding", type=int, default=0, help="steps that one process takes row by row, too")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("results") / "long_run.json")
    arguments = parser.parse_args()
    before = json.loads(arguments.output.read_text()) if arguments.case and arguments.output.exists() else {}
    results = before.get("cases", {})
    for case in [arguments.case] if arguments.case else MODELS:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (arguments.folder or Path(temporary)) / case
            folder.mkdir(parents=True, exist_ok=True)
            compared = compare(case, SIZES[arguments.size], folder, rounding=arguments.rounding)
        results[case] = {**measured_by(), **compared}
        arguments.output.write_text(json.dumps({"cases": results}, indent=1) + "\n")
    figures = {name: {k: v for k, v in case.items() if "losses" not in k} for name, case in results.items()}
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
