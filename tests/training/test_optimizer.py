import pytest

from debubble.training.optimizer import learning_rate


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    rates = [learning_rate(step, peak=8.0, warmup=4, steps=20) for step in range(4)]
    assert rates == [2.0, 4.0, 6.0, 8.0]


def test_the_cosine_starts_at_the_peak_passes_its_middle_and_ends_at_the_floor() -> None:
    rates = [learning_rate(step, peak=1.0, warmup=0, steps=11, floor=0.2) for step in (0, 5, 10)]
    assert rates == pytest.approx([1.0, 0.6, 0.2], abs=1e-15)


def test_steps_beyond_the_last_stay_at_the_floor() -> None:
    assert learning_rate(99, peak=1.0, warmup=2, steps=10) == pytest.approx(0.1)
