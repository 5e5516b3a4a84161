"""Step time and memory from the logs and traces of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from debubble.costs.devices.cluster import FRAGMENTATION
from debubble.imports.logs import MeasuredFigures, read_figures
from debubble.ir import InputError
from tests.exports.hand_plans import full, priced
from tests.imports.test_measurements import trace
from tests.views.scenes import small_plan, trace_of

MEGATRON = """ [2026-01-01] iteration 1/ 100 | elapsed time per iteration (ms): 2500.0 | learning rate: 1e-4 |
[Rank 0] (after 1 iterations) memory (MB) | allocated: 100.0 | max allocated: 2048.0 | reserved: 2100.0
[Rank 1] (after 1 iterations) memory (MB) | allocated: 100.0 | max allocated: 1024.0 | reserved: 2100.0
 [2026-01-01] iteration 2/ 100 | elapsed time per iteration (ms): 900.0 | learning rate: 1e-4 |
 [2026-01-01] iteration 3/ 100 | elapsed time per iteration (ms): 1000.0 | learning rate: 1e-4 |
"""


def read(folder: Path, text: str) -> MeasuredFigures:
    (folder / "log.txt").write_text(text)
    return read_figures([folder / "log.txt"], priced())


def test_megatron_log_gives_median_step_and_peak(tmp_path: Path) -> None:
    assert read(tmp_path, MEGATRON) == MeasuredFigures(step=1.0, memory=2 * 2**30)


@pytest.mark.parametrize(
    "line",
    [
        "Training epoch 0, iteration 1/9 | global_step: 1 | reduced_train_loss: 1.6 | train_step_timing in s: 2.505",
        "100/100 [10:48<00:00, global_step=99.00, train_step_timing in s=2.505]",
        "steps: 10 loss: 5.5508 iter time (s): 2.505 samples/sec: 136.706",
    ],
)
def test_nemo_and_deepspeed_write_seconds(tmp_path: Path, line: str) -> None:
    assert read(tmp_path, line).step == 2.505


def test_torchtitan_writes_tokens_per_second_of_a_device(tmp_path: Path) -> None:
    plan = priced()
    tokens = plan.micro_batches * plan.options.data * plan.options.sequence_length * plan.options.micro_batch_size

    log = read(tmp_path, "step: 10  loss: 4.3  memory: 10.60GiB(13.4%)  \x1b[34mtps: 1,024  tflops: 9.0")

    assert log.step == pytest.approx(tokens / plan.ranks / 1024)
    assert log.memory == pytest.approx(10.6 * 2**30 / (1 + FRAGMENTATION))


def test_a_trace_of_torch_has_its_profiled_steps(tmp_path: Path) -> None:
    plan = priced(full(0, 2))

    assert read_figures(trace(plan, tmp_path, lambda kind, stage: 1.0), plan) == MeasuredFigures(step=2.0)


def test_a_trace_of_debubble_has_its_typical_step(tmp_path: Path) -> None:
    measured = trace_of(small_plan())
    measured.save(tmp_path / "trace.json")

    assert read_figures([tmp_path / "trace.json"], small_plan()).step == measured.typical.seconds


def test_log_without_steps_asks_for_the_step(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give --step SECONDS"):
        read(tmp_path, "nothing")
