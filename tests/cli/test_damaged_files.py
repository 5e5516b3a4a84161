"""Damaged files end a command with its result, or with one sentence and exit code 1 or 2."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.cli import main

CASES, SLOW_CASES = 12, 500
"""Number of cases per kind of file."""

UNIT = {
    "type": "dense", "count": 6, "forward": 1, "backward_input": 1.5, "backward_weight": 1, "static": 2,
    "strategies": {"none": {"activation": 4}, "full": {"activation": 1, "recompute": 1, "operators": "full"}},
    "activation_after_input": 2, "workspace": 1, "gradient_reduce": 0.5, "optimizer_step": 0.5,
    "on_host": {"static": 1, "gradients": 1, "parameters": 1, "step": 2},
}  # fmt: skip
UNITS = {
    "units": [UNIT, {**UNIT, "type": "head", "count": 1}],
    "communication": 0.25, "communication_model": "exclusive", "offload_bandwidth": 4, "host_link": "half-duplex",
    "link_groups": [[0, 1]], "memory_limit": [60, 60], "static": 1, "micro_batch_scale": [1, 0.5, 2, 1],
}  # fmt: skip
COSTS = {
    "stages": 2, "forward": [1, 2], "backward_input": 1, "backward_weight": 1, "recompute": 1, "activation": [4, 3],
    "activation_after_input": 2, "activation_recomputed": 1, "recompute_workspace": 3, "communication": 0.25,
    "recompute_deeper": 2, "activation_deeper": 0,
    "communication_model": "blocking", "offload": 2, "reload": 2, "host_link": "full-duplex", "link_groups": [[0, 1]],
    "static": [1, 2], "memory_limit": [30, 30], "micro_batch_scale": [1, 0.5, 2, 1], "optimizer_step": 1,
}  # fmt: skip
CLUSTER = {
    "devices": "2xA100-80GB", "devices_per_node": 2, "devices_per_switch": 2, "link_bandwidth": 1e11,
    "link_latency": 1e-5, "network_bandwidth": 1e10, "network_latency": 1e-5, "host_bandwidth": 2e10,
    "host_link": "full-duplex", "flops": 3e14, "memory_bandwidth": 1e12, "memory_limit": ["72GiB", 70e9],
    "safety_margin": 0.1,
    "efficiency": {"matmul": [[128, 0.2], [1024, 0.6]], "attention": [[1024, 0.4]], "memory": 0.8, "launch": 1e-5},
}  # fmt: skip
CONFIG = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 256,
    "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
    "mlp_only_layers": [1], "sliding_window": 64, "use_sliding_window": True, "tie_word_embeddings": False,
    "attention_bias": False, "attention_dropout": 0.0,
}  # fmt: skip
OTHER_CONFIG = {
    "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 256, "layer_types": ["full_attention"] * 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "mlp_only_layers": [2], "layer_norm_eps": 1e-5,
}  # fmt: skip

WRONG: tuple[Any, ...] = (
    None, True, "", "a", "2xCPU", [], {}, -1, 0, 1, 1.5, [1], [[1, 2]], {"a": 1}, {"0": 9}, [None], "9" * 500,
)  # fmt: skip
EXTREME = (10**18, 10**30, 10**400, 2**63, 1e308, 5e-324, -(10**30), 1e-300)


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Entries of a JSON value, as container and key."""
    for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield node, key
        yield from places(node[key])


def damaged(content: Any, dice: random.Random) -> bytes:
    """File content with one to three entries changed, or with broken text."""
    content = copy.deepcopy(content)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        entries = list(places(content))
        if entries:
            change(*dice.choice(entries), dice)
    text = json.dumps(content)
    match dice.randrange(12):
        case 0:
            text = text[: dice.randrange(len(text))]
        case 1:
            i = dice.randrange(len(text))
            text = text[:i] + dice.choice(("[" * 3000, "NaN", "Infinity", "\x00", "}", ",", "é", "\ud83d")) + text[i:]
        case 2:
            return text.encode().replace(b"1", b"\xff", 1)
        case _:
            pass
    return text.encode(errors="surrogatepass")


