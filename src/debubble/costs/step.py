"""Bytes of model states, and the time that a step takes outside its pipeline: gradient reduction and optimizer step.

Bytes per parameter are those of Megatron-LM's mixed precision: bf16 weights (2), fp32 gradients (4), fp32 master
weights (4) and moments (8 for Adam): 18 bytes without ZeRO, 6 + 12/n with a distributed optimizer (ZeRO-1) over n
ranks.  In fp32 there are no master weights: 16 bytes.  Full bf16 training has none either, and its gradients and
moments have 16 bits: 8 bytes.  FSDP with ZeRO-3 shards the weights that the optimizer steps, which are cast as they are
gathered: 16/n bytes.  Post-validation keeps a copy of what a step changes, master weights and moments.

Operations of the program (G, S) are priced there and overlap.  All others follow the pipeline, as in Megatron-LM
without `--overlap-grad-reduce`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from debubble.costs.calibration import corrections
from debubble.costs.devices.cluster import Cluster
from debubble.costs.devices.known_hardware import share
from debubble.costs.devices.parallel_layout import Layout
from debubble.costs.devices.speed import Speed, element_bytes
from debubble.costs.frameworks import Framework, framework_of_options
from debubble.ir import InputError, Kind, Number, RunOptions, Schedule, StageCosts
from debubble.models.architecture import Architecture
from debubble.models.config import ModelConfig
from debubble.models.vision import as_trained

MOMENTS: Mapping[str, int] = {
    "adamw": 8,
    "adam": 8,
    "adamw-8bit": 2,
    "lion": 4,
    "muon": 4,
    "momentum": 4,
    "sgd": 0,
}
"""Bytes per parameter of each optimizer's moments."""

HOST_MEMORY_BANDWIDTH = 25e9
"""Bytes per second of host memory for the CPU optimizer step of one device: an eighth of a two-socket server's."""


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes per parameter on one device."""

    weight: float
    gradient: float
    optimizer: float
    summed: float
    """Bytes of an unsharded gradient, as the ranks reduce it; 0 if the parameter is not trained."""
    shards: float
    """Number of ranks that share the parameter."""
    of_experts: bool = False
    """True for a parameter of an expert."""
    hosted: float = 0.0
    """Host bytes under `--host-optimizer`: the optimizer states, and a gradient of their dtype."""
    quantized: float | None = None
    """Bytes of an unsharded quantized weight, which ZeRO-3 gathers as it is (FSDP-QLoRA); None: not quantized."""

    @property
    def total(self) -> float:
        """Bytes per parameter of weight, gradient and optimizer state together."""
        return self.weight + self.gradient + self.optimizer

    @property
    def frozen(self) -> ParameterBytes:
        """The bytes of a frozen parameter, which has no gradient and no optimizer state."""
        return replace(self, gradient=0, optimizer=0, summed=0, hosted=0)


def parameter_bytes(options: RunOptions, *, shards: float, framework: Framework) -> ParameterBytes:
    """Bytes per parameter in a framework where ZeRO shards over `shards` ranks.

    Raises InputError for an unknown optimizer, dtype or ZeRO level, or a share outside [0, 1].
    """
    if not 0 <= options.host_optimizer <= 1:
        raise InputError(f"--host-optimizer is a share between 0 and 1, not {options.host_optimizer}.")
    if options.zero not in (0, 1, 2, 3):
        raise InputError(f"ZeRO has the levels 0, 1, 2 and 3, not {options.zero}.")
    weight, master = _weight_bytes(options, framework)
    summed = bytes_of_gradient(options, framework.gradient_bytes)
    gradient = stored_gradient_bytes(options, framework)
    states = moment_bytes(options) + master + copied_bytes(options)
    optimizer = states * (1 - options.host_optimizer)
    hosted = (states + stepped_bytes(options)) * options.host_optimizer
    return ParameterBytes(
        weight=weight / shards if options.zero >= 3 else weight,
        gradient=gradient / shards if options.zero >= 2 else gradient,
        optimizer=optimizer / shards if options.zero >= 1 else optimizer,
        summed=summed,
        shards=shards,
        hosted=hosted / shards if options.zero >= 1 else hosted,
    )


def _weight_bytes(options: RunOptions, framework: Framework) -> tuple[int, int]:
    """Bytes of a weight, and of its master weight; the latter is 0 if the optimizer steps the weight itself.

    With a CPU optimizer the device has no master weights.
    """
    weight, stepped = element_bytes(options.dtype), stepped_bytes(options)
    if framework.gathers_masters and options.zero >= 3 and not (options.lora or options.host_optimizer):
        return max(stepped, weight), 0
    if _keeps_remainders(options, framework):
        return weight, stepped - weight
    return weight, stepped if stepped > weight or (framework.copies_masters and weight == 2) else 0


def _keeps_remainders(options: RunOptions, framework: Framework) -> bool:
    return framework.keeps_remainders and options.dtype == "bf16" and not options.host_optimizer


def stepped_bytes(options: RunOptions) -> int:
    """Bytes of a weight that the optimizer steps; raises InputError for a master dtype that is not supported."""
    if options.master_dtype not in MASTER_DTYPES:
        raise InputError(f"There is no master dtype '{options.master_dtype}'; there are: {', '.join(MASTER_DTYPES)}.")
    if options.master_dtype == "bf16" and options.dtype in ("fp16", "fp32", "fp64"):
        raise InputError(
            f"--master-dtype bf16 steps the weights in bf16, and --dtype {options.dtype} computes in"
            f" {options.dtype}: leave one of them out."
        )
    return MASTER_DTYPES[options.master_dtype]


def stored_gradient_bytes(options: RunOptions, framework: Framework) -> int:
    """Bytes of a gradient that the optimizer reads: in the weights' dtype where it steps weights in 16 bits."""
    summed = bytes_of_gradient(options, framework.gradient_bytes)
    return summed if options.master_dtype == "fp32" else min(summed, stepped_bytes(options))


