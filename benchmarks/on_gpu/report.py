"""docs/gpu.md (the summary) and docs/notes/gpu.md (all figures): what was measured on a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]

SECTIONS = {
    "tests": "Tests that need a GPU",
    "machine": "The machine",
    "profile": "Measured and computed costs",
    "plans": "Plans for 4 and 8 devices, one device at a time",
    "large": "A model that does not fit",
    "torch": "Overhead compared with torch.distributed.pipelining",
}
WHAT = {
    "tests": "Streams, pinned buffers, offload, the ledger and torch's allocator, gradients of whole pipelines.",
    "machine": "Matrix products, memory, kernel launches, the link to the host in each direction, alone and together.",
    "profile": "`debubble profile` of Llama-3 8B's layers in bf16 at 4096 and 8192 tokens and of one mixture of"
    " experts' (Mixtral), and every operator by itself, compared with the costs that are computed for the card.",
    "plans": "1F1B, ZB-H1 (split backwards) and 1F1B with offload, planned with the measured costs; each device's"
    " program runs alone with its real memory, and the others' messages come at their predicted times.",
    "large": "Llama-3's layers on one device with a micro-batch that it cannot keep: with everything kept, with all"
    " stages recomputed, with three of four stages offloaded.",
    "torch": "The same modules in a loop of plain autograd, under torch's schedules and under debubble's, with and"
    " without `torch.compile`; what a step takes beyond the loop is divided by its forwards and backwards.",
}  # fmt: skip

PICTURE = "pictures/gpu-plan-4-devices.png"
"""The timelines of the page `plan-4-devices.html` that the section of plans writes, as Chromium draws them."""

UNTESTED = (
    "Several GPUs with NCCL between them, fp8, compiled units and streaming transfers have not run on a GPU. Everything"
    " else in this documentation was run on CPUs."
)


SOURCE = (
    "`python benchmarks/gpu.py` measures all of it in one command on a machine with a CUDA device, and `python"
    " benchmarks/gpu.py --report` writes the pages from `benchmarks/results/gpu.json`. `--dry-run` runs the same code"
    " with tiny sizes on a CPU."
)


def read(path: Path) -> Result:
    """The figures so far; none if there is no file."""
    result: Result = json.loads(path.read_text()) if path.exists() else {}
    return {"sections": {}} | result


def page(result: Result) -> str:
    """The summary."""
    lines = ["# Measured on a GPU", "", *_standing(result), "", UNTESTED, "", *_table(result), ""]
    if "plans" in result["sections"]:
        lines += [
            f"![Predicted and measured]({PICTURE})", "",
            "*1F1B with offload for 4 devices, predicted and measured, one device at a time; the measured memory counts"
            " the states, too.*", "",
        ]  # fmt: skip
    lines += ["[All figures](notes/gpu.md) are in a note.", "", SOURCE, ""]
    return "\n".join(lines)


def note(result: Result) -> str:
    """All figures."""
    lines = ["# Figures of the GPU measurements", "", f"{SOURCE} The summary is [Measured on a GPU](../gpu.md)."]
    for name in SECTIONS:
        section = result["sections"].get(name)
        if section is not None:
            ran = section.get("at", "").partition("T")[0]
            lines += ["", f"## {SECTIONS[name]}", "", f"*{ran}, commit {section['commit']}.*", ""]
            lines += _section(name, section)
    return "\n".join([*lines, ""])


def _standing(result: Result) -> Iterator[str]:
    if not result["sections"]:
        yield "**No CUDA path of debubble has run yet.** Everything below waits for a machine with a GPU."
        return
    if result.get("dry_run"):
        yield "**These are figures of a dry run on a CPU with tiny sizes: they say nothing about a GPU.**"
        return
    machine = _figures(result, "machine").get("machine")
    if machine:
        yield (
            f"Measured on one {machine['device']} with torch {machine['torch']} and driver"
            f" {machine['driver_and_clocks'].split(',')[0]}."
        )
    ran = [name for name in SECTIONS if result["sections"].get(name, {}).get("status") == "ran"]
    yield f"{len(ran)} of {len(SECTIONS)} sections have run to their end; the table says which have not."
    yield ""
    yield from headlines(result)


def headlines(result: Result) -> Iterator[str]:
    """What came of it in a few lines, each computed from the figures."""
    tests = _figures(result, "tests")
    if "passed" in tests:
        yield f"* **Tests**: {tests['passed']} passed, {len(tests.get('failed', {}))} failed."
    profile = _figures(result, "profile")
    for case, figures in profile.items():
        if "units" in figures:
            layer = [figures["units"][kind] for kind in ("attention", "mlp")]
            ratios = ", ".join(
                f"{way} {_sum(layer, way, 'measured') / _sum(layer, way, 'predicted'):.2f}"
                for way in ("forward", "backward")
            )
            yield f"* **A layer without a profile** ({case}), measured / computed: {ratios}."
    kept = [error for _, error in _kept_errors(profile)]
    if kept:
        within = sum(error <= 0.02 for error in kept)
        yield f"* **Bytes that a unit keeps**: {within} of {len(kept)} computed figures are within 2% of what it kept."
    spans = sorted(
        program["span"]["ratio"]
        for devices in _figures(result, "plans").values()
        if isinstance(devices, dict)
        for programs in devices.values()
        for program in programs.values()
        if isinstance(program, dict) and "span" in program
    )
    if spans:
        yield (
            f"* **A device's program with a profile**, from its first operation to its last, measured / predicted:"
            f" {spans[0]:.2f} to {spans[-1]:.2f} for {len(spans)} programs, whose messages come when predicted."
            " What one device's delay does to the others is not in it."
        )
    large = _figures(result, "large")
    if large:
        ways = ", ".join(
            f"{way} {'trains' if large[way]['fits'] else 'does not fit'}"
            for way in ("kept", "recomputed", "offloaded")
            if "fits" in large.get(way, {})
        )
        yield f"* **A model that does not fit**: {ways}."


def _sum(units: Sequence[dict[str, Any]], way: str, what: str) -> float:
    return sum(float(unit[way][what]) for unit in units)


def _kept_errors(profile: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Of every figure of bytes that a unit keeps, how far the computed one is off."""
    for case, figures in profile.items():
        for kind, unit in figures.get("units", {}).items():
            kept = {"activation": unit["activation"]} | {n: s["kept"] for n, s in unit["strategies"].items()}
            for name, figure in kept.items():
                if figure["ratio"] is not None:
                    yield f"{case}, {kind}, {name}", abs(figure["ratio"] - 1)


