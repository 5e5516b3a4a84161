"""`--json` output has exactly the keys of its schema, and the docs have these schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import debubble as db
from debubble.cli.answers import ANSWERS
from debubble.cli.schema import json_schema
from tests.exports.hand_plans import priced
from tests.imports.test_measurements import trace
from tests.imports.test_megatron import SCRIPT
from tests.views.scenes import small_plan, trace_of

DOCS = Path(__file__).parents[2] / "docs" / "schemas"
SMALL = ("--cluster", "4xA100-80GB", "--sequence-length", "128", "--effort", "0.1", "--micro-batches", "4")


@pytest.fixture
def check(json_of: Any) -> Any:
    """Call a command and check that its answer has exactly the keys of its schema."""

    def call(command: str, *arguments: str) -> None:
        answer = json_of(command, *arguments)
        assert json.loads(msgspec.json.encode(msgspec.convert(answer, ANSWERS[command]))) == answer

    return call


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("plan", ("llama-tiny", *SMALL)),
        ("plan", ("llama-tiny", *SMALL, "--planner", "dapple", "--tokens", "1e9", "--pareto")),
        pytest.param("plan", ("llama-tiny", *SMALL, "--planner", "dapple", "--why"), marks=pytest.mark.slow),
        ("plan", ("llama-tiny", *SMALL[:-2], "--global-batch", "8", "--planner", "dapple", "--for", "megatron")),
        ("plan", ("--costs", "COSTS", "--devices", "2", "--micro-batches", "4", "--planner", "dapple")),
        ("plan", ("llama-tiny", *SMALL, "--planner", "dapple", "--robust")),
        ("fits", ("llama-tiny", "--cluster", "4xA100-80GB", "--sequence-length", "128")),
        pytest.param("fits", ("mixtral-8x7b", "--cluster", "16xH100-80GB"), marks=pytest.mark.slow),
        ("simulate", ("llama-tiny", "--cluster", "4xA100-80GB", "--sequence-length", "128", "--schedule", "zb-h1")),
        ("hardware", ()),
        ("frameworks", ()),
        ("models", ()),
        ("planners", ()),
        ("schedules", ()),
    ],
)
def test_answer_has_exactly_the_keys_of_its_schema(
    command: str, arguments: tuple[str, ...], check: Any, tmp_path: Path
) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text('{"stages": 2, "forward": 1, "backward_input": 1, "backward_weight": 1, "activation": 1}')
    check(command, *(str(costs) if argument == "COSTS" else argument for argument in arguments))


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("compare", ("plan.json", "trace.json")),
        ("export", ("plan.json", "--to", "torch")),
        ("show", ("model.json", "plan.json")),
        ("show", ("plan.json", "--trace", "trace.json")),
    ],
)
def test_commands_that_read_plans_answer_by_their_schema(
    command: str, arguments: tuple[str, ...], check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    db.plan("llama-tiny", "2xA100-80GB", micro_batches=4, planner="dapple").save("model.json")
    small_plan().save("plan.json")
    trace_of(small_plan()).save("trace.json")
    check(command, *arguments)


def test_import_answers_by_its_schema(check: Any, tmp_path: Path) -> None:
    job = tmp_path / "job.sh"
    job.write_text(SCRIPT.replace("EXTRA", ""))
    for more in (("--as-it-is",), ("--planner", "dapple")):
        check("import", "megatron", str(job), "--cluster", "4xA100-80GB", *more)


def test_profile_answers_by_its_schema(check: Any, tmp_path: Path) -> None:
    plan, output = priced(), str(tmp_path / "costs.json")
    plan.save(tmp_path / "plan.json")
    traces = [word for path in trace(plan, tmp_path, lambda *_: 2.0) for word in ("--from-trace", str(path))]
    check("profile", str(tmp_path / "plan.json"), *traces, "-o", output)


def test_reproduce_answers_by_its_schema(json_of: Any) -> None:
    answer = json_of("reproduce", "obscura", "--only", "Figure 1", "--only", "table 1")
    assert [entry["place"] for entry in answer["reports"][0]["entries"]] == ["Figure 1", "Table 1"]
    assert any(entry["tables"] for entry in answer["reports"][0]["entries"])
    assert json.loads(msgspec.json.encode(msgspec.convert(answer, ANSWERS["reproduce"]))) == answer


@pytest.mark.parametrize("command", list(ANSWERS))
def test_the_schemas_in_the_docs_are_those_of_the_answers(command: str) -> None:
    written = json.loads((DOCS / f"{command}.json").read_text())
    assert written == json.loads(json.dumps(json_schema(command))), (
        f"debubble schema {command} > docs/schemas/{command}.json"
    )


@pytest.mark.parametrize("more", [("--micro-batches", "4"), ("--global-batch", "4")])
def test_answer_of_a_model_plan_has_advice(more: tuple[str, ...], json_of: Any) -> None:
    quick = (*SMALL[:4], "--effort", "0", "--planner", "dapple")
    answer = json_of("plan", "llama-tiny", *quick, *more)

    first = answer["configurations"][0]
    assert (first["degrees"], first["step_time"]) == (answer["degrees"], pytest.approx(answer["step_time"]))
    assert answer["advice"][0]["change"] == "the same job again"
    assert all(hint["fits"] == (hint["step_time"] is not None) for hint in answer["advice"])


def test_schema_command_prints_a_schema_or_suggests_one(run: Any, json_of: Any) -> None:
    code, out, _ = run("schema", "fits")
    assert code == 0
    assert json.loads(out) == json_of("schema", "fits") == json.loads((DOCS / "fits.json").read_text())
    code, _, err = run("schema", "trane")
    assert code == 2
    assert "There is no schema 'trane'; did you mean 'train'?" in " ".join(err.split())
