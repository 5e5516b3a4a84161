"""Option groups of `debubble plan`: constraints and planner, costs instead of a model, and output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from debubble.cli import options as o
from debubble.cli.names import PLANNER_LOADER, framework_names, planner_names
from debubble.cli.options import flag, option
from debubble.cli.output import Json
from debubble.files import check_writable
from debubble.formatting import read_count
from debubble.ir import InputError

if TYPE_CHECKING:
    from debubble.planners.problem import Swap


@dataclass(frozen=True, kw_only=True)
class PlanOptions(o.OptionGroup):
    """Constraints of the plan, and the planner."""

    section: ClassVar[str] = o.PLANNING

    global_batch: int | None = option(
        "Sequences per step: searches the degrees, ZeRO and micro-batches that are not given."
    )
    micro_batches: int | None = option("Micro-batches per pipeline and step (default: 32).")
    memory_limit: o.MemoryLimit = None
    chunks: o.Chunks = None
    target: str | None = option(
        "Search only what this framework can run: megatron, torchtitan, deepspeed, ... (docs/exports.md).",
        "--for",
        names=framework_names,
        noun="framework",
    )
    planner: str = option(
        "auto asks joint, portfolio, adapipe and plug-ins; the others (see `planners`), or a function of your own, as"
        " mine.py:plan, answer alone.",
        names=planner_names,
        default="auto",
        noun="planner",
        loader=PLANNER_LOADER,
    )
    swap: str = option(
        "Where activations may go (peer: --planner obscura or bpipe).",
        names=lambda: ("host", "peer", "none"),
        default="host",
        noun="swap",
        metavar="host/peer/none",
    )
    lengths: Path | None = option(
        "Lengths of the data set's sequences, in tokens: micro-batches differ, and are balanced and ordered."
    )
    compare: bool = flag(
        "Ask every planner, that of --planner, the papers' and the baselines too, and show their answers."
    )
    fastest: bool = flag("The fastest plan, even if a simpler one takes little longer (with --global-batch 2%).")
    robust: bool = flag("Choose by the mean step under noise, a slow device and slow links, and say how plans degrade.")

    @property
    def destination(self) -> Swap:
        """Where activations may go; the option accepts only these values."""
        return cast("Swap", self.swap)

    @property
    def plain(self) -> bool:
        """True if micro-batches are equal and activations are not offloaded to peers, which quick plans require."""
        return self.swap != "peer" and self.lengths is None


@dataclass(frozen=True, kw_only=True)
class CostInputs(o.OptionGroup):
    """Files with costs, which replace computed ones."""

    section: ClassVar[str] = o.COSTS

    costs: o.Costs = None
    units: o.UnitsFile = None
    devices: o.Devices = None
    profile: Path | None = option("Measured units (see `profile`) instead of computed ones.")


@dataclass(frozen=True, kw_only=True)
class Output(o.OptionGroup):
    """Files and figures to output."""

    section: ClassVar[str] = o.OUTPUT

    output: Path | None = option("Write the plan file here.", "--output", "-o")
    html: Path | None = option("Write the report here: one page with everything.")
    details: bool = flag("Show stages, devices and the planners' answers too.")
    why: bool = flag("Plan again without each lever, and with what might help.")
    pareto: bool = flag("Plan with less and less memory too: the front of time and memory.")
    targets: bool = flag("Plan for every framework too: what the nearest plan costs in each.")
    tokens: str | None = option("Tokens to train on, such as 300B or 1.5T: says how many days that takes.")
    json: Json = False
    json_stream: bool = flag("Print every better plan as it is found, and then the answer: a JSON object a line.")

    @property
    def token_count(self) -> float | None:
        """The number of --tokens; None without it."""
        return None if self.tokens is None else read_count(self.tokens, "--tokens")


def check_call(model: str | None, *, run: o.ModelRun, options: PlanOptions, inputs: CostInputs, output: Output) -> None:
    """Check that options can be combined, so that none is ignored.

    Raises:
        InputError: For the first option that cannot be combined with the others.
    """
    if sum(source is not None for source in (model, inputs.costs, inputs.units)) != 1:
        raise InputError("Give a MODEL with --cluster, or --costs FILE, or --units FILE with --devices P.")
    if output.tokens is not None:
        read_count(output.tokens, "--tokens")  # checked before the search
    if output.json and output.json_stream:
        raise InputError("Give --json for one object, or --json-stream for a line per plan, not both.")
    check_writable(output.output, output.html)
    if model is None:
        _refuse_options_of_models(options, inputs, output)
        run.refuse_options()
    elif inputs.devices is not None:
        raise InputError("--devices is for --costs and --units; give a MODEL's devices with --cluster and --pipeline.")
    plain = model is not None and inputs.profile is None and options.plain
    for name, wanted, changes in (("--pareto", output.pareto, ""), ("--why", output.why, " changes of")):
        if wanted and not plain:
            raise InputError(
                f"{name} plans{changes} a MODEL on a --cluster, without --profile, --swap peer and --lengths;"
                " leave it out here."
            )


def _refuse_options_of_models(options: PlanOptions, inputs: CostInputs, output: Output) -> None:
    for name, value in {
        "global_batch": options.global_batch, "profile": inputs.profile, "tokens": output.tokens, "for": options.target,
        "targets": output.targets, "fastest": options.fastest, "pareto": output.pareto, "lengths": options.lengths,
    }.items():  # fmt: skip
        if value is not None and value is not False:
            o.refuse_without_model(name)
