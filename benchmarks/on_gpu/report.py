"""docs/gpu.md (the summary) and docs/notes/gpu.md (all figures): what was measured on a GPU.

`cases/gpu.json` has the pages' sentences.  The picture is of the timelines that the section of plans writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmark import table

Result = dict[str, Any]
Figures = dict[str, Any]

TEXT = json.loads((Path(__file__).parents[1] / "cases" / "gpu.json").read_text())
SECTIONS: dict[str, dict[str, str]] = TEXT["sections"]
WAYS = ("kept", "recomputed", "offloaded")
"""Ways to train the model that does not fit: the cases of the section `large`."""
CASE_DEPTH = 2
"""Number of names in the path of a case; longer paths are single figures of one."""


def read(path: Path) -> Result:
    """The figures so far; none if there is no file."""
    result: Result = json.loads(path.read_text()) if path.exists() else {}
    return {"sections": {}} | result


def page(result: Result) -> str:
    """The summary."""
    parts = ["# Measured on a GPU", "\n".join(_introduction(result)), TEXT["untested"], _contents(result)]
    if "plans" in result["sections"]:
        parts.append(TEXT["picture"])
    return "\n\n".join([*parts, "[All figures](notes/gpu.md)", TEXT["source"], ""]).rstrip() + "\n"


def note(result: Result) -> str:
    """All figures."""
    lines = [
        "# Figures of the GPU measurements",
        "",
        f"{TEXT['source']} The summary is [Measured on a GPU](../gpu.md).",
    ]
    for name, section in ((name, result["sections"][name]) for name in SECTIONS if name in result["sections"]):
        ran = f"*{section.get('at', '').partition('T')[0]}, commit {section['commit']}.*"
        lines += ["", f"## {SECTIONS[name]['title']}", "", ran, "", *_section(name, section)]
    return "\n".join([*lines, ""])


def _introduction(result: Result) -> Iterator[str]:
    if not result["sections"]:
        yield "**No CUDA path of debubble has run yet.** Everything below waits for a machine with a GPU."
        return
    if result.get("dry_run"):
        yield "**These are figures of a dry run on a CPU with tiny sizes: they say nothing about a GPU.**"
        return
    if machine := _figures(result, "machine").get("machine"):
        driver = machine["driver_and_clocks"].split(",")[0]
        yield f"Measured on one {machine['device']} with torch {machine['torch']} and driver {driver}."
    standings = [_standing(name, result["sections"][name]) for name in SECTIONS if name in result["sections"]]
    full, part = (sum(words.startswith(start) for words in standings) for start in ("in full", "in part"))
    yield f"Of {len(SECTIONS)} sections {full} have run in full and {part} in part."
    yield ""
    yield from headlines(result)


def headlines(result: Result) -> Iterator[str]:
    """Main results in a few lines, each computed from the figures."""
    tests, profile, large = (_figures(result, name) for name in ("tests", "profile", "large"))
    if "passed" in tests:
        yield f"* **Tests**: {tests['passed']} passed, {len(tests.get('failed', {}))} failed."
    for case, figures in profile.items():
        if "units" in figures:
            layer = [figures["units"][kind] for kind in ("attention", "mlp")]
            ratios = ", ".join(
                f"{way} {_sum(layer, way, 'measured') / _sum(layer, way, 'predicted'):.2f}"
                for way in ("forward", "backward")
            )
            yield f"* **A layer without a profile** ({case}), measured / computed: {ratios}."
    if gaps := [error for _, error in _kept_errors(profile)]:
        within = sum(error <= 0.02 for error in gaps)
        yield f"* **Bytes that a unit keeps**: {within} of {len(gaps)} computed figures are within 2% of what it kept."
    if spans := sorted(
        program["span"]["ratio"]
        for devices in _figures(result, "plans").values() if isinstance(devices, dict)
        for programs in devices.values()
        for program in programs.values() if isinstance(program, dict) and "span" in program
    ):  # fmt: skip
        yield (
            f"* **A device's program with a profile**, from its first operation to its last, measured / predicted:"
            f" {spans[0]:.2f} to {spans[-1]:.2f} for {len(spans)} programs, whose messages come when predicted."
            " What one device's delay does to the others is not in it."
        )
    ways = [way for way in WAYS if "fits" in large.get(way, {})]
    if ways:
        outcomes = ", ".join(f"{way} {'trains' if large[way]['fits'] else 'does not fit'}" for way in ways)
        yield f"* **A model that does not fit**: {outcomes}."


def _sum(units: Sequence[Figures], way: str, quantity: str) -> float:
    return sum(float(unit[way][quantity]) for unit in units)


def _kept_errors(profile: Figures) -> Iterator[tuple[str, float]]:
    """Relative errors of all figures for bytes that a unit saves."""
    for case, figures in profile.items():
        for kind, unit in figures.get("units", {}).items():
            saved_bytes = {"activation": unit["activation"]} | {n: s["kept"] for n, s in unit["strategies"].items()}
            for name, figure in saved_bytes.items():
                if figure["ratio"] is not None:
                    yield f"{case}, {kind}, {name}", abs(figure["ratio"] - 1)


def _contents(result: Result) -> str:
    lines = []
    for name, texts in SECTIONS.items():
        section = result["sections"].get(name, {})
        standing = _standing(name, section) if section else "**has not run**"
        when = section.get("at", "").partition("T")[0]
        lines.append((texts["title"], texts["what"], standing, when, section.get("commit", "")))
    return table(("section", "what", "status", "at", "commit"), lines)


def _standing(name: str, section: dict[str, Any]) -> str:
    """Words for how much of a section has run: in full or in part, and the cases that have not."""
    figures, status = section.get("figures", {}), section["status"]
    missing = [way for way in WAYS if way not in figures] if name == "large" else []
    paths = [path for path, tree in _trees("", figures) if _is_missing(tree)]
    missing += [path.replace(",", "") for path in paths if path.count(",") < CASE_DEPTH]
    if missing:
        return f"in part{'' if status == 'ran' else f': {status}'}, without {', '.join(missing)}"
    if status == "ran":
        return "in full"
    # Nothing says which cases of other sections there would have been.
    return f"in full, {status} after the last case" if name == "large" else f"in part: {status}"


def _is_missing(tree: Figures) -> bool:
    """Whether these figures are of a case that failed or was left out."""
    return "left_out" in tree or isinstance(tree.get("failed"), str)


def _figures(result: Result, name: str) -> Figures:
    figures: Figures = result["sections"].get(name, {}).get("figures", {})
    return figures


def _section(name: str, section: dict[str, Any]) -> Iterator[str]:
    if "note" in section:
        yield from (section["note"], "")
    if section["status"] != "ran":
        why = section.get("traceback", section.get("why", "")).strip().split("\n")[-1]
        yield f"Ended after {section.get('seconds', 0)} s: {section['status']}. {why}".rstrip()
        yield ""
    tables = {"tests": _tests, "torch": _overheads, "profile": _profile, "plans": _programs, "rivals": _paces}
    yield from tables.get(name, _pairs)(section.get("figures", {}))


def _profile(figures: Figures) -> Iterator[str]:
    """Lines of unit types, and of the operators of half-layers."""
    lines = []
    for case, profile in figures.items():
        lines += [(case, f"**{kind}**", *_both_ways(unit)) for kind, unit in profile.get("units", {}).items()]
        for half, operators in profile.get("operators", {}).items():
            if isinstance(operators, dict):
                lines += [(case, f"{half}: {name}", *_both_ways(operator)) for name, operator in operators.items()]
    head = ("forward, ms", "computed", "ratio", "backward, ms", "computed", "ratio")
    yield table(("tokens", "unit or operator", *head), lines)
    off = [f"{place} ({100 * error:.0f}%)" for place, error in _kept_errors(figures) if error > 0.02]
    yield f"\nBytes kept that are off by more than 2%: {', '.join(off) or 'none'}.\n"
    yield from _remarks("", figures)


def _both_ways(tree: Figures) -> Iterator[str]:
    for figure in (tree["forward"], tree["backward"]):
        yield from (f"{1e3 * figure['measured']:.3f}", f"{1e3 * figure['predicted']:.3f}", _ratio(figure))


def _tests(figures: Figures) -> Iterator[str]:
    failed = figures.get("failed", {})
    yield f"{figures.get('passed', 0)} passed, {figures.get('skipped', 0)} skipped, {len(failed)} failed."
    for test, text in failed.items():
        yield f"* `{test}`: {text.strip().splitlines()[-1] if text.strip() else 'no text'}"


def _overheads(figures: Figures) -> Iterator[str]:
    lines = []
    for model, ways in figures.items():
        for way, results in ways.items():
            if "failed" in results or "left_out" in results:
                lines.append((model, way, _last(results), "", "", ""))
                continue
            for name, one in results.items():
                if "failed" in one:
                    lines.append((model, way, f"{name} {_last(one)}", "", "", ""))
                    continue
                beyond = "" if name == "autograd" else f"{1e6 * one['per_operation']:.1f}"
                lines.append((model, way, name, f"{1e3 * one['step_seconds']:.2f}", beyond, f"{one['loss']:.6f}"))
    yield table(("model", "", "way", "step, ms", "beyond the loop per operation, µs", "loss"), lines)


def _paces(figures: Figures) -> Iterator[str]:
    """Lines of all ways to train the same layers."""
    lines = []
    for length, ways in figures.items():
        for way, one in ways.items():
            if "tokens_per_second" in one:
                memory = (f"{one[key] / 1e9:.1f} GB" if one[key] else "" for key in ("allocated", "reserved"))
                pace = f"{one['tokens_per_second']:,.0f}", f"{100 * one['mfu']:.1f}%"
                lines.append((length, way, *pace, *memory, f"{one['losses'][-1]:.3f}"))
    yield table(("", "way", "tokens/s", "MFU", "allocated", "reserved", "loss"), lines)
    yield ""
    yield from _remarks("", figures)


def _programs(figures: Figures) -> Iterator[str]:
    """Lines of the programs of a device."""
    lines = []
    for plan, devices in figures.items():
        for device, programs in devices.items() if isinstance(devices, dict) else ():
            results = {"auto": programs} if device == "auto" else programs if device != "together" else {}
            for name, one in results.items():
                if isinstance(one, dict) and "operations" in one:
                    lines.append((f"{plan}, {device}", name, *_cells(one)))
    times = ("plan", "program", "F", "B or I", "W", "span", "activations")
    yield f"{TEXT['programs']}\n"
    yield table((*times, "hidden, predicted", "hidden", "allocated", "reserved"), lines)
    yield ""
    yield from _remarks("", figures)


def _cells(one: Figures) -> Iterator[str]:
    kinds, memory, moved = one["operations"], one["memory"], one["hidden_transfers"]
    for kind in ("F", "I" if "I" in kinds else "B", "W"):
        yield _ratio(kinds.get(kind))
    yield from (_ratio(one["span"]), _ratio(memory["activations"]))
    yield from ("", "") if not memory["offloaded"] else (f"{100 * moved[w]:.0f}%" for w in ("predicted", "measured"))
    for quantity in ("allocated_in_step", "reserved"):
        yield f"{memory[quantity] / 1e9:.1f} GB" if quantity in memory else ""


def _ratio(figure: Figures | None) -> str:
    return "" if figure is None or figure.get("ratio") is None else f"{figure['ratio']:.3f}"


def _pairs(figures: Figures) -> Iterator[str]:
    """Lines of all pairs of prediction and measurement."""
    pairs = {
        path: tree for path, tree in _trees("", {k: v for k, v in figures.items() if k != "machine"})
        if tree.keys() == {"predicted", "measured", "ratio"}
    }  # fmt: skip
    lines = [(path, f"{p['predicted']:.4g}", f"{p['measured']:.4g}", _ratio(p)) for path, p in pairs.items()]
    yield table(("figure", "predicted", "measured", "measured / predicted"), lines)
    if remarks := list(_remarks("", figures)):
        yield from ("", *remarks)


def _trees(path: str, tree: Any) -> Iterator[tuple[str, Figures]]:
    """All parts of the figures except for the units file."""
    if isinstance(tree, dict):
        yield path, tree
        for name, value in tree.items():
            if name != "profile":
                yield from _trees(f"{path}, {name}" if path else name, value)


def _remarks(path: str, tree: Any) -> Iterator[str]:
    """Lines of parts that failed, were left out, or have a remark."""
    for place, subtree in _trees(path, tree):
        if "failed" in subtree or "left_out" in subtree:
            yield f"* {place}: {_last(subtree)}"
        elif "fits" in subtree:
            yield f"* {place}: {_training(subtree)}"


def _training(tree: Figures) -> str:
    if not tree["fits"]:
        return f"does not fit. {tree['sentence']}"
    losses = ", ".join(f"{loss:.3f}" for loss in tree["losses"])
    kinds = [kind for kind in ("static", "activations", "offloaded", "allocated") if tree[kind]]
    sizes = ", ".join(f"{tree[kind] / 1e9:.1f} GB {kind}" for kind in kinds)
    return f"trains at {tree['tokens_per_second']:.0f} tokens per second; {sizes}; losses {losses}."


def _last(tree: Figures) -> str:
    if "left_out" in tree:
        return f"left out: {tree['left_out']}."
    return f"failed: {tree['failed'].strip().splitlines()[-1]}"
