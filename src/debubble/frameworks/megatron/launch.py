"""Writes the shell scripts of Megatron-LM's export: one with the arguments, and one that starts torchrun with them."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from debubble.costs import Cluster

ARGUMENTS_FILE = "megatron-arguments.sh"
LAUNCH_FILE = "launch.sh"


def arguments_script(
    model: Mapping[str, Any], arguments: Mapping[str, Any], variables: Mapping[str, str], *, left_out: Sequence[str]
) -> str:
    """The file that sets the arrays DEBUBBLE_MODEL_ARGS and DEBUBBLE_ARGS.

    Args:
        model: The model's arguments, name -> value; True for an argument without a value.
        arguments: The plan's arguments.
        variables: Environment variables to set.
        left_out: Arguments that the user must not add.
    """
    lines = [
        "# A plan of debubble for Megatron-LM: source this file, and give the arrays to the training script, as in:",
        '#   torchrun ... pretrain_gpt.py "${DEBUBBLE_MODEL_ARGS[@]}" "${DEBUBBLE_ARGS[@]}"',
        "# Leave out of your own arguments, as the plan has none of them or Megatron-LM refuses them next to it:",
        *textwrap.wrap(
            " ".join(left_out),
            width=110,
            initial_indent="#   ",
            subsequent_indent="#   ",
            break_on_hyphens=False,
        ),
        *(f"export {name}={value}" for name, value in variables.items()),
        *_array("DEBUBBLE_MODEL_ARGS", model),
        *_array("DEBUBBLE_ARGS", arguments),
    ]
    return "\n".join(lines) + "\n"


def _array(name: str, arguments: Mapping[str, Any]) -> Iterator[str]:
    yield f"{name}=("
    for argument, value in arguments.items():
        yield f"    {argument}" if value is True else f"    {argument} {' '.join(map(shlex.quote, _words(value)))}"
    yield ")"


def _words(value: Any) -> list[str]:
    return list(value) if isinstance(value, tuple) else [str(value)]


_LAUNCH = """\
#!/usr/bin/env bash
# Trains a plan of debubble with Megatron-LM: run this file on every node, in Megatron-LM's folder, with the rest of
# Megatron-LM's arguments, such as --lr, --train-iters and --save, as in:
#   {given}TOKENIZER=NAME DATA=PREFIX bash FOLDER/{path} --lr 3e-4 --train-iters 1000
set -eu
source "$(dirname "${{BASH_SOURCE[0]}}")/{arguments}"
TORCHRUN_ARGS=(
    --nproc-per-node {devices}
    --nnodes {nodes}
    --node-rank {rank}
    --master-addr {address}
    --master-port "${{MASTER_PORT:-29500}}"
)
DATA_ARGS=(
    --tokenizer-type "${{TOKENIZER_TYPE:-HuggingFaceTokenizer}}"
    --tokenizer-model "${{TOKENIZER:?is the name or the folder of a tokenizer}}"
    --data-path "${{DATA:?is the prefix of files that tools/preprocess_data.py wrote}}"
)
torchrun "${{TORCHRUN_ARGS[@]}}" pretrain_gpt.py \\
    "${{DEBUBBLE_MODEL_ARGS[@]}}" "${{DEBUBBLE_ARGS[@]}}" "${{DATA_ARGS[@]}}" "$@"
"""


def launch_script(cluster: Cluster, ranks: int) -> str:
    """The script that starts the ranks of one node with torchrun."""
    per_node = min(ranks, cluster.slowest.devices_per_node)
    nodes = -(-ranks // per_node)
    several = nodes > 1
    return _LAUNCH.format(
        arguments=ARGUMENTS_FILE,
        path=LAUNCH_FILE,
        given="NODE_RANK=0 MASTER_ADDR=node0 " if several else "",
        devices=per_node if ranks % per_node == 0 else "gpu",
        nodes=nodes,
        rank=f'"${{NODE_RANK:?is 0 on the first of {nodes} nodes}}"' if several else '"${NODE_RANK:-0}"',
        address='"${MASTER_ADDR:?is the name of node 0}"' if several else '"${MASTER_ADDR:-localhost}"',
    )
