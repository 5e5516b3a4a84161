"""Types of the JSON objects that `--json` prints, with descriptions of their keys.

Added keys leave the schema version unchanged; removed keys and keys that change meaning increase it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from debubble.cli.registry_answers import (
    Answer,
    FrameworksAnswer,
    HardwareAnswer,
    ModelsAnswer,
    PlannersAnswer,
    SchedulesAnswer,
)
from debubble.costs.accuracy import Accuracy
from debubble.costs.calibration import MeasuredRun
from debubble.costs.files import UnitsFile
from debubble.imports.advice import SettingAdvice
from debubble.imports.comparison import SettingChange
from debubble.imports.figures import Figures
from debubble.ir import CandidateSummary, PlannedUnit
from debubble.ir.degrees import ConfigurationSummary, Degrees, DegreeValue, FasterPlan, MemoryParts, UsualChoice
from debubble.ir.plan_entries import Robustness
from debubble.planners.analysis.explanation import CauseSeconds
from debubble.planners.analysis.nearest_plans import NearestPlan
from debubble.training.monitoring.watched_run import WatchedRun
from debubble.views.comparison import Comparison
from debubble.views.summary import Bytes, DeviceFigures, Fullest, KindFigures, PeakTimes, Seconds, StageFigures


class PlannedChange(Struct, forbid_unknown_fields=True, kw_only=True):
    """A change of a plan that was planned."""

    change: str
    fits: bool
    step_time: Annotated[float | None, Meta(description="Seconds of a step; null: nothing fits.")]
    seconds_per_sequence: Annotated[float | None, Meta(description="The step's seconds over its sequences.")]


class SearchFigures(Struct, forbid_unknown_fields=True, kw_only=True):
    """Numbers of choices of degrees."""

    legal: Annotated[int, Meta(description="That divide model, batch and devices.")]
    too_large: Annotated[int, Meta(description="That do not fit, by quick plans or in any way.")]
    slower: Annotated[int, Meta(description="That cannot be among the best.")]
    planned: int
    unplanned: Annotated[int, Meta(description="That were left when the effort was spent.")]
    interrupted: bool
    cut_off: Annotated[bool, Meta(description="The deadline ended the search before its last step.")]


class StepFigures(Struct, forbid_unknown_fields=True, kw_only=True):
    """Time and memory of a step."""

    step_time: Annotated[Seconds, Meta(description="The whole step.")]
    makespan: Annotated[Seconds, Meta(description="The pipeline's, over all lanes.")]
    span: Annotated[Seconds, Meta(description="The longest of a pipeline device's computing.")]
    peak_memory: Annotated[list[Bytes], Meta(description="Per pipeline device.")]
    peak_times: PeakTimes
    fullest: Fullest
    devices: Annotated[int, Meta(description="Devices of the pipeline.")]


class ModelFigures(StepFigures, forbid_unknown_fields=True, kw_only=True):
    """A step's figures, and those that only a model's plan has."""

    degrees: Degrees | UnsetType = UNSET
    tokens_per_second: Annotated[float | UnsetType, Meta(description="Of all devices together.")] = UNSET
    tokens_per_second_per_device: float | UnsetType = UNSET
    mfu: Annotated[
        float | UnsetType | None,
        Meta(description="Model FLOPs utilization, a fraction; null: the devices' peak is not known."),
    ] = UNSET
    memory: Annotated[
        list[MemoryParts] | UnsetType, Meta(description="Bytes per pipeline device at its peak, by part.")
    ] = UNSET
    fragmentation: Annotated[
        float | UnsetType,
        Meta(description="Bytes that an arena for the tensors of the fullest device needs beyond their peak."),
    ] = UNSET
    reserve: Annotated[float | UnsetType, Meta(description="Bytes of a device that no plan may use.")] = UNSET
    host_memory: Annotated[
        list[Bytes] | UnsetType,
        Meta(description="The most on the host at a time, per pipeline device: offloaded activations and states."),
    ] = UNSET
    why: Annotated[list[CauseSeconds] | UnsetType, Meta(description="Where the step's seconds go, largest first.")] = (
        UNSET
    )
    binds: Annotated[str | UnsetType, Meta(description="What binds, as a sentence.")] = UNSET


class PlanFigures(ModelFigures, forbid_unknown_fields=True, kw_only=True):
    """A plan, how good it is, and what would help."""

    planner: str
    schedule: str
    chunks: Annotated[int, Meta(description="Stages per pipeline device.")]
    micro_batches: int
    lower_bound: Annotated[Seconds, Meta(description="No step takes less, by `bound_argument`.")]
    bound_argument: Annotated[str | None, Meta(description="What the bound counts.")]
    gap: Annotated[float, Meta(description="How far the step is above its bound, as a share of the step.")]
    partition: Annotated[list[list[PlannedUnit]], Meta(description="Per stage, its units with their strategies.")]
    recompute: Annotated[list[str], Meta(description="Per stage, a summary of its units' strategies.")]
    solve_seconds: Annotated[float, Meta(description="How long the planner took.")]
    cut_off: Annotated[list[str], Meta(description="Planners that the deadline stopped, or a Ctrl-C.")]
    interrupted: Annotated[bool, Meta(description="A Ctrl-C ended the search: this is the best until then.")]
    target: Annotated[str | None, Meta(description="The framework that the plan was searched for.")]
    runs_in: Annotated[
        list[str], Meta(description="Frameworks that run the plan as it is; adapters are configured there by hand.")
    ]
    robustness: Annotated[Robustness | UnsetType, Meta(description="With --robust: the step under disturbances.")] = (
        UNSET
    )
    candidates: Annotated[list[CandidateSummary], Meta(description="Every planner's answer, or why it has none.")]
    remarks: Annotated[list[str], Meta(description="Sentences to know.")]
    accuracy: Annotated[
        dict[str, Accuracy] | UnsetType,
        Meta(
            description="With computed costs: errors of `step` and `memory` on published runs like this that nothing"
            " was fitted to, and the interval, `low` to `high` in seconds or bytes of the fullest device, that holds"
            " nine in ten measured values."
        ),
    ] = UNSET
    days: Annotated[float | UnsetType, Meta(description="That training on --tokens takes.")] = UNSET
    levers: Annotated[list[PlannedChange] | UnsetType, Meta(description="With --why: without a lever of the plan.")] = (
        UNSET
    )
    advice: Annotated[
        list[PlannedChange] | UnsetType,
        Meta(
            description="What might help, by quick plans without --why; the first is the plan's own problem, planned"
            " again in the same way."
        ),
    ] = UNSET
    quick_advice: Annotated[
        list[PlannedChange] | UnsetType, Meta(description="Without --why: the same as `advice`, by quick plans.")
    ] = UNSET
    configurations: Annotated[
        list[ConfigurationSummary] | UnsetType,
        Meta(description="The best choices of degrees, the plan's first; alone where the degrees were given."),
    ] = UNSET
    fastest: Annotated[
        FasterPlan | UnsetType,
        Meta(description="With --global-batch: the fastest plan and its levers, where the plan is a simpler one."),
    ] = UNSET
    usual: Annotated[
        list[UsualChoice] | UnsetType,
        Meta(description="With --global-batch: plain FSDP and ZeRO-1, with quick plans or why they do not fit."),
    ] = UNSET
    other_values: Annotated[
        list[DegreeValue] | UnsetType,
        Meta(
            description="With --global-batch: other values of the degrees, and what they cost at best; `lower_bound` is"
            " that of quick plans, which a longer search may beat."
        ),
    ] = UNSET
    search: SearchFigures | UnsetType = UNSET
    pareto: Annotated[
        list[ConfigurationSummary] | UnsetType,
        Meta(description="With --pareto: the front of time and memory, the plan first."),
    ] = UNSET
    targets: Annotated[
        list[NearestPlan] | UnsetType, Meta(description="With --targets: the plan of every framework.")
    ] = UNSET


class PlanAnswer(PlanFigures, forbid_unknown_fields=True, kw_only=True):
    """`debubble plan --json`."""

    schema: Literal[2]


class FootprintAnswer(Struct, forbid_unknown_fields=True, kw_only=True):
    """Memory of the fullest device for one choice of degrees."""

    degrees: Degrees
    fits: Literal["yes", "likely", "with recomputation", "no"]
    memory: Annotated[MemoryParts, Meta(description="Bytes by part, if nothing is recomputed.")]
    memory_recomputed: Annotated[MemoryParts, Meta(description="Bytes by part, if everything is.")]
    memory_limit: Annotated[float, Meta(description="Bytes that a plan may use.")]


class FitsAnswer(Answer, forbid_unknown_fields=True, kw_only=True):
    """`debubble fits --json`."""

    reserve: Annotated[float, Meta(description="Bytes of a device that no plan may use.")]
    footprints: list[FootprintAnswer]
    remarks: Annotated[list[str], Meta(description="Sentences to know.")]


class SimulateAnswer(StepFigures, forbid_unknown_fields=True, kw_only=True):
    """`debubble simulate --json`."""

    schema: Literal[2]
    schedule: str
    ideal_fraction: Annotated[float, Meta(description="The busiest device's computing over the makespan.")]
    bubble_fraction: Annotated[float, Meta(description="Idle time of compute lanes over all of their time.")]
    forward_bubbles: Annotated[list[Seconds], Meta(description="Idle from first F to first backward, per device.")]
    backward_bubbles: Annotated[list[Seconds], Meta(description="Idle from first to last backward, per device.")]
    bubbles: Annotated[list[dict[str, float]], Meta(description="Idle seconds by cause, per device.")]
    stages: int
    micro_batches: int
    operations: int
    remarks: list[str]
    schedules: Annotated[
        list[dict[str, Any]] | UnsetType, Meta(description="Of several schedules, the same figures of each that fits.")
    ] = UNSET
    do_not_fit: Annotated[
        dict[str, str] | UnsetType, Meta(description="Of several schedules, why others do not fit.")
    ] = UNSET


class SceneFigures(ModelFigures, forbid_unknown_fields=True, kw_only=True):
    """A predicted or measured timeline."""

    ideal_fraction: Annotated[float, Meta(description="The busiest device's computing over the makespan.")]
    bubble_fraction: Annotated[float, Meta(description="Idle time of compute lanes over all of their time.")]
    operations: int
    per_device: list[DeviceFigures]
    per_stage: list[StageFigures]
    per_kind: Annotated[dict[str, KindFigures], Meta(description="By the letters of the kinds, such as F.")]
    critical_path: Annotated[str, Meta(description="What is on the critical path, as a sentence.")]
    remarks: Annotated[list[str], Meta(description="Sentences to know.")]
    plan: Annotated[
        PlanFigures | UnsetType, Meta(description="Of a prediction: the plan, its bound and what would help.")
    ] = UNSET


class ShowAnswer(SceneFigures, forbid_unknown_fields=True, kw_only=True):
    """`debubble show --json`: the plan's figures."""

    schema: Literal[2]
    measured: Annotated[SceneFigures | None, Meta(description="With --trace: the typical measured step.")]
    other: Annotated[SceneFigures | UnsetType, Meta(description="Of two plans: the second's figures.")] = UNSET


