"""Predicts measured runs, and reports the errors of the predictions.

    python -m measured [RECORD ...]           (in benchmarks/) errors of runs that costs may be fitted to, and a summary
    python -m measured --command RECORD       the `debubble` command line of a run's prediction
    python -m measured --docs                 what the package and docs/ say of accuracy, and the page with every run

Half of the records (`records.py`) are there to fit costs to; of the other half only groups are shown, but for the page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from benchmark import DOCS, between, table

from debubble.costs import accuracy
from debubble.costs import calibration as corrections
from debubble.costs.accuracy import ALL, Accuracy, groups_of, stated_accuracies
from debubble.costs.calibration import FIGURES, error_shares
from debubble.errors import DebubbleError
from debubble.planners.plan_step import seconds_per_step
from debubble.simulator import simulate
from measured import calibration
from measured.commands import command_of
from measured.records import Half, Record, records

GIB = 2**30
ERROR_KEYS = [f"{figure}_error" for figure in FIGURES]
KINDS = ("dense", "MoE")
MIN_RUNS = 8
"""Minimum number of runs for which a group has a separate interval."""
LOW, HIGH = 0.05, 0.95
"""Quantiles of the residuals that bound nine in ten of them."""

Row = dict[str, Any]


def row_of(record: Record) -> Row:
    """A run's prediction and measurement, with the relative errors of step and memory."""
    row: Row = {"record": record}
    try:
        plan = record.job.plan(record.cluster)
        timeline = simulate(plan.schedule, plan.costs.with_limit(None))
    except DebubbleError as error:
        return row | {"refused": str(error)}
    predicted = {"step": seconds_per_step(plan, timeline), "memory": max(map(float, timeline.peak_memory)) / GIB}
    for figure, measured in zip(FIGURES, (record.seconds, record.memory), strict=True):
        if measured is not None:
            row |= {f"{figure}_error": predicted[figure] / measured - 1}
    return row | predicted


def of_group(rows: Iterable[Row], figure: str, half: Half, group: str = ALL) -> list[float]:
    """Errors of the runs of a half in a group."""
    return [
        row[f"{figure}_error"]
        for row in rows
        if f"{figure}_error" in row and row["record"].half == half and group in groups_of_record(row["record"])
    ]


def groups_of_record(record: Record) -> tuple[str, ...]:
    """Groups of a run, the narrowest first."""
    return tuple(groups_of(record.model, record.device, record.entries.get("dtype", "bf16")))


def stated(errors: Sequence[float], group: str) -> Accuracy:
    """Accuracy that these errors show."""
    sizes, ratios = sorted(map(abs, errors)), sorted(1 / (1 + error) for error in errors)

    def quantile(values: Sequence[float], share: float) -> float:
        return round(values[min(len(values) - 1, int(share * len(values)))], 3)

    return Accuracy(
        runs=len(errors), half=quantile(sizes, 0.5), most=quantile(sizes, 0.9), group=group,
        low=quantile(ratios, LOW), high=quantile(ratios, HIGH),
    )  # fmt: skip


def accuracies(rows: Sequence[Row], half: Half = "test") -> dict[str, dict[str, Accuracy]]:
    """Stated accuracy of every group with enough runs."""
    names = dict.fromkeys(name for row in rows for name in groups_of_record(row["record"]))
    result: dict[str, dict[str, Accuracy]] = {}
    for figure in FIGURES:
        errors = {name: of_group(rows, figure, half, name) for name in sorted(names)}
        result[figure] = {name: stated(values, name) for name, values in errors.items() if len(values) >= MIN_RUNS}
    return result


