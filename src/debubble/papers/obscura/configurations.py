"""Swapping-aware recomputation: the joint choice of what to migrate, swap and recompute.

Source: Huang et al., Obscura, USENIX ATC 2025, section 6.2, equation (4).

It enumerates k, lambda_k and beta as the paper does, and also x, the migrated forwards, which the paper leaves at
2(p - k - 1).  For each, the 0-1 program over operators is looked up per stage in its front: the least r with
(mu_s - beta lambda_s) a' + W_s <= G and a' beta / B <= 3f + r.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from debubble.ir import Number
from debubble.papers.obscura.schedule import migrated_pipeline, most_migrated
from debubble.papers.obscura.step_model import identify, step_time, swapping_cost, warm_ups
from debubble.planners.partitioning.fixed_partition import Stages
from debubble.planners.partitioning.pareto import StageRecomputation
from debubble.planners.problem import Solution

FRACTIONS: tuple[Number, ...] = (1, *(Fraction(eighths, 8) for eighths in (7, 6, 5, 4, 3, 2)))
"""The beta that are tried."""

VALUES = 16
"""Values of x, and of lambda_k, that are tried at most."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """An Obscura pipeline without its recomputation.

    Attributes:
        adjusted: k + 1, the number of adjusted stages.
        migrated: x, the forwards that migrate.
        blocks: lambda_k, the blocks that stage k swaps; 0: none.
        fraction: beta, the share of each block that is swapped.
    """

    adjusted: int
    migrated: int
    blocks: int = 0
    fraction: Number = 1

    def warm_ups(self, devices: int, micro_batches: int) -> list[int]:
        """mu_s per stage."""
        return warm_ups(devices, micro_batches, adjusted=self.adjusted, migrated=self.migrated)

    def away(self, devices: int, micro_batches: int) -> list[int]:
        """lambda_s = lambda_k + (k - s), as far as the warm-up holds that many; 0 without swapping."""
        return [
            min(self.blocks + self.adjusted - 1 - s, max(mu - 2, 0)) if self.blocks and s < self.adjusted else 0
            for s, mu in enumerate(self.warm_ups(devices, micro_batches))
        ]

    def alive(self, devices: int, micro_batches: int) -> list[float]:
        """Equation (1) per activation: mu_s - beta lambda_s."""
        both = zip(self.warm_ups(devices, micro_batches), self.away(devices, micro_batches), strict=True)
        return [float(mu - self.fraction * out) for mu, out in both]


@dataclass(frozen=True, kw_only=True)
class FittedConfiguration:
    """A configuration on given stages, the recomputation of each, and the time of the step by the model."""

    stages: Stages
    configuration: Configuration
    choices: tuple[StageRecomputation, ...]
    estimate: float

    @cached_property
    def bound(self) -> float:
        """The step takes at least this long, however little swapping adds."""
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
        name = "obscura" if c.migrated == most_migrated(problem.devices, c.adjusted) else "obscura-minimal"
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
    """Every configuration that fits: 1F1B with recomputation on demand, and Obscura's pipelines."""
    for configuration in configurations(stages):
        yield from fits(stages, configuration)


def configurations(stages: Stages) -> Iterator[Configuration]:
    """Enumerate k, x, lambda_k and beta; k follows from CMB-Identifying and from plain identification."""
    p, m = stages.problem.devices, stages.problem.micro_batches
    yield Configuration(adjusted=0, migrated=0)
    # Stages that are not adjusted are assumed to recompute nothing, or the cheap operators.
    assumed = (stages.named(strategy) for strategy in ("none", "cmb") if stages.knows(strategy))
    for adjusted in sorted({identify(stages, choices) for choices in assumed} - {0}):
        for migrated in _spread(range(1 if adjusted < p else 0, most_migrated(p, adjusted) + 1)):
            yield Configuration(adjusted=adjusted, migrated=migrated)
            if stages.costs.offload is None or (stages.problem.peers and adjusted > p // 2):
                continue
            for blocks in _spread(range(1, min(p - adjusted + 1 + migrated, m) - 1)):
                for fraction in FRACTIONS:
                    yield Configuration(adjusted=adjusted, migrated=migrated, blocks=blocks, fraction=fraction)


def _spread(values: range) -> list[int]:
    """Keep all values, or `VALUES` of them spread from the first to the last."""
    if len(values) <= VALUES:
        return list(values)
    return [values[i * (len(values) - 1) // (VALUES - 1)] for i in range(VALUES)]


def fits(stages: Stages, configuration: Configuration) -> Iterator[FittedConfiguration]:
    """The least recomputation that fits: each stage its own, and the adjusted stages all as much as the neediest.

    The second is the paper's.  It often is the faster one: what differs between neighbours makes them wait in turn.
    """
    p, m, adjusted = stages.problem.devices, stages.problem.micro_batches, configuration.adjusted
    alive = configuration.alive(p, m)
    others = stages.on_demand[adjusted:]
    own = tuple(_cheapest(stages, configuration, s, alive[s]) for s in range(adjusted))
    if None in own or None in others:
        return
    needed = max((c.recompute for c in own if c is not None), default=0.0)
    equal_choice = tuple(_cheapest(stages, configuration, s, alive[s], at_least=needed) for s in range(adjusted))
    for chosen in (own, equal_choice) if equal_choice != own else (own,):
        if None not in chosen:
            choices = [choice for choice in (*chosen, *others) if choice is not None]
            if not stages.problem.peers or _peers_have_capacity(stages, configuration, choices):
                yield candidate(stages, configuration, choices)


def _peers_have_capacity(stages: Stages, configuration: Configuration, choices: Sequence[StageRecomputation]) -> bool:
    """Tell whether each stage's paired device holds what the stage sends there next to its own activations."""
    p, m = stages.problem.devices, stages.problem.micro_batches
    alive, away = configuration.alive(p, m), configuration.away(p, m)
    for s in range(configuration.adjusted):
        host, received_bytes = choices[p - 1 - s], float(configuration.fraction) * away[s] * choices[s].retained
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
    """A configuration with given recomputation, and what it takes by the model of a step."""
    costs, p, m = stages.costs, stages.problem.devices, stages.problem.micro_batches
    mu, away = configuration.warm_ups(p, m), configuration.away(p, m)
    swapping = []
    for s, choice in enumerate(choices):
        alone, shared = _seconds_per_byte(stages, configuration, s)
        cost = swapping_cost(
            blocks=away[s],
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
    """The beta / B of one transfer in the slower direction, and while all stages after the same switch swap."""
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