def change(node: Any, key: Any, dice: random.Random) -> None:
    value = node[key]
    match dice.choice(("delete", "retype", "extreme", "negate", "nest", "duplicate", "words")):
        case "delete":
            del node[key]
        case "retype":
            node[key] = copy.deepcopy(dice.choice(WRONG))
        case "extreme":
            node[key] = dice.choice(EXTREME)
        case "negate" if isinstance(value, int | float):
            node[key] = -value
        case "nest":
            node[key] = dice.choice(([value], {"a": value}, [[[value]]]))
        case "duplicate" if isinstance(node, list):
            node.insert(key, value)
        case "words" if isinstance(value, str) and value:
            words = value.split(" ")
            i = dice.randrange(len(words))
            words[i] = dice.choice(("", words[i] * 2, words[0], words[i][:-1], words[i] + " " + words[-1], "0F99"))
            node[key] = " ".join(words)
        case _:
            node[key] = value * 2 if isinstance(value, str | list) else value


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Valid content of each kind of file; the plan has all entries that a schedule can have."""
    plan = db.plan(db.Model.from_hf(CONFIG), db.Cluster.parse("2xA100-80GB"), micro_batches=4, sequence_length=64,
                   planner="merak")  # fmt: skip
    folder = tmp_path_factory.mktemp("valid")
    plan.save(folder / "plan.json")
    content = json.loads((folder / "plan.json").read_text())
    schedule = {
        "name": "1f1b", "placement": [0, 1], "micro_batches": 4, "fused_recompute": [0],
        "orders": [
            "0F0 0O0 0F1 0L0 0B0 0F2 0I1 0W1 0F3 0B2 0B3", "1F0 1R0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
        ],
        "recompute_fraction": {"0": 0.5}, "offload_fraction": {"0": 0.5}, "peers": {"0": 1}, "asynchronous": [0],
        "deeper": [[1, 0]],
    }  # fmt: skip
    plans = {**content, "schedule": schedule, "costs": COSTS}
    (folder / "plan.json").write_text(json.dumps(plans))
    trace = {
        "debubble_trace": 1, "devices": 2, "cores": 2,
        "steps": [{"step": 0, "events": _events(folder / "plan.json"), "memory": [(0, 0.0, 10.0), (1, 0.5, 20.0)],
                   "phases": [("loads data", 0, 0.0, 0.5)]}],
    }  # fmt: skip
    return {
        "plan": plans, "costs": COSTS, "units": UNITS, "cluster": CLUSTER, "config": CONFIG, "other": OTHER_CONFIG,
        "trace": trace, "valid plan": str(folder / "plan.json"),
    }  # fmt: skip


def _events(plan: Path) -> list[Any]:
    """Events of a trace in which all operations take their predicted time."""
    operations = db.Plan.load(plan).simulate().operations
    return [(op.name, op.device, op.lane.value, float(op.start), float(op.end)) for op in operations]


MODEL = ("--micro-batches", "4", "--sequence-length", "64", "--planner", "merak")
ABSTRACT = ("--devices", "2", "--micro-batches", "4", "--effort", "0")
COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "plan": (("simulate", "FILE"), ("show", "FILE"), ("export", "FILE", "--to", "torch", "-o", "FOLDER")),
    "costs": (
        ("simulate", "--schedule", "1f1b", "--costs", "FILE", *ABSTRACT[:4]),
        ("plan", "--costs", "FILE", *ABSTRACT, "--planner", "merak"),
        ("plan", "--costs", "FILE", *ABSTRACT, "--planner", "obscura"),
    ),
    "units": (
        ("plan", "--units", "FILE", *ABSTRACT, "--planner", "merak"),
        ("plan", "--units", "FILE", *ABSTRACT, "--planner", "adapipe"),
    ),
    "cluster": (("plan", "llama-tiny", "--cluster", "FILE", *MODEL),),
    "config": (("plan", "FILE", "--cluster", "2xA100-80GB", *MODEL),),
    "other": (("plan", "FILE", "--cluster", "2xA100-80GB", *MODEL),),
    "trace": (("compare", "PLAN", "FILE"), ("show", "PLAN", "--trace", "FILE")),
}


def outcome(command: tuple[str, ...]) -> int:
    """Run a command in this process; returns its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["debubble", *command, "--json"])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0)


def check(kind: str, seed: int, files: dict[str, Any], folder: Path, read: Callable[[], Any]) -> int:
    """Damage a file of a kind and run a command on it; returns the exit code after checking the output."""
    dice = random.Random(f"{kind} {seed}")
    file = folder / ("file.yaml" if kind == "cluster" else "file.json")
    content = damaged(files[kind], dice)
    file.write_bytes(content)
    names = {"FILE": str(file), "FOLDER": str(folder / "exported"), "PLAN": files["valid plan"]}
    command = tuple(names.get(word, word) for word in dice.choice(COMMANDS[kind]))
    case = f"{' '.join(command)} with {content[:3000]!r}"
    try:
        code = outcome(command)
    except Exception as error:
        raise AssertionError(f"A traceback from {case}") from error
    out, err = read()
    if code:
        assert code in (1, 2), case
        assert err.strip().splitlines()[-1].startswith("debubble: "), case
        assert err.count("debubble: ") == 1, case
        assert "Traceback" not in err, case
    else:
        json.loads(out, parse_constant=lambda word: pytest.fail(f"It printed {word}: {case}"))
    return code


@pytest.mark.parametrize("kind", list(COMMANDS))
def test_undamaged_file_is_accepted(
    kind: str, files: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / ("file.yaml" if kind == "cluster" else "file.json")
    file.write_text(json.dumps(files[kind]))
    names = {"FILE": str(file), "FOLDER": str(tmp_path / "exported"), "PLAN": files["valid plan"]}
    for command in COMMANDS[kind]:
        code = outcome(tuple(names.get(word, word) for word in command))
        assert code == 0, capsys.readouterr().err


@pytest.mark.parametrize("kind", list(COMMANDS))
def test_damaged_file_is_answered_or_refused_in_a_sentence(
    kind: str, files: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = {check(kind, seed, files, tmp_path, capsys.readouterr) for seed in range(CASES)}
    assert {0, 2} <= codes


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(COMMANDS))
def test_many_more_damaged_files_are_answered_or_refused(
    kind: str, files: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(CASES, SLOW_CASES):
        check(kind, seed, files, tmp_path, capsys.readouterr)


EDITS = [
    ("sequence_length", 8192, ("show",)),
    ("sequence_length", 8192, ("export", "--to", "torch")),
    ("zero", 3, ("show",)),
]


@pytest.mark.parametrize(("option", "value", "command"), EDITS)
def test_edited_plan_is_reported_first(
    run: Any, tmp_path: Path, option: str, value: int, command: tuple[str, ...]
) -> None:
    plan = db.plan("llama-tiny", "2xL40S-48GB", planner="dapple", micro_batches=4)
    plan.save(tmp_path / "plan.json")
    edited = json.loads((tmp_path / "plan.json").read_text())
    edited["options"][option] = value
    (tmp_path / "edited.json").write_text(json.dumps(edited))
    warning = "The plan's costs are not what its partition, options and cluster cost now"
    for name, is_warned in (("plan.json", False), ("edited.json", True)):
        code, out, err = run(command[0], str(tmp_path / name), *command[1:])
        assert code == 0
        assert (warning in " ".join((out + err).split())) is is_warned