class ServeAnswer(Answer, forbid_unknown_fields=True, kw_only=True):
    """`debubble serve --json`."""

    address: Annotated[str, Meta(description="To open in a browser; it has the token.")]


class CompareAnswer(Comparison, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`debubble compare --json`, and `debubble rehearse --json`."""

    schema: Literal[2]


class AllocatorBytes(Struct, forbid_unknown_fields=True, kw_only=True):
    """The most bytes that torch's allocator gave out and took from a device."""

    allocated: Bytes
    reserved: Bytes


class TrainAnswer(Answer, forbid_unknown_fields=True, kw_only=True):
    """`debubble train --json`."""

    steps: Annotated[int, Meta(description="Number of the last step.")]
    losses: Annotated[list[float], Meta(description="Of every step of this run.")]
    validation_losses: Annotated[list[tuple[int, float]], Meta(description="Steps with their validation losses.")]
    samples: Annotated[list[tuple[int, str]], Meta(description="Steps with what the model wrote.")]
    rolled_back: Annotated[list[int], Meta(description="Steps that were taken back.")]
    tokens_per_second: Annotated[float, Meta(description="Of the median step, over all replicas.")]
    mfu: Annotated[float | None, Meta(description="Model FLOPs utilization, a fraction; null: not known.")]
    bubble_fraction: Annotated[float | None, Meta(description="Of the last step; null: not known.")]
    slowdown: Annotated[
        float | None, Meta(description="The last steps' time over the first ones'; null: too few steps.")
    ]
    peak_memory: Annotated[list[Bytes], Meta(description="Per device.")]
    allocator: Annotated[
        list[AllocatorBytes] | None, Meta(description="What torch's allocator had at most, per device; null: on CPUs.")
    ]
    checkpoint: Annotated[str | None, Meta(description="The newest checkpoint's folder.")]
    switches: Annotated[list[dict[str, Any]], Meta(description="With --online: other orders that were tried.")]
    comparison: Comparison


class WatchAnswer(WatchedRun, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`debubble watch --json`: a run at its newest step; null: not known (yet)."""

    schema: Literal[2]


class ExportAnswer(Answer, forbid_unknown_fields=True, kw_only=True):
    """`debubble export --json`."""

    target: str
    files: list[str]
    losses: Annotated[list[str], Meta(description="What the target cannot express.")]
    own_kernels: Annotated[
        str | None, Meta(description="What the target's own kernels make of the step; null: the same, or priced.")
    ]


class ImportAnswer(Answer, forbid_unknown_fields=True, kw_only=True):
    """`debubble import --json`: a job as it is, and what to change in it."""

    target: Annotated[str, Meta(description="The framework.")]
    degrees: Annotated[Degrees, Meta(description="The job's.")]
    yours: Annotated[Figures, Meta(description="Seconds of the job's step, bytes of its fullest device.")]
    planned: Annotated[Figures | None, Meta(description="The fastest plan's; null: none was looked for, or none fits.")]
    changes: Annotated[list[SettingChange], Meta(description="Settings that make the one the other.")]
    reason: Annotated[str | None, Meta(description="Why there is no plan.")]
    refused: Annotated[bool, Meta(description="Whether such a job cannot be planned for its framework.")]
    corrections: Annotated[str | None, Meta(description="How measured runs correct both, if not alike.")]
    notes: Annotated[list[str], Meta(description="Sentences on what the changes bring about.")]
    advice: Annotated[
        list[SettingAdvice],
        Meta(description="Settings that the job leaves off and that would help it as it is, each predicted."),
    ]
    planned_degrees: Annotated[str | None, Meta(description="The plan's degrees, if they are not the job's.")]
    summary: Annotated[str, Meta(description="Dtypes, sequence parallelism and ZeRO, and whose defaults they are.")]
    warnings: Annotated[list[str], Meta(description="What is given and is not what the configuration runs.")]
    not_predicted: Annotated[int, Meta(description="Entries of the file that are not in the prediction, or otherwise.")]
    unread: Annotated[list[str], Meta(description="What was not read, or is not in the prediction.")]


class ProfileAnswer(UnitsFile, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """`debubble profile --json`: the units file that it writes."""

    schema: Literal[2]
    measured: Annotated[
        float | UnsetType | None,
        Meta(description="With --from-trace: the measured seconds of a step; null: that was not measured."),
    ] = UNSET
    factors: Annotated[
        list[tuple[float, float]] | UnsetType,
        Meta(description="With --from-trace: per stage, by how much forward and backward take longer than computed."),
    ] = UNSET
    predicted: Annotated[
        float | UnsetType, Meta(description="With --from-trace: seconds of a step with the units that were fitted.")
    ] = UNSET


class CalibratedAnswer(Struct, forbid_unknown_fields=True, kw_only=True):
    """A figure of the measured run: seconds, or bytes of the fullest device."""

    predicted: Annotated[float, Meta(description="Without corrections.")]
    measured: float
    ratio: Annotated[float, Meta(description="Measured over predicted.")]
    corrected: Annotated[float, Meta(description="What is predicted with the cluster file.")]
    before: Annotated[Accuracy, Meta(description="The interval without corrections.")]
    after: Annotated[Accuracy, Meta(description="The interval of other runs of the job with the cluster file.")]


class CalibrateAnswer(Answer, forbid_unknown_fields=True, kw_only=True):
    """`debubble calibrate --json`."""

    output: Annotated[str, Meta(description="The cluster file.")]
    run: Annotated[MeasuredRun, Meta(description="The run, as the file has it.")]
    replaced: Annotated[bool, Meta(description="Whether the cluster file had the run before.")]
    figures: Annotated[dict[str, CalibratedAnswer], Meta(description="By `step` and `memory`, as far as measured.")]


class ClaimAnswer(Struct, forbid_unknown_fields=True, kw_only=True):
    """A statement of a paper."""

    statement: str
    paper: Annotated[str, Meta(description="The paper's figures, as it prints them.")]
    ours: Annotated[str, Meta(description="Our figures; empty: there are none.")]
    verdict: Annotated[str, Meta(description="How the cells of the two compare, and why those differ that do.")]
    kind: Annotated[str, Meta(description="printed, derived, read off a figure, qualitative or ours.")]


class TableAnswer(Struct, forbid_unknown_fields=True, kw_only=True):
    """Figures of ours, some of them next to the paper's."""

    title: str
    columns: list[str]
    rows: list[list[str | int | float | None]]
    basis: Annotated[str, Meta(description="exact, fitted, modelled or measured.")]
    note: str
    keys: Annotated[int, Meta(description="Columns that say what a row is about.")]


class EntryAnswer(Struct, forbid_unknown_fields=True, kw_only=True):
    """A figure or table of a paper."""

    place: str
    what: str
    claims: list[ClaimAnswer]
    tables: list[TableAnswer]


class ReportAnswer(Struct, forbid_unknown_fields=True, kw_only=True):
    """A paper."""

    name: str
    title: str
    entries: list[EntryAnswer]


class SweepPointAnswer(Struct, forbid_unknown_fields=True, kw_only=True):
    """The plan for one value."""

    value: str
    fits: bool
    reason: Annotated[str, Meta(description="Why nothing fits; empty if a plan does.")]
    found_with: Annotated[
        str | None, Meta(description="The smaller memory limit whose plan this is, where it is the faster one.")
    ]
    step_time: Annotated[float | None, Meta(description="Seconds of a step; null: nothing fits.")]
    step_low: Annotated[float | None, Meta(description="The least seconds that are likely; null: not known.")]
    step_high: Annotated[float | None, Meta(description="The most seconds that are likely; null: not known.")]
    tokens_per_second: float | None
    degrees: str | None
    planner: str | None
    schedule: str | None
    peak_memory: Annotated[list[float], Meta(description="Bytes per device.")]
    host_memory: Annotated[list[float], Meta(description="Bytes of the host per pipeline device.")]
    levers: Annotated[list[str], Meta(description="What the plan uses beyond data parallelism, such as offload.")]
    runs_in: Annotated[list[str], Meta(description="Frameworks that run the plan as it is.")]


class SweepAnswer(Answer, forbid_unknown_fields=True, kw_only=True):
    """`debubble sweep --json`."""

    over: Annotated[str, Meta(description="The option that has several values.")]
    points: list[SweepPointAnswer]
    interrupted: Annotated[bool, Meta(description="A Ctrl-C ended it before the other values.")]


class ReproduceAnswer(Answer, forbid_unknown_fields=True, kw_only=True):
    """`debubble reproduce --json`."""

    reports: list[ReportAnswer]


ANSWERS: dict[str, type[Struct]] = {
    "plan": PlanAnswer,
    "fits": FitsAnswer,
    "sweep": SweepAnswer,
    "simulate": SimulateAnswer,
    "show": ShowAnswer,
    "serve": ServeAnswer,
    "compare": CompareAnswer,
    "rehearse": CompareAnswer,
    "train": TrainAnswer,
    "watch": WatchAnswer,
    "export": ExportAnswer,
    "hardware": HardwareAnswer,
    "frameworks": FrameworksAnswer,
    "models": ModelsAnswer,
    "planners": PlannersAnswer,
    "schedules": SchedulesAnswer,
    "import": ImportAnswer,
    "profile": ProfileAnswer,
    "calibrate": CalibrateAnswer,
    "reproduce": ReproduceAnswer,
}
"""Type of the `--json` output, by command."""
