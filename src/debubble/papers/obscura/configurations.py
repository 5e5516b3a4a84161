"""Swapping-aware recomputation: the joint choice of migration, activation swapping and recomputation.

Source: Huang et al., Obscura, USENIX ATC 2025, section 6.2, equation (4).

k, lambda_k and beta are enumerated as in the paper, and also x, the number of migrated forwards, which the paper fixes
at 2(p - k - 1).  The paper's 0-1 program over operators becomes a lookup in the Pareto front of each stage: the
smallest r with (mu_s - beta lambda_s) a^adj + W_s <= G and a^adj beta / B <= 3f + r.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from debubble.ir import Number
from debubble.papers.obscura.schedule import max_migrated, migrated_pipeline
from debubble.papers.obscura.step_model import identify, step_time, swapping_cost, warm_ups
from debubble.planners.partitioning.fixed_partition import Stages
from debubble.planners.partitioning.pareto import StageRecomputation
from debubble.planners.problem import Solution

FRACTIONS: tuple[Number, ...] = (1, *(Fraction(eighths, 8) for eighths in (7, 6, 5, 4, 3, 2)))
"""The values of beta that are enumerated."""

MAX_VALUES = 16
"""Maximum number of values of x, and of lambda_k, that are enumerated."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """An Obscura pipeline except for its recomputation.

    Attributes:
        adjusted: k + 1, the number of adjusted stages.
        migrated: x, the number of migrated forwards.
        blocks: lambda_k, the number of activation blocks that stage k swaps; 0: no swapping.
        fraction: beta, the fraction of each block that is swapped.
    """

    adjusted: int
    migrated: int
    blocks: int = 0
    fraction: Number = 1

    def warm_ups(self, devices: int, micro_batches: int) -> list[int]:
        """mu_s per stage."""
        return warm_ups(devices, micro_batches, adjusted=self.adjusted, migrated=self.migrated)

    def swapped_blocks(self, devices: int, micro_batches: int) -> list[int]:
        """lambda_s = lambda_k + (k - s), limited by the warm-up; 0 without swapping."""
        return [
            min(self.blocks + self.adjusted - 1 - s, max(mu - 2, 0)) if self.blocks and s < self.adjusted else 0
            for s, mu in enumerate(self.warm_ups(devices, micro_batches))
        ]

    def alive(self, devices: int, micro_batches: int) -> list[float]:
        """Equation (1) over a^adj: mu_s - beta lambda_s."""
        both = zip(self.warm_ups(devices, micro_batches), self.swapped_blocks(devices, micro_batches), strict=True)
        return [float(mu - self.fraction * out) for mu, out in both]


@dataclass(frozen=True, kw_only=True)
class FittedConfiguration:
    """A configuration with its stages, their recomputation, and the step time by the step model."""

    stages: Stages
    configuration: Configuration
    choices: tuple[StageRecomputation, ...]
    estimate: float

    @cached_property
    def bound(self) -> float:
        """Lower bound of the step time: the step model without the cost of swapping."""
        problem = self.stages.problem
        return step_time(
            self.stages.costs,
            [choice.recompute for choice in self.choices],
            micro_batches=problem.micro_batches,
            warm_ups=self.configuration.warm_ups(problem.devices, problem.micro_batches),
        )

    def solution(self) -> Solution:
        """The configuration's schedule on its stages."""
        c, problem = self.configuration, self.stages.problem
        name = "obscura" if c.migrated == max_migrated(problem.devices, c.adjusted) else "obscura-minimal"
        schedule = migrated_pipeline(
            name if c.adjusted else "1f1b",
            devices=problem.devices,
            micro_batches=problem.micro_batches,
            adjusted=c.adjusted,
            migrated_forwards=c.migrated,
            swapped_blocks=c.blocks,
            swapped_fraction=c.fraction,
            destination="peer" if problem.peers else "host",
        )
        return self.stages.solution(schedule, self.choices)


def candidates(stages: Stages) -> Iterator[FittedConfiguration]:
    """Every configuration that fits: 1F1B with recomputation on demand, and Obscura pipelines."""
    for configuration in configurations(stages):
        yield from fits(stages, configuration)


