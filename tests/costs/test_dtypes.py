"""Dtypes: fp8 speeds up linear layers only, fp16 costs as much as bf16, and devices refuse dtypes they lack."""

from __future__ import annotations

import re

import pytest

from debubble.costs import Cluster, model_units
from debubble.costs.devices.speed import Speed
from debubble.ir import InputError, RunOptions
from debubble.models import models
from debubble.models.runtime_limits import beyond_runtime

H100S = Cluster.parse("8xH100")
LLAMA = models["llama3.1-8b"]


def test_fp8_reaches_88_percent_of_its_peak_ratio_and_casts() -> None:
    bf16, fp8 = (Speed.from_hardware(H100S.slowest, dtype) for dtype in ("bf16", "fp8"))
    n = 8192
    launch = H100S.slowest.efficiency.launch
    products = (bf16.linear(n, n, n) - launch) * 989 / 1979 / 0.88

    assert fp8.linear(n, n, n) == pytest.approx(products + launch, rel=1e-9)
    assert fp8.linear(n, n, n, cast=n * n) == pytest.approx(products + launch + fp8.stream(4 * n * n), rel=1e-9)
    assert fp8.matmul(n, n, n) == bf16.matmul(n, n, n)


def test_fp8_changes_neither_memory_nor_the_head() -> None:
    bf16, fp8 = (
        model_units(LLAMA, H100S, RunOptions(dtype=dtype, sequence_length=8192)).units for dtype in ("bf16", "fp8")
    )

    assert [u.static for u in fp8] == [u.static for u in bf16]
    assert [u.activation for u in fp8] == [u.activation for u in bf16]
    assert fp8[-1] == bf16[-1]
    assert 1.3 < bf16[2].work / fp8[2].work < 2
    assert model_units(LLAMA, H100S, RunOptions(dtype="fp16", sequence_length=8192)).units == bf16


@pytest.mark.parametrize(
    ("cluster", "dtype", "sentence"),
    [
        ("8xA100-80GB", "fp8", "A100-80GB has no fp8: give --dtype bf16"),
        ("8xT4", "bf16", "T4-16GB has no bf16: give --dtype fp16 or fp32."),
        ("8xH100", "fp6", "There is no dtype 'fp6'; there are: bf16, fp16, fp8, mxfp8, nvfp4, fp32."),
    ],
)
def test_a_dtype_that_a_device_lacks_is_refused(cluster: str, dtype: str, sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        model_units(LLAMA, Cluster.parse(cluster), RunOptions(dtype=dtype))


def test_the_runtime_says_that_it_has_no_fp8() -> None:
    assert "not in 'fp8'" in str(beyond_runtime(RunOptions(dtype="fp8"), LLAMA))