def copied_bytes(options: RunOptions) -> int:
    """Bytes per parameter of post-validation's copies for a rollback: the stepped parameter and its moments."""
    return moment_bytes(options) + stepped_bytes(options) if options.post_validation else 0


def step_traffic(options: RunOptions, *, framework: Framework) -> int:
    """Bytes per parameter that an optimizer step reads and writes in memory, as one fused kernel.

    Every optimizer reads the gradient and reads and writes the fp32 parameter and its moments (`MOMENTS`); in mixed
    precision the parameter is the master copy, and the 16-bit weight is written next to it.  Read + written:

    ==========  ===========================  =====================  =================================================
    optimizer   bf16, fp32 gradients         fp32                   moments, and the source of the update rule
    ==========  ===========================  =====================  =================================================
    sgd         4+4 + 4+2 = 14               4+4 + 4 = 12           none
    momentum    4+4+4 + 4+4+2 = 22           4+4+4 + 4+4 = 20       one in fp32 (torch.optim.SGD)
    lion        22                           20                     one in fp32 (Chen et al., arXiv:2302.06675)
    adam(w)     4+4+8 + 4+8+2 = 30           4+4+8 + 4+8 = 28       two in fp32 (Loshchilov and Hutter, ICLR 2019)
    adamw-8bit  4+4+2 + 4+2+2 = 18           4+4+2 + 4+2 = 16       two in 8 bits (Dettmers et al., ICLR 2022)
    muon        22 + 34 = 56                 20 + 34 = 54           one in fp32, and the orthogonalization
    ==========  ===========================  =====================  =================================================

    Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon) orthogonalizes the momentum in bf16: it writes the
    matrix (2), in each of five Newton-Schulz steps reads it twice and writes it once (5 x 6), and reads the result (2);
    the products of the smaller sides are neglected.  Full bf16 training moves 2 bytes in place of 4, and has no master
    copy.  Post-validation reads and writes a copy of master weight and moments, too.

    Args:
        options: Optimizer, dtypes and post-validation of the run.
        framework: Sets the bytes of gradients in mixed precision; in fp32 they have 4.
    """
    stepped, weight = stepped_bytes(options), element_bytes(options.dtype)
    changed = stepped + moment_bytes(options)
    gradient = stored_gradient_bytes(options, framework)
    copied = weight if weight < stepped or (framework.copies_masters and weight == 2) else 0
    if _keeps_remainders(options, framework):
        copied = 0  # the bf16 weight is the upper half of the stepped one
    orthogonalized = 2 + 6 * NEWTON_SCHULZ_STEPS + 2 if options.optimizer == "muon" else 0
    return gradient + 2 * changed + copied + orthogonalized + 2 * copied_bytes(options)


NEWTON_SCHULZ_STEPS = 5
"""Muon's Newton-Schulz iterations (its authors' default)."""


def step_operations(options: RunOptions, *, side: int) -> int:
    """Floating-point operations per parameter of an optimizer step that its memory traffic does not hide.

    Only Muon has them.  A Newton-Schulz step on an n x m matrix, m <= n, takes X X^T, its square, and their sum times
    X: 4 n m^2 + 2 m^3 operations, at most 6 m per parameter (Jordan et al., 2024).

    Args:
        options: The run's optimizer.
        side: The smaller side m of the matrices.
    """
    return 6 * side * NEWTON_SCHULZ_STEPS if options.optimizer == "muon" else 0