def configurations(stages: Stages) -> Iterator[Configuration]:
    """Enumerate k, x, lambda_k and beta; k comes from identification with and without CMB-Identifying."""
    p, m = stages.problem.devices, stages.problem.micro_batches
    yield Configuration(adjusted=0, migrated=0)
    # Stages that are not adjusted are assumed to recompute nothing, or the cheap operators.
    assumed = (stages.named(strategy) for strategy in ("none", "cmb") if stages.knows(strategy))
    for adjusted in sorted({identify(stages, choices) for choices in assumed} - {0}):
        for migrated in _spread(range(1 if adjusted < p else 0, max_migrated(p, adjusted) + 1)):
            yield Configuration(adjusted=adjusted, migrated=migrated)
            if stages.costs.offload is None or (stages.problem.peers and adjusted > p // 2):
                continue
            for blocks in _spread(range(1, min(p - adjusted + 1 + migrated, m) - 1)):
                for fraction in FRACTIONS:
                    yield Configuration(adjusted=adjusted, migrated=migrated, blocks=blocks, fraction=fraction)


def _spread(values: range) -> list[int]:
    """All values, or MAX_VALUES of them spread evenly from the first to the last."""
    if len(values) <= MAX_VALUES:
        return list(values)
    return [values[i * (len(values) - 1) // (MAX_VALUES - 1)] for i in range(MAX_VALUES)]


def fits(stages: Stages, configuration: Configuration) -> Iterator[FittedConfiguration]:
    """The configuration with the least recomputation that fits: chosen per stage, and equal on all adjusted stages.

    The paper uses the second.  It is often faster: unequal recomputation makes neighboring stages wait for each other.
    """
    p, m, adjusted = stages.problem.devices, stages.problem.micro_batches, configuration.adjusted
    alive = configuration.alive(p, m)
    unadjusted = stages.on_demand[adjusted:]
    per_stage = tuple(_cheapest(stages, configuration, s, alive[s]) for s in range(adjusted))
    if None in per_stage or None in unadjusted:
        return
    needed = max((c.recompute for c in per_stage if c is not None), default=0.0)
    equal = tuple(_cheapest(stages, configuration, s, alive[s], at_least=needed) for s in range(adjusted))
    for chosen in (per_stage, equal) if equal != per_stage else (per_stage,):
        if None not in chosen:
            choices = [choice for choice in (*chosen, *unadjusted) if choice is not None]
            if not stages.problem.peers or _peers_have_capacity(stages, configuration, choices):
                yield candidate(stages, configuration, choices)


def _peers_have_capacity(stages: Stages, configuration: Configuration, choices: Sequence[StageRecomputation]) -> bool:
    """Tell whether each paired device has memory for the swapped blocks and its own activations."""
    p, m = stages.problem.devices, stages.problem.micro_batches
    alive, swapped_blocks = configuration.alive(p, m), configuration.swapped_blocks(p, m)
    for s in range(configuration.adjusted):
        host, received_bytes = (
            choices[p - 1 - s],
            float(configuration.fraction) * swapped_blocks[s] * choices[s].retained,
        )
        if alive[p - 1 - s] * host.retained + host.workspace + received_bytes > stages.budget(p - 1 - s):
            return False
    return True


def _cheapest(
    stages: Stages, configuration: Configuration, stage: int, alive: float, *, at_least: float = 0.0
) -> StageRecomputation | None:
    _, shared = _seconds_per_byte(stages, configuration, stage)
    return stages.fronts[stage].cheapest(
        in_flight=alive,
        budget=stages.budget(stage),
        transfer=shared,
        period=float(stages.costs.work(stage)),
        min_recompute=at_least,
    )


def candidate(
    stages: Stages, configuration: Configuration, choices: Sequence[StageRecomputation]
) -> FittedConfiguration:
    """Combine a configuration with the stages' recomputation, and estimate its step time."""
    costs, p, m = stages.costs, stages.problem.devices, stages.problem.micro_batches
    mu, swapped_blocks = configuration.warm_ups(p, m), configuration.swapped_blocks(p, m)
    swapping = []
    for s, choice in enumerate(choices):
        alone, shared = _seconds_per_byte(stages, configuration, s)
        cost = swapping_cost(
            blocks=swapped_blocks[s],
            warm_up=mu[s],
            periods=m - mu[s],
            transfer=alone * choice.retained,
            pace=shared * choice.retained,
            forward=float(costs.forward[s]),
            backward=float(costs.backward(s)) + choice.recompute,
        )
        swapping.append(cost)
    recompute = [choice.recompute for choice in choices]
    return FittedConfiguration(
        stages=stages,
        configuration=configuration,
        choices=tuple(choices),
        estimate=step_time(costs, recompute, micro_batches=m, warm_ups=mu, swapping=swapping),
    )


def _seconds_per_byte(stages: Stages, configuration: Configuration, stage: int) -> tuple[float, float]:
    """Beta / B of one transfer in the slower direction: alone, and while all stages that share the link swap."""
    costs = stages.costs
    if not configuration.blocks or stage >= configuration.adjusted or not costs.activation[stage]:
        return 0.0, 0.0
    transfers = costs.transfers
    assert transfers is not None
    slower = max(transfers.offload[stage], transfers.reload[stage])
    group = next((group for group in costs.link_groups if stage in group), (stage,))
    sharing = sum(device < configuration.adjusted for device in group)
    share = float(configuration.fraction / costs.activation[stage])
    return share * float(slower), share * float(transfers.busy(stage) * sharing)
