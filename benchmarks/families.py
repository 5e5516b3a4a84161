"""Every causal family of transformers: whether a pipeline's loss and gradients are those of its model in one process.

    python benchmarks/families.py [FAMILY ...] [--output benchmarks/results/families.json]   # ten minutes
    python benchmarks/families.py --docs                            # the table of docs/notes/families.md from the file

A tiny model of each family trains one step of 8 sequences of 12 tokens on two devices, under 1F1B, under ZB-V, and
under 1F1B with full recomputation, all in fp64; what transformers computes in fp32 whatever the dtype stays in fp64
on both sides.  The error is the largest difference of a gradient as a share of its largest entry, or of the loss.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as functional
import transformers
from marks import write_between
from provenance import measured_by
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import debubble as db
from debubble.costs import Cluster
from debubble.errors import DebubbleError
from debubble.ir import RunOptions, StageCosts
from debubble.models import ModelConfig
from debubble.plans import ModelOnCluster, Plan
from debubble.runtime import Pipeline
from debubble.runtime.distributed.transport import Threads

FAMILIES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
RESULTS = Path(__file__).parent / "results" / "families.json"
PAGE = Path(__file__).parents[1] / "docs" / "notes" / "families.md"
BEGIN, END = "<!-- families: written by benchmarks/families.py --docs -->", "<!-- end of families -->"
TOLERANCE = 1e-12
LARGEST = 3_000_000
"""Parameters of the largest model that counts as tiny."""
RUNS = (("1f1b", "none"), ("zb-v", "none"), ("1f1b", "full"))

BASE: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Entries of every tiny config."""
SIZES: Mapping[str, Any] = {
    "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "d_model": 32, "n_layers": 4, "n_heads": 4,
    "ffn_dim": 48, "word_embed_proj_dim": 32, "head_dim": 8, "num_local_experts": 4, "num_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0, "num_mtp_layers": 0, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
    "mamba_d_state": 8, "mamba_expand": 2, "state_size": 8, "n_groups": 1, "num_heads": 8, "mamba_d_ssm": 64,
    "intermediate_size_mlp": 48, "sliding_window": 5, "num_kv_heads": 2, "expand": 2, "conv_kernel": 4,
    "time_step_rank": 4, "d_ff": 48, "d_inner": 48, "dff": 48, "moe_num_experts": 4, "moe_k": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "chunk_size": 8, "scale_emb": 1,
    "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 61, "num_kv_shared_layers": 0,
    "ffn_hidden_size": 48, "query_pre_attn_scalar": 8, "num_mem_blocks": 1,
}  # fmt: skip
"""Entries of those families that have them."""
RANDOM = ("dropout", "pdrop", "jitter")
"""Parts of the names of entries by which a model draws random numbers: they are zero."""
_LATENT = {"num_key_value_heads": 4, "head_dim": 4}
CHANGES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3",
         "sarvam_mla", "youtu"), _LATENT,
    ),
    "codegen": {"rotary_dim": 8}, "gptj": {"rotary_dim": 8}, "dots1": {"n_shared_experts": 1},
    "gpt_neo": {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 5},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2}, "modernbert-decoder": {"pad_token_id": 0},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2}, "xglm": {"ffn_dim": 48, "attention_heads": 4},
    "cpmant": {"dim_ff": 48, "dim_head": 8, "prompt_length": 4, "prompt_types": 2, "segment_types": 2},
}  # fmt: skip
"""Entries of one family."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was found of one family."""

    family: str
    outcome: Literal["agrees", "differs", "refused", "fails", "not built"]
    error: float | None = None
    """The largest error of all runs, where it ran."""
    why: str = ""
    """The sentence that refuses it, or what transformers says of the tiny config."""


class Wide(TorchFunctionMode):
    """A mode in which what is fp64 stays so where transformers computes in fp32."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if bool(args) and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            to_single = function is torch.Tensor.to and torch.float32 in args[1:]
            if function is torch.Tensor.float or to_single:
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


def tiny_config(family: str) -> dict[str, Any]:
    """The complete config of a family's tiny model."""
    kind = type(transformers.AutoConfig.for_model(family))
    known = {*kind().to_dict(), *inspect.signature(kind.__init__).parameters}
    entries = {**BASE, **{name: value for name, value in SIZES.items() if name in known}}
    entries |= {name: 0.0 for name in known if any(part in name for part in RANDOM)}
    read = kind.from_dict({**entries, "model_type": family, **CHANGES.get(family, {})})
    return {**read.to_dict(), "model_type": family}


def tiny_model(config: Mapping[str, Any]) -> Any:
    """The model in fp64, with weights, biases and norms drawn at random.  Raises ValueError if it is large."""
    read = type(transformers.AutoConfig.for_model(config["model_type"])).from_dict(dict(config))
    build: Any = transformers.AutoModelForCausalLM.from_config
    with torch.device("meta"):
        size = sum(p.numel() for p in build(read).parameters())
    if size > LARGEST:
        raise ValueError(f"the tiny config makes {size:.0e} parameters")
    torch.manual_seed(1)
    model = build(read, experts_implementation="eager")
    single = {name: buffer for name, buffer in model.named_buffers() if "inv_freq" in name}
    model = model.double()
    for name, buffer in single.items():
        path, _, own = name.rpartition(".")
        model.get_submodule(path)._buffers[own] = buffer
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * (0.1 if "norm" in name and not name.endswith("bias") else 0.05))
            else:
                p.copy_(torch.randn_like(p) * 0.2 * (8 / max(8, p.shape[-1])) ** 0.5)
    return model.train()