def _table(result: Result) -> Iterator[str]:
    yield "| section | what | status | at | commit |"
    yield "| --- | --- | --- | --- | --- |"
    for name, what in WHAT.items():
        section = result["sections"].get(name)
        status = "**has not run**" if section is None else section["status"]
        when = "" if section is None else section.get("at", "").partition("T")[0]
        yield f"| {SECTIONS[name]} | {what} | {status} | {when} | {'' if section is None else section['commit']} |"


def _figures(result: Result, name: str) -> dict[str, Any]:
    figures: dict[str, Any] = result["sections"].get(name, {}).get("figures", {})
    return figures


def _section(name: str, section: dict[str, Any]) -> Iterator[str]:
    figures = section.get("figures", {})
    if "note" in section:
        yield section["note"]
        yield ""
    if section["status"] != "ran":
        why = section.get("traceback", section.get("why", "")).strip().split("\n")[-1]
        yield f"This section {section['status'].replace('ran', 'has run')} after {section.get('seconds', 0)} s. {why}"
        yield ""
    if name == "tests":
        yield from _tests(figures)
        return
    if name == "torch":
        yield from _overheads(figures)
        return
    if name == "profile":
        yield from _profile(figures)
        yield ""
        yield from _told("", figures)
        return
    if name == "plans":
        yield from _programs(figures)
        yield ""
        yield from _told("", figures)
        return
    yield "| figure | predicted | measured | measured / predicted |"
    yield "| --- | --- | --- | --- |"
    yield from _rows("", {k: v for k, v in figures.items() if k != "machine"})
    told = list(_told("", figures))
    if told:
        yield ""
        yield from told


def _profile(figures: dict[str, Any]) -> Iterator[str]:
    """A row for every type of unit, and one for every operator of a half-layer."""
    yield "| tokens | unit or operator | forward, ms | computed | ratio | backward, ms | computed | ratio |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for case, found in figures.items():
        for kind, unit in found.get("units", {}).items():
            yield f"| {case} | **{kind}** | {' | '.join(_both_ways(unit))} |"
        for half, operators in found.get("operators", {}).items():
            if isinstance(operators, dict):
                for name, operator in operators.items():
                    yield f"| {case} | {half}: {name} | {' | '.join(_both_ways(operator))} |"
    yield ""
    off = [f"{place} ({100 * error:.0f}%)" for place, error in _kept_errors(figures) if error > 0.02]
    yield f"Bytes kept that are off by more than 2%: {', '.join(off) or 'none'}."