def lines(rows: Iterable[Row]) -> Iterator[str]:
    """Lines of the runs that costs may be fitted to."""
    for row in rows:
        if row["record"].half == "fit":
            errors = "  ".join(f"{row[key]:+8.1%}" if key in row else " " * 8 for key in ERROR_KEYS)
            yield f"{row['record'].name:28} {errors}  {row['record'].words} {row.get('refused', '')}"


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Errors by group of both halves."""
    for half in ("fit", "test"):
        for figure in FIGURES:
            names = sorted({name for row in rows for name in groups_of_record(row["record"])})
            for name in names:
                if errors := of_group(rows, figure, half, name):
                    a, mean = stated(errors, name), sum(errors) / len(errors)
                    yield f"{half:5} {figure:7} {name:28} {a.runs:4} {a.half:7.1%} {a.most:7.1%}   mean {mean:+.1%}"


def page(rows: Sequence[Row]) -> str:
    """The page with every run."""
    of_groups = [
        (half, figure, name, str(a.runs), f"{a.half:.1%}", f"{a.most:.1%}")
        for half in ("fit", "test")
        for figure in FIGURES
        for name in (
            *KINDS,
            *sorted({n for r in rows for n in groups_of_record(r["record"]) if n not in (*KINDS, ALL)}),
        )
        if (errors := of_group(rows, figure, half, name))
        for a in [stated(errors, name)]
    ]
    runs = [
        (
            row["record"].name,
            row["record"].half,
            row["record"].words,
            *(
                f"{row[f'{figure}_error']:+.1%}" if f"{figure}_error" in row else row.get("refused", "")[:40]
                for figure in FIGURES
            ),
        )
        for row in rows
    ]
    shares = error_shares()
    sources = dict.fromkeys((row["record"].name.partition("/")[0], row["record"].entries["source"]) for row in rows)
    return "\n\n".join(
        [
            "# Measured runs",
            "What public runs measured against what debubble predicts for them, as `debubble import` predicts a"
            " configuration. Half of the configurations are there to fit costs to, half to test them; a hash decides."
            " Memory that torch reserved counts as 1.06 times what it allocated, and what nvidia-smi shows as that and"
            " CUDA's context.",
            table(("half", "what", "group", "runs", "half within", "nine in ten within"), of_groups),
            "## Calibrated by one run",
            "Runs of the half for testing, predicted with what other runs of their source measured, as `debubble"
            " calibrate` does: `>` stands between the figures without and with. Of a step's deviation runs share"
            f" {shares['step'].model:.2f} if they are of the same model, {shares['step'].dtype:.2f} if the kind of"
            f" model and the dtype are the same, and {shares['step'].job:.2f} if all options and degrees but the"
            f" replicas are, too; of the memory's {shares['memory'].model:.2f}, {shares['memory'].dtype:.2f} and"
            f" {shares['memory'].job:.2f} (estimated on the other half). A run counts once with each kind of measured"
            " runs.",
            table(calibration.HEAD, calibration.lines(rows, stated_accuracies())),
            "## Every run",
            table(("record", "half", "run", "step", "memory"), runs),
            "## Sources",
            "\n".join(f"* `{name}`: {source}" for name, source in sources),
            "Written by `python -m measured --docs` in `benchmarks/`; the records are in `benchmarks/measured/runs`.\n",
        ]
    )


def sentence(stated_of: Mapping[str, Mapping[str, Accuracy]]) -> str:
    """The sentence of the README."""
    step, memory = stated_of["step"], stated_of["memory"]
    return (
        f"On {step[ALL].runs} published runs that no cost was fitted to, half of the steps are predicted within"
        f" {step['dense'].half:.0%} (dense) and {step['MoE'].half:.0%} (mixtures of experts), nine in ten within"
        f" {step['dense'].most:.0%} and {step['MoE'].most:.0%}; half of {memory[ALL].runs} memories within"
        f" {memory[ALL].half:.0%}, nine in ten within {memory[ALL].most:.0%}."
    )


def write(rows: Sequence[Row]) -> None:
    """Write the data of the package, the page with every run, and the figures of docs/costs.md and the README."""
    by_figure = accuracies(rows)
    data = {figure: {name: asdict(a) for name, a in groups.items()} for figure, groups in by_figure.items()}
    for entry in (entry for groups in data.values() for entry in groups.values()):
        del entry["of_hardware"]  # depends on the devices for which accuracy is asked
    Path(accuracy.__file__).with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    shares = {figure: msgspec.to_builtins(calibration.estimated(rows, figure)) for figure in FIGURES}
    Path(corrections.__file__).with_suffix(".json").write_text(json.dumps(shares, indent=1) + "\n")
    for stated_before in (stated_accuracies, error_shares):
        stated_before.cache_clear()
    (DOCS / "notes" / "measured.md").write_text(page(rows))
    groups = [
        (figure, name, str(a.runs), f"{a.half:.1%}", f"{a.most:.1%}", f"{a.low:.2f} to {a.high:.2f}")
        for figure, groups in by_figure.items()
        for name, a in groups.items()
    ]
    head = ("what", "group", "runs", "half within", "nine in ten within", "measured over predicted")
    _replace(DOCS / "costs.md", "measured", table(head, groups))
    _replace(DOCS.parent / "README.md", "accuracy", sentence(by_figure))


def _replace(page: Path, mark: str, content: str) -> None:
    before, _, after = between(page, mark)
    page.write_text(f"{before}\n{content}\n{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", nargs="*", help="names, or beginnings of names; the default is all")
    parser.add_argument("--command", metavar="RECORD", help="print the command line of a run's prediction")
    parser.add_argument("--docs", action="store_true", help="write what the package and docs say")
    args = parser.parse_args()
    known = {record.name: record for record in records()}
    if args.command:
        print(command_of(known[args.command]))
        return
    chosen = [r for name, r in known.items() if not args.record or name.startswith(tuple(args.record))]
    rows = [row_of(record) for record in chosen]
    if args.docs:
        write(rows)
    else:
        print(*lines(rows), "", *summary(rows), sep="\n")


if __name__ == "__main__":
    main()