def reference(model: Any, tokens: Tensor, micro_batches: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the whole model in one process, micro-batch by micro-batch."""
    total, counted = torch.zeros((), dtype=torch.float64), tokens[:, 1:].numel()
    with Wide():
        for part in tokens.chunk(micro_batches):
            logits = model(input_ids=part[:, :-1], use_cache=False).logits
            loss = functional.cross_entropy(logits.flatten(0, 1).double(), part[:, 1:].flatten(), reduction="sum")
            (loss / counted).backward()
            total += loss.detach() / counted
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def plan_of(name: str, strategy: str, config: Mapping[str, Any]) -> Plan:
    """A plan for two devices and four micro-batches, in equal runs of units that all recompute so."""
    stages = 4 if name == "zb-v" else 2
    schedule = db.schedules[name](devices=2, micro_batches=4, costs=StageCosts.of(stages=stages))
    if strategy != "none":
        schedule = replace(schedule, fused_recompute=frozenset(range(stages)))
    units = [replace(unit, strategy=strategy) for unit in ModelConfig.from_hf(config).units]
    bounds = [round(stage * len(units) / stages) for stage in range(stages + 1)]
    return Plan(
        planner="even", schedule=schedule, costs=StageCosts.of(stages=stages), lower_bound=0,
        model_on_cluster=ModelOnCluster(ModelConfig.from_hf(config), Cluster.parse("2xCPU")),
        partition=tuple(tuple(units[a:b]) for a, b in pairwise(bounds)),
        options=RunOptions(dtype="fp64"),
    )  # fmt: skip


def error_of(model: Any, plan: Plan, tokens: Tensor, loss: Tensor, gradients: Mapping[str, Tensor]) -> float:
    """The largest error of a plan's step."""

    def step(transport: Any) -> tuple[Tensor, dict[str, Tensor]]:
        pipeline = Pipeline(copy.deepcopy(model), plan, transport=transport)
        with Wide():
            found = pipeline.step(tokens)
        return found, {name: p.grad for name, p in pipeline.named_parameters() if p.grad is not None}

    answers = Threads.run(plan.ranks, step)
    found = {name: gradient for _, part in answers for name, gradient in part.items()}
    errors = [_relative(answers[0][0], loss)]
    # Some gradients are zero, as that of a bias of keys: rounding is measured by the size of the others.
    floor = 1e-6 * max(float(gradient.abs().max()) for gradient in gradients.values())
    errors += [_relative(found[name], gradient, floor) for name, gradient in gradients.items()]
    return max(errors)


def _relative(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(floor))


def judge(family: str) -> Row:
    """Compare a family's tiny model under every run of RUNS."""
    try:
        config = tiny_config(family)
        model = tiny_model(config)
        tokens = torch.randint(3, config.get("vocab_size", 61), (8, 13), generator=torch.Generator().manual_seed(5))
        loss, gradients = reference(copy.deepcopy(model), tokens, 4)
    except Exception as error:  # whatever transformers says of a tiny config that it does not build or run
        return Row(family=family, outcome="not built", why=f"{type(error).__name__}: {_first_line(error)}")
    errors = []
    for name, strategy in RUNS:
        try:
            plan = plan_of(name, strategy, model.config.to_dict())
            errors.append(error_of(model, plan, tokens, loss, gradients))
        except DebubbleError as error:
            return Row(family=family, outcome="refused", why=str(error))
        except Exception as error:
            return Row(family=family, outcome="fails", why=f"{type(error).__name__}: {_first_line(error)}")
    return Row(family=family, outcome="agrees" if max(errors) < TOLERANCE else "differs", error=max(errors))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:160]


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown: families by outcome."""
    found = {outcome: [row for row in rows if row.outcome == outcome] for outcome in ("agrees", "refused", "not built")}
    worst = max(row.error or 0.0 for row in found["agrees"])
    return "\n".join(
        (
            f"Of {len(rows)} causal families of transformers, tiny models of {len(found['agrees'])} train as in one"
            f" process (largest error {worst:.0e}), {len(found['refused'])} are refused with a sentence, and of"
            f" {len(found['not built'])} the benchmark has no tiny model (encoders, decoders of encoders, several"
            " modalities).",
            "",
            "| | families |",
            "|---|---|",
            f"| train | {_names(found['agrees'])} |",
            f"| are refused | {_names(found['refused'])} |",
            f"| no tiny model | {_names(found['not built'])} |",
        )
    )


def _names(rows: Sequence[Row]) -> str:
    return ", ".join(row.family for row in rows)


def read_rows(path: Path = RESULTS) -> list[Row]:
    """The rows of a result file."""
    return [Row(**row) for row in json.loads(path.read_text())["rows"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", help="families; the default is all")
    parser.add_argument("--output", type=Path, help="write the rows to this file")
    parser.add_argument("--docs", action="store_true", help="write the table of the docs from the result file")
    arguments = parser.parse_args()
    if arguments.docs:
        write_between(PAGE, BEGIN, END, table(read_rows()))
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = []
    for family in arguments.family or FAMILIES:
        rows.append(judge(family))
        error = "" if rows[-1].error is None else f"{rows[-1].error:.1e}"
        print(f"{family:26} {rows[-1].outcome:10} {error} {rows[-1].why}", flush=True)
    if arguments.output:
        arguments.output.write_text(
            json.dumps(measured_by() | {"rows": [asdict(row) for row in rows]}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
