"""Reads the schedule from arguments of Megatron-LM, its zero-bubble fork (sail-sg), MindSpeed and Primus."""

from __future__ import annotations

from collections.abc import Iterator

from debubble.frameworks.megatron.arguments import Arguments
from debubble.ir import InputError
from debubble.targets.orders import COMBINED

_ZERO_BUBBLE, _V, _V_MEMORY = "--enable-zero-bubble", "--zero-bubble-v-schedule", "--zero-bubble-v-schedule-mem-setup"
_PENDING = "--zero-bubble-max-pending-backward"
_DEEPSPEED = "--enable-zbh1-pipeline"
"""Megatron-DeepSpeed's switch for ZB-H1."""
_FORK = "--patch-zero-bubble"
"""Primus's switch for the fork's schedules."""
_PRIMUS, _ALGORITHM = "--patch-primus-pipeline", "--pp-algorithm"

_MINDSPEED = "--schedules-method"
_MINDSPEED_ORDERS = {"dualpipev": "dualpipe-v"}

_HEURISTIC = "zero-bubble-heuristic"

_V_ORDERS = {"zb": "zb-v", "half": "v-half", "min": "v-min"}
"""The fork's memory setting of V schedules -> the schedule."""
_PRIMUS_ORDERS = {
    "1f1b": "1f1b", "1f1b-interleaved": "interleaved", "zero-bubble": "zb-h1", _HEURISTIC: "zb-h2",
    "zbv-formatted": "zb-v", "v-half": "v-half", "v-min": "v-min",
}  # fmt: skip
_NOT_KNOWN = {
    "--enable-1f1b-v": "the V-shaped 1F1B of the zero-bubble fork",
    "--num-seq-splits": "slices of sequences",
}
"""Arguments for unsupported schedules of the fork -> their description."""


def order_of(arguments: Arguments, *, pipeline: int, chunks: int, combined: bool) -> str:
    """The name of the schedule that the arguments choose.

    Args:
        arguments: The job's arguments.
        pipeline: Pipeline devices.
        chunks: Stages per device.
        combined: Whether Megatron-LM overlaps expert-parallel communication with computation.

    Raises:
        InputError: For an unsupported schedule.
    """
    plain = "interleaved" if chunks > 1 else "1f1b"
    for name, words in _NOT_KNOWN.items():
        if arguments.get(name) not in (None, "1") and _with_fork(arguments):
            raise InputError(f"{arguments.path}: {name} is {words}, which is not predicted; leave it out.")
    if combined and chunks > 1:
        return COMBINED
    if pipeline > 1 and _MINDSPEED in arguments:
        return _chosen(arguments, _MINDSPEED_ORDERS, _MINDSPEED, plain)
    if pipeline > 1 and arguments.flag(_DEEPSPEED):
        return "zb-h1"
    if pipeline > 1 and _zero_bubble(arguments):
        if has_v(arguments):
            return _chosen(arguments, _V_ORDERS, _V_MEMORY, "zb")
        pending = arguments.word(_PENDING, "auto")
        return "zb-h2" if pending == "auto" or arguments.size(_PENDING) >= 2 * pipeline - 1 else "zb-h1"
    if pipeline > 1 and arguments.flag(_PRIMUS) and arguments.word(_ALGORITHM) is not None:
        order = _chosen(arguments, _PRIMUS_ORDERS, _ALGORITHM, plain)
        return plain if order in ("1f1b", "interleaved") else order
    return plain


def has_v(arguments: Arguments) -> bool:
    """Tell whether every device has two stages in a V, which the fork and MindSpeed imply."""
    return _MINDSPEED in arguments or (arguments.flag(_V) and _with_fork(arguments))


def remarks_on_order(arguments: Arguments) -> Iterator[str]:
    """Sentences on arguments of the schedule that are predicted as other values."""
    if _zero_bubble(arguments) and not has_v(arguments):
        pending, pipeline = arguments.word(_PENDING, "auto"), arguments.size("--pipeline-model-parallel-size", 1)
        if pending not in (str(pipeline), str(2 * pipeline)):
            yield f"{_PENDING} is {pending}, and the prediction counts on {pipeline} (ZB-H1) or {2 * pipeline} (ZB-H2)."
    if arguments.flag(_PRIMUS) and arguments.word(_ALGORITHM) == _HEURISTIC:
        yield f"{_ALGORITHM} is {_HEURISTIC}, and the prediction counts on ZB-H2."
    for name in (_DEEPSPEED, *_TIMERS, *([_PENDING] if has_v(arguments) else [])):
        arguments.get(name)
    for name in _SWITCHES:
        arguments.flag(name)


_SWITCHES = ("--enable-zb-runtime", "--enable-exactly-numeric-match", "--enable-zbh1-exact-semantics")
_TIMERS = (
    "--zero-bubble-pipeline-timers-start-iter", "--zero-bubble-pipeline-timers-end-iter",
    "--zero-bubble-adaptive-memory-limit-percentile",
)  # fmt: skip
"""Arguments of zero-bubble schedules without further effect; with a V, pending backwards have none either."""


def _with_fork(arguments: Arguments) -> bool:
    """Tell whether the fork's arguments have an effect; Primus requires its switch."""
    return _ALGORITHM not in arguments or arguments.flag(_FORK)


def _zero_bubble(arguments: Arguments) -> bool:
    return (arguments.flag(_ZERO_BUBBLE) or arguments.flag(_V)) and _with_fork(arguments)


def _chosen(arguments: Arguments, orders: dict[str, str], name: str, default: str) -> str:
    word = arguments.word(name, default) or default
    if word not in orders:
        raise InputError(
            f"{arguments.path}: {name} is '{word}', which is not known here; there are: {', '.join(orders)}."
        )
    return orders[word]