STATE_DTYPES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Dtype of gradients and moments -> bytes."""
MASTER_DTYPES: Mapping[str, int] = {"fp32": 4, "bf16": 2}
"""Dtype of the weights that the optimizer steps -> bytes."""


def moment_bytes(options: RunOptions) -> int:
    """Bytes of a parameter's moments; raises InputError for an unknown optimizer or dtype."""
    if options.optimizer not in MOMENTS:
        raise InputError(f"There is no optimizer '{options.optimizer}'; there are: {', '.join(MOMENTS)}.")
    element = min(_state_bytes("moment", options.moment_dtype), stepped_bytes(options))
    moments = MOMENTS[options.optimizer]
    return moments if options.optimizer == "adamw-8bit" else moments * element // 4


def bytes_of_gradient(options: RunOptions, framework: int) -> int:
    """Bytes of a gradient: in mixed precision the `framework`'s, or two where the run keeps gradients in 16 bits."""
    element = _state_bytes("gradient", options.gradient_dtype)
    if element_bytes(options.dtype) != 2:
        return 4
    return element if element < 4 else framework


def _state_bytes(state: str, dtype: str) -> int:
    if dtype not in STATE_DTYPES:
        raise InputError(f"There is no {state} dtype '{dtype}'; there are: {', '.join(STATE_DTYPES)}.")
    return STATE_DTYPES[dtype]


@dataclass(frozen=True, kw_only=True)
class StepTail:
    """Seconds from a step's last backward to its end, on a device with an even share of the parameters.

    Gradient reductions (G) and optimizer steps (S) of the schedule itself, on device or host, are not included.
    """

    model: ModelConfig
    cluster: Cluster
    options: RunOptions
    pipeline: int | None = None
    framework: Framework | None = None
    """None: that of the options, or Megatron-LM."""

    @property
    def _framework(self) -> Framework:
        return self.framework or framework_of_options(self.options.framework)

    def of_schedule(self, schedule: Schedule, costs: StageCosts) -> float:
        """Seconds after the pipeline of a schedule with these stage costs."""
        return self.after(
            unsummed=_remaining_share(schedule, Kind.G, costs.gradient_reduce),
            unstepped=_remaining_share(schedule, Kind.S, costs.optimizer_step),
            hidden_by=_Computing.from_schedule(schedule, costs),
        )

    @property
    def min_seconds(self) -> float:
        """Lower bound on the tail of any schedule: all gradients are reduced and all stages stepped inside it."""
        return self.after(unsummed=0.0, unstepped=0.0)

    @property
    def optimizer(self) -> float:
        """Seconds: a schedule that leaves a share x of the optimizer steps has a tail of min_seconds + x times this.

        It is a lower bound: 0 under `--host-optimizer`, as the CPU step after every pipeline may hide them.
        """
        return 0.0 if self.options.host_optimizer else self.after(unsummed=0.0) - self.min_seconds

    def after(
        self, *, unsummed: float = 1.0, unstepped: float = 1.0, hidden_by: _Computing | None = None
    ) -> float:  # fmt: skip
        """Seconds after a pipeline that leaves these shares of gradient reduction and optimizer step.

        Args:
            unsummed: Share of a device's gradients that remain to be reduced over replicas.
            unstepped: Share of a device's optimizer step that remains.
            hidden_by: Computing with which a framework with `gradient_overlap` overlaps collectives; None: hides all.
        """
        options, framework = self.options, self._framework
        layout = Layout.from_options(self.cluster, options, self.pipeline)
        speed = Speed.from_hardware(self.cluster.slowest, options.dtype, framework)
        factor = corrections(self.model, self.cluster, options)[0].factor
        trained, in_matrices, in_experts = _trained_counts(as_trained(self.model, options), options.lora)
        between = options.expert * options.expert_shards
        dense = (trained - in_experts) / layout.pipeline / options.tensor
        experts = in_experts / layout.pipeline / between
        ranks = options.data * options.context
        replicas = options.tensor * ranks // between
        scattered = scattered_bytes(options, gradient=bytes_of_gradient(options, framework.gradient_bytes))
        if options.zero >= 2:
            # Gradients were scattered after every backward.
            unsummed = 0.0
        # ZeRO-3 gathers inside the pipeline.  So does FSDP that keeps weights gathered after their first forward, but
        # not DeepSpeed, which gathers them in buckets after the step.
        in_forward = options.zero == 2 and framework.gathers_units and not framework.bucket_bytes
        gathered = speed.element if options.zero in (1, 2) and not in_forward else 0
        rings = (
            (dense, ranks, ranks_in_node(speed, options)),
            (experts, replicas, expert_replicas_in_node(speed, options)),
        )

        def ring(size: float) -> float:
            return factor * sum(
                speed.gather(parameters * size, count, alongside=min(count, in_node))
                for parameters, count, in_node in rings
            )

        if not framework.gradient_overlap:
            reduce = ring(scattered * unsummed + gathered)
        elif hidden_by is None:
            reduce = 0.0 if framework.gather_overlap else ring(gathered)
        else:
            hides_gather = hidden_by.forward if framework.gather_overlap else 0.0
            reduce = max(0.0, ring(scattered * unsummed) - hidden_by.backward) + max(0.0, ring(gathered) - hides_gather)
        local = dense / ranks + experts / replicas if options.zero else dense + experts
        on_host = self._host_seconds(local * options.host_optimizer, sharing=layout.ranks_per_host_link)
        stepped = local * (1 - options.host_optimizer) * unstepped
        matrices = stepped * in_matrices / trained
        launch = speed.hardware.efficiency.launch if stepped else 0.0
        on_device = launch + step_seconds(self.model, speed, options, framework, stepped, matrices=matrices)
        return reduce + factor * max(on_device, on_host)

    def _host_seconds(self, parameters: float, *, sharing: float) -> float:
        """Seconds of the CPU optimizer step of these parameters, which overlaps with moving gradients and parameters.

        `sharing` ranks use one host link.
        """
        hardware = self.cluster.slowest
        if not parameters:
            return 0.0
        bandwidth = hardware.host_bandwidth * hardware.efficiency.host / sharing
        directions = 2 if hardware.host_link == "half-duplex" else 1
        moved = stepped_bytes(self.options) * parameters * directions / bandwidth
        traffic = step_traffic(self.options, framework=self._framework)
        return max(moved, traffic * parameters / HOST_MEMORY_BANDWIDTH)