def _both_ways(tree: dict[str, Any]) -> Iterator[str]:
    for way in ("forward", "backward"):
        figure = tree[way]
        yield f"{1e3 * figure['measured']:.3f}"
        yield f"{1e3 * figure['predicted']:.3f}"
        yield _ratio(figure)


def _tests(figures: dict[str, Any]) -> Iterator[str]:
    failed = figures.get("failed", {})
    yield f"{figures.get('passed', 0)} passed, {figures.get('skipped', 0)} skipped, {len(failed)} failed."
    for test, text in failed.items():
        yield f"* `{test}`: {text.strip().splitlines()[-1] if text.strip() else 'no text'}"


def _overheads(figures: dict[str, Any]) -> Iterator[str]:
    yield "| model | | way | step, ms | beyond the loop per operation, µs | loss |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for model, ways in figures.items():
        for way, found in ways.items():
            if "failed" in found or "left_out" in found:
                yield f"| {model} | {way} | {_last(found)} | | | |"
                continue
            for name, one in found.items():
                if "failed" in one:
                    yield f"| {model} | {way} | {name} {_last(one)} | | | |"
                    continue
                beyond = "" if name == "autograd" else f"{1e6 * one['per_operation']:.1f}"
                yield f"| {model} | {way} | {name} | {1e3 * one['step_seconds']:.2f} | {beyond} | {one['loss']:.6f} |"


def _programs(figures: dict[str, Any]) -> Iterator[str]:
    """A row for every program of a device."""
    yield (
        "Times are measured / predicted; activations are the counted peak / the predicted one. *Hidden* is the share of"
        " the transfers' time at which the device computes, *allocated* and *reserved* the most that torch's allocator"
        " says."
    )
    yield ""
    yield "| plan | program | F | B or I | W | span | activations | hidden, predicted | hidden | allocated | reserved |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for plan, devices in figures.items():
        for device, programs in devices.items() if isinstance(devices, dict) else ():
            found = {"auto": programs} if device == "auto" else programs if device != "together" else {}
            for name, one in found.items():
                if isinstance(one, dict) and "operations" in one:
                    yield f"| {plan}, {device} | {name} | {' | '.join(_cells(one))} |"


def _cells(one: dict[str, Any]) -> Iterator[str]:
    kinds, memory, moved = one["operations"], one["memory"], one["hidden_transfers"]
    for kind in ("F", "I" if "I" in kinds else "B", "W"):
        yield _ratio(kinds.get(kind))
    yield _ratio(one["span"])
    yield _ratio(memory["activations"])
    yield from ("", "") if not memory["offloaded"] else (f"{100 * moved[w]:.0f}%" for w in ("predicted", "measured"))
    for what in ("allocated_in_step", "reserved"):
        yield f"{memory[what] / 1e9:.1f} GB" if what in memory else ""


def _ratio(found: dict[str, Any] | None) -> str:
    return "" if found is None or found.get("ratio") is None else f"{found['ratio']:.3f}"


def _rows(path: str, tree: Any) -> Iterator[str]:
    """A row for every pair of a prediction and a measurement."""
    if not isinstance(tree, dict):
        return
    if tree.keys() == {"predicted", "measured", "ratio"}:
        ratio = "" if tree["ratio"] is None else f"{tree['ratio']:.3f}"
        yield f"| {path} | {tree['predicted']:.4g} | {tree['measured']:.4g} | {ratio} |"
        return
    for name, value in tree.items():
        if name != "profile":  # the units file itself
            yield from _rows(f"{path}, {name}" if path else name, value)


def _told(path: str, tree: Any) -> Iterator[str]:
    """A line for what failed, was left out, or is said in words."""
    if not isinstance(tree, dict):
        return
    if "failed" in tree or "left_out" in tree:
        yield f"* {path}: {_last(tree)}"
        return
    if "fits" in tree:
        yield f"* {path}: {_training(tree)}"
        return
    for name, value in tree.items():
        if name != "profile":
            yield from _told(f"{path}, {name}" if path else name, value)


def _training(tree: dict[str, Any]) -> str:
    if not tree["fits"]:
        return f"does not fit. {tree['sentence']}"
    losses = ", ".join(f"{loss:.3f}" for loss in tree["losses"])
    sizes = ", ".join(
        f"{tree[what] / 1e9:.1f} GB {what}"
        for what in ("static", "activations", "offloaded", "allocated")
        if tree[what]
    )
    return f"trains at {tree['tokens_per_second']:.0f} tokens per second; {sizes}; losses {losses}."


def _last(tree: dict[str, Any]) -> str:
    if "left_out" in tree:
        return f"left out: {tree['left_out']}."
    return f"failed: {tree['failed'].strip().splitlines()[-1]}"
