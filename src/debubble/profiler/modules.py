"""Costs of the modules of a user's model, measured like `debubble profile` measures a model from its config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

from debubble.costs.files import units_to_dict
from debubble.costs.units import Units
from debubble.files import check_writable, write_json
from debubble.ir import InputError, PlannedUnit, RunOptions
from debubble.profiler.profile import host_step_bandwidth, offload_bandwidth, static_bytes, threads_of_rank
from debubble.profiler.units import DTYPES, UnitSequence, measured_unit, samples_at
from debubble.runtime.models.loss import Loss, cross_entropy
from debubble.runtime.models.modules import ModuleUnit, modules_of
from debubble.runtime.steps.batch import Batch, read_batch


def profile(
    model: nn.Module,
    batch: Batch,
    *,
    loss: Loss = cross_entropy,
    dtype: str = "bf16",
    repetitions: int = 10,
    output: str | Path | None = None,
) -> Units:
    """Measure forward, backward, recomputation and bytes of every module of your model, on its device.

    It measures only in this process, on CPUs with one thread like a rank, and no messages.  The model does not change.

    Args:
        model: An `nn.Sequential`, or a module with a method `pipeline_units()` that returns its modules in order.
        batch: One micro-batch, as `Pipeline.step` takes it: tokens [rows, length + 1], or `inputs` and `targets`.
        loss: The loss, summed over the targets.
        dtype: Compute dtype, in which a plan of the units also runs: `bf16` or `fp32`.
        repetitions: Number of measurements, of which the medians are used.
        output: The units file to write for `debubble plan --units`; None: no file.

    Returns:
        The modules' costs: seconds, bytes, bytes per second.

    Raises:
        InputError: The model is not a sequence of modules, or the batch or an argument is wrong.

    Example:
        >>> from debubble.planners import ModelUnits
        >>> from debubble.planners.plan_model import solve
        >>> model = torch.nn.Sequential(torch.nn.Embedding(256, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 256))
        >>> units = db.profile(model, torch.zeros(4, 17, dtype=torch.int64), dtype="fp32", repetitions=1)
        >>> [(unit.type, unit.strategies["full"].activation) for unit in units.units[1:]]
        [('Linear', 2048), ('Linear', 2048)]
        >>> problem = db.Problem(workload=ModelUnits(units), devices=2, micro_batches=4)
        >>> plan = solve(problem, planner="dapple")
        >>> [len(stage) for stage in plan.partition] in ([1, 2], [2, 1])
        True
    """
    if dtype not in DTYPES:
        raise InputError(f"The dtype must be one of {', '.join(DTYPES)}, not '{dtype}'.")
    if repetitions < 1:
        raise InputError(f"Measure with at least 1 repetition, not {repetitions}.")
    file = None if output is None else Path(output)
    check_writable(file)
    modules = [deepcopy(module).to(DTYPES[dtype]) for module in _modules_of(model)]
    device = next((parameter.device for module in modules for parameter in module.parameters()), torch.device("cpu"))
    (micro_batch,) = read_batch(batch, micro_batches=1, device=device).rows
    tokens = micro_batch.tokens
    inputs = tokens.to(DTYPES[dtype]) if tokens.is_floating_point() else tokens
    built = [ModuleUnit(module, prefix=f"{index}.", salt=index) for index, module in enumerate(modules)]
    built[-1].loss = loss
    counts: Counter[str] = Counter()
    planned = []
    for module in modules:
        name = type(module).__name__
        planned.append(PlannedUnit(name, counts[name]))
        counts[name] += 1
    run = RunOptions(dtype=dtype)
    with _threads(threads_of_rank(device.type)):
        sequence = UnitSequence(
            built, planned, [("none", "full")] * len(built), inputs=inputs, targets=micro_batch.targets, device=device
        )
        measured = sequence.measure(repetitions=repetitions)
        units = Units(
            units=tuple(
                measured_unit(unit, samples_at(index, measured), static=static_bytes(built[index], run))
                for index, unit in enumerate(planned)
            ),
            seconds=True,
            dtype=dtype,
            offload_bandwidth=offload_bandwidth(sequence, repetitions=repetitions),
            host_step_bandwidth=host_step_bandwidth(run, repetitions=repetitions),
        )
    if file is not None:
        write_json(file, units_to_dict(units))
    return units


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch use this many threads inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _modules_of(model: nn.Module) -> list[nn.Module]:
    """The modules in order.  Raises InputError if the model is not a sequence of modules."""
    modules = modules_of(model)
    if modules is None:
        raise InputError(
            "Only a sequence of modules can be measured: give an nn.Sequential or a module with `pipeline_units()`, or"
            " measure a model of transformers with `debubble profile`."
        )
    if not modules:
        raise InputError("The model has no modules to measure.")
    return modules
