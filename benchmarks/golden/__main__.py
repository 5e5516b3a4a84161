"""Compares this version's answers with those of the golden corpus, or writes them: `make golden`.

    python -m golden [--only NAME ...] [--exact] [--update] [--list]        (in benchmarks/)

Without `--exact` a case may be faster, or up to 0.5% slower; the geometric mean of all steps may not be slower, and no
bound of a setting wider by more than one point.  `--exact` also holds every hash (plans, exported files, JSON of
commands): a move changes none.  `--update` writes the answers of this version, with commit, machine and command.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from benchmark import provenance

from golden.cases import Case, PlanCase, cases
from golden.run import Answer, answer_of

EXPECTED = Path(__file__).with_name("expected.json")
SLOWER = 1.005
"""Largest accepted ratio of a case's step to the expected one."""
WIDER = 0.01
"""Largest accepted increase of a setting's gap."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names, or beginnings of names")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    chosen = [case for case in cases() if args.only is None or case.name.startswith(tuple(args.only))]
    if args.list:
        print("\n".join(case.name for case in chosen))
        return
    known: dict[str, Any] = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {"answers": {}}
    answers: dict[str, Answer] = {}
    for case in chosen:
        start, cpu = time.perf_counter(), time.process_time()
        try:
            answers[case.name] = answer_of(case)
        except Exception as error:  # keep going: the other cases still count
            answers[case.name] = {"error": f"{type(error).__name__}: {error}"}
        step = answers[case.name].get("step")
        print(
            f"{case.name:72} {'' if step is None else f'{step:.6g}':>10}"
            f"  {time.perf_counter() - start:6.1f} s, {time.process_time() - cpu:6.1f} of the processor",
            flush=True,
        )
    if args.update:
        retained = {} if args.only is None else known["answers"]
        EXPECTED.write_text(json.dumps({**provenance(), "answers": retained | answers}, indent=1) + "\n")
        return
    failures = [
        line for case in chosen for line in differences(case, known["answers"], answers[case.name], exact=args.exact)
    ]
    mean = geometric_mean(known["answers"], answers)
    print(f"Steps are {mean:.5f} times the expected ones in the geometric mean.")
    if mean > 1 + 1e-9 and not args.exact:
        failures.append("The geometric mean of the steps is slower.")
    print("\n".join(failures) or "The corpus holds.")
    sys.exit(bool(failures))


def differences(case: Case, expected: dict[str, Answer], answer: Answer, *, exact: bool) -> list[str]:
    """List what is worse than expected or, if `exact`, different."""
    if case.name not in expected:
        return [f"{case.name}: nothing is expected of it (--update)."]
    before, lines = expected[case.name], []
    if ("step" in before) != ("step" in answer):
        lines.append(f"{case.name}: {_words(before)} before, {_words(answer)} now.")
    elif "step" in before:
        ratio = answer["step"] / before["step"]
        if ratio > SLOWER or (exact and not math.isclose(ratio, 1.0, rel_tol=1e-9)):
            lines.append(f"{case.name}: the step is {ratio:.4f} times the expected one.")
        if isinstance(case, PlanCase) and case.is_setting:
            wider = (before["bound"] - answer["bound"]) / before["step"]
            if wider > WIDER:
                lines.append(f"{case.name}: the bound is {100 * wider:.1f} points lower.")
    if exact:
        hashes, now = before.get("hashes", {}), answer.get("hashes", {})
        changed = [name for name in sorted({*hashes, *now}) if hashes.get(name) != now.get(name)]
        if changed:
            lines.append(f"{case.name}: other {', '.join(changed)}.")
    return lines


def geometric_mean(expected: dict[str, Answer], answers: dict[str, Answer]) -> float:
    """Geometric mean of the ratios of steps to the expected ones."""
    ratios = [
        answer["step"] / expected[name]["step"]
        for name, answer in answers.items()
        if "step" in answer and "step" in expected.get(name, {})
    ]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0


def _words(answer: Answer) -> str:
    return f"a step of {answer['step']:.6g}" if "step" in answer else f"'{answer.get('error', 'nothing')}'"


if __name__ == "__main__":
    main()
