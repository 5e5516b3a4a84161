"""Plans of one job for several values of one of its arguments: memory limits, micro-batches, clusters, ..."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import le
from pathlib import Path
from typing import TYPE_CHECKING, Any

from debubble.argument_types import with_checked_types
from debubble.costs import Cluster
from debubble.ir import InfeasibleError, InputError
from debubble.models import Model, named_model
from debubble.planners.answers import MIN_RELATIVE_GAIN
from debubble.planners.plan_model import plan
from debubble.planners.progress import Listener
from debubble.plans import Plan

if TYPE_CHECKING:
    from debubble import Report

ModelName = Model | str | Path
"""A model, or its name on the command line."""
ClusterName = Cluster | str | Path
"""A cluster, or its name on the command line."""
MAX_VALUES = 64
"""Maximum number of values of a sweep."""


@dataclass(frozen=True)
class SweepPoint:
    """The answer for one value.

    Attributes:
        value: The value.
        plan: The fastest plan; None if nothing fits.
        reason: Why nothing fits; empty if a plan does.
        found_with: The smaller memory limit with which the plan was found; None: it was found with this value.
    """

    value: Any
    plan: Plan | None
    reason: str = ""
    found_with: Any = None


@dataclass(frozen=True)
class Sweep:
    """The plans of a job for several values of an argument.

    Attributes:
        over: The argument, such as `memory_limit`.
        points: The answers in the order of the values.
        interrupted: Whether Ctrl-C ended it before all values.
    """

    over: str
    points: tuple[SweepPoint, ...]
    interrupted: bool = False

    def show(self) -> Report:
        """The page with a slider over the values, for a notebook or to `save`."""
        import debubble

        return debubble.show(self)

    def _repr_html_(self) -> str:
        return self.show()._repr_html_()


@with_checked_types(but=("model", "cluster"))
def sweep(
    model: ModelName | Sequence[ModelName],
    cluster: ClusterName | Sequence[ClusterName],
    *,
    progress_of: Callable[[Any], Listener | None] = lambda _: None,
    **arguments: Any,
) -> Sweep:
    """Plan a job for every value of one argument of `plan`, given as a list.

    Args:
        model: The model, as for `plan`; a list of models is the argument to vary.
        cluster: Its devices, as for `plan`; a list of clusters is the argument to vary.
        progress_of: Called with every value before it is planned; returns the listener for its progress.
        arguments: The other arguments of `plan`, at most one of them a list.

    Returns:
        The plans, or the reasons why nothing fits; after Ctrl-C those of the finished values, or, during the first
        value, its best plan so far.

    Raises:
        InputError: If not exactly one argument is a list, or a value is wrong.

    Example:
        >>> result = db.sweep("llama-tiny", "2xA100-80GB", micro_batches=[2, 4], planner="dapple")
        >>> [point.plan.micro_batches for point in result.points]
        [2, 4]
    """
    arguments = {"model": model, "cluster": cluster, **arguments}
    varied = [name for name, value in arguments.items() if isinstance(value, list | tuple)]
    if len(varied) != 1:
        raise InputError(
            f"A sweep varies one argument, which is a list; {len(varied)} are{': ' * bool(varied)}{', '.join(varied)}."
        )
    (over,) = varied
    values = arguments[over]
    if not 2 <= len(values) <= MAX_VALUES:
        raise InputError(f"A sweep has 2 to {MAX_VALUES} values, not {len(values)}.")
    for value in values:
        # Wrong names are found before anything is planned.
        if over == "cluster" and not isinstance(value, Cluster):
            Cluster.parse(value)
        if over == "model" and not isinstance(value, Model):
            named_model(value)
    points: list[SweepPoint] = []
    interrupted = False
    for value in values:
        point = _point({"progress": progress_of(value), **arguments, over: value}, value)
        interrupted = point is None or (point.plan is not None and point.plan.interrupted)
        # The plan of an interrupted search cannot be compared with the others.
        if point is not None and not (interrupted and points):
            points.append(point)
        if interrupted:
            break
    if not points:
        raise KeyboardInterrupt
    answers = _with_plans_of_less(points) if over == "memory_limit" else points
    return Sweep(over, tuple(answers), interrupted=interrupted)


def _with_plans_of_less(points: Sequence[SweepPoint]) -> Iterator[SweepPoint]:
    """The answers, replaced by those for less memory where these are faster, as they fit too."""
    planned = [(_limits(point.plan), point.plan, point.value) for point in points if point.plan is not None]
    for point in points:
        if point.plan is None:
            yield point
            continue
        limits = _limits(point.plan)
        smaller = [answer for answer in planned if all(map(le, answer[0], limits))]
        _, best, value = min(smaller, key=lambda answer: answer[1].step_time)
        faster = best.step_time < (1 - MIN_RELATIVE_GAIN) * point.plan.step_time
        yield SweepPoint(point.value, best, found_with=value) if faster else point


def _limits(plan: Plan) -> tuple[int, ...]:
    """The memory limits of the plan's devices."""
    assert plan.cluster is not None
    return plan.cluster.memory_limits


def _point(arguments: dict[str, Any], value: Any) -> SweepPoint | None:
    """The answer for a value; None if Ctrl-C ended its search before a plan was found."""
    try:
        return SweepPoint(value, plan(**arguments))
    except InfeasibleError as error:
        return SweepPoint(value, None, str(error))
    except KeyboardInterrupt:
        return None