@dataclass(frozen=True)
class _Computing:
    """Seconds of computing of one micro-batch, of the device with the fewest."""

    forward: float
    backward: float

    @staticmethod
    def from_schedule(schedule: Schedule, costs: StageCosts) -> _Computing:
        devices = [stages for stages in schedule.placement.stages_of if stages]
        forwards = [float(sum(costs.forward[s] for s in stages)) for stages in devices]
        backwards = [
            float(sum(costs.backward_input[s] + costs.backward_weight[s] for s in stages)) for stages in devices
        ]
        return _Computing(min(forwards, default=0.0), min(backwards, default=0.0))


@lru_cache
def _trained_counts(model: Architecture, lora: int) -> tuple[int, int, int]:
    """Trained parameters: all, those in matrices, and those in experts (none with LoRA)."""
    experts = 0 if lora else sum(model.expert_parameters(layer) for layer in range(model.layers))
    return model.trained_parameters(lora), model.matrix_parameters(lora), experts


def step_seconds(
    model: Architecture, speed: Speed, options: RunOptions, framework: Framework, parameters: float, *, matrices: float
) -> float:
    """Seconds of the optimizer step of these parameters, of which those in `matrices` are orthogonalized by Muon.

    The smaller side of the matrices is taken to be the hidden size (or the rank of LoRA), its upper limit.  Embedding
    and head, which Adam steps next to Muon, count with Muon's traffic.
    """
    side = options.lora or model.hidden
    traffic = step_traffic(options, framework=framework) / speed.traffic
    pace = speed.hardware.flops * share(speed.hardware.efficiency.matmul, side)
    return parameters * traffic + matrices * step_operations(options, side=side) / pace


def scattered_bytes(options: RunOptions, *, gradient: float) -> float:
    """Bytes per parameter that a ring carries to reduce gradients of `gradient` bytes.

    ZeRO reduce-scatters them; an all-reduce gathers them as well.
    """
    return gradient if options.zero else 2 * gradient


def ranks_in_node(speed: Speed, options: RunOptions) -> int:
    """Number of data- and context-parallel ranks in a node; tensor-parallel ranks lie between them."""
    return max(1, min(options.data * options.context, speed.hardware.devices_per_node // options.tensor))


def expert_replicas_in_node(speed: Speed, options: RunOptions) -> int:
    """Number of ranks in a node with the same experts; all expert-parallel ranks lie between them."""
    return max(1, speed.hardware.devices_per_node // (options.expert * options.expert_shards))


def _remaining_share(schedule: Schedule, kind: Kind, seconds: Sequence[Number]) -> float:
    """The largest share, over devices, of the seconds of this kind for which the schedule has no operation."""
    done = {op.stage for op in schedule.operations if op.kind is kind}
    if not done:
        return 1.0
    return max(_share_outside(stages, done, seconds) for stages in schedule.placement.stages_of)


def _share_outside(stages: Collection[int], done: Collection[int], seconds: Sequence[Number]) -> float:
    """The share of the stages' seconds outside `done`; stages count equally where none of them takes time."""
    weights = {stage: float(seconds[stage]) for stage in stages}
    if not any(weights.values()):
        weights = dict.fromkeys(stages, 1.0)
    return sum(weights[stage] for stage in stages if stage not in done) / sum(weights.values()) if stages else 0.0
