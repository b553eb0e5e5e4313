"""The operations on rows of activations on every ISA, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle import _native

Floats = NDArray[np.float32]

ISAS = pytest.mark.parametrize("isa", _native.isas())
U = 2.0**-24  # an operation in float32 is off by at most this share of its result


def normal(n: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)


@ISAS
@pytest.mark.parametrize("n", [1, 15, 16, 17, 80, 576, 1000, 4096])
def test_rms_norm(isa: str, n: int) -> None:
    x, weight = normal(n), normal(n, 1)
    exact = (
        x.astype(np.float64)
        / np.sqrt((x.astype(np.float64) ** 2).mean() + np.float64(np.float32(1e-5)))
        * weight
    )
    # Each of 16 sums has n / 16 terms, then come their total and up to 15 terms of a rest; the root halves
    # that error. Mean, eps, root, inverse and two products round once each.
    bound = np.abs(exact) * ((n / 16 + 4 + 15) / 2 + 6) * U
    assert np.all(np.abs(_native.rows_rms_norm(isa, x, weight, 1e-5) - exact) <= bound)


@ISAS
def test_rms_norm_of_zeros_is_zero(isa: str) -> None:
    np.testing.assert_array_equal(
        _native.rows_rms_norm(isa, np.zeros(40, np.float32), normal(40), 1e-5), np.zeros(40)
    )


@ISAS
@pytest.mark.parametrize("two_bytes", [False, True])
@pytest.mark.parametrize(("n", "scale_k"), [(32, 32), (96, 32), (32, 256), (256, 256), (800, 256), (576, 32)])
@pytest.mark.parametrize("magnitude", [1.0, 1e30, 1e-30])
def test_quantise(isa: str, two_bytes: bool, n: int, scale_k: int, magnitude: float) -> None:
    x = (normal(n) * magnitude).astype(np.float32)
    x[5:9] = 0
    high, low, scale, sums, neg32, neg16, words = _native.rows_quantise(isa, x, scale_k, two_bytes)
    most = 127 * 128 if two_bytes else 127
    q = high.astype(np.int64) * 128 + low if two_bytes else high.astype(np.int64)
    for i, begin in enumerate(range(0, n, scale_k)):
        part = x[begin : begin + scale_k]
        assert scale[i] == np.abs(part).max() / np.float32(most)
        exact = part.astype(np.float64) / scale[i]
        # To the nearest integer, after three roundings of x / scale in float32.
        assert np.all(np.abs(q[begin : begin + scale_k] - exact) <= 0.5 + 3 * U * most)
        assert np.abs(q[begin : begin + scale_k]).max() == most
    assert np.all((low >= -64) & (low <= 63))
    np.testing.assert_array_equal(neg32, -128 * q.reshape(-1, 32).sum(1))
    np.testing.assert_array_equal(neg16, -32 * q.reshape(-1, 16).sum(1))
    if not two_bytes:
        np.testing.assert_array_equal(words, q.reshape(-1, 32).sum(1))
    if scale_k == 32:
        np.testing.assert_array_equal(sums, scale * q.reshape(-1, 32).sum(1).astype(np.float32))


@ISAS
@pytest.mark.parametrize("two_bytes", [False, True])
def test_values_too_small_for_a_scale_become_zeros(isa: str, two_bytes: bool) -> None:
    x = np.zeros(96, np.float32)
    x[32:64] = normal(32) * np.float32(1e-38)
    x[64:] = normal(32)
    high, low, scale, sums, neg32, neg16, words = _native.rows_quantise(isa, x, 32, two_bytes)
    for zero in (high[:64], low[:64], sums[:2], neg32[:2], neg16[:4], words[:2]):
        assert not zero.any()
    assert high[64:].any()
    assert np.all(np.isfinite(scale))


@ISAS
@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("n", [2, 16, 30, 32, 48, 64, 80, 128])
def test_rope(isa: str, neox: bool, n: int) -> None:
    x, angle = normal(n), normal(n // 2, 1).astype(np.float64) * 100
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    first = np.arange(n // 2) if neox else np.arange(0, n, 2)
    second = first + (n // 2 if neox else 1)
    z = (x[first].astype(np.float64) + 1j * x[second]) * (cos.astype(np.float64) + 1j * sin)
    out = _native.rows_rope(isa, x, cos, sin, neox)
    # Two products and their sum round once each.
    size_first = np.abs(x[first] * cos) + np.abs(x[second] * sin)
    size_second = np.abs(x[second] * cos) + np.abs(x[first] * sin)
    assert np.all(np.abs(out[first] - z.real) <= 2.01 * U * size_first)
    assert np.all(np.abs(out[second] - z.imag) <= 2.01 * U * size_second)


def check_swiglu(isa: str, gate: Floats, up: Floats) -> None:
    wide = gate.astype(np.float64)
    with np.errstate(over="ignore"):
        exact = wide / (1 + np.exp(-wide)) * up
    # The exponent is off by 2 U of itself, which is that times gate in the power; the power itself by 4 U;
    # sum, quotient and product by U each. Powers from 2^126 on may be infinite, results are multiples of
    # 2^-149.
    bound = np.abs(exact) * (2 * np.abs(wide) + 8) * U + np.abs(wide * up) * 2.0**-126 + 2.0**-149
    assert np.all(np.abs(_native.rows_swiglu(isa, gate, up) - exact) <= bound)


@ISAS
@pytest.mark.parametrize("n", [1, 15, 16, 17, 31, 40, 160])
def test_swiglu(isa: str, n: int) -> None:
    check_swiglu(isa, normal(n) * 5, normal(n, 1))


@ISAS
def test_swiglu_of_extremes(isa: str) -> None:
    size = [
        0.0,
        1e-45,
        1e-30,
        1e-3,
        1.0,
        10.0,
        50.0,
        86.0,
        87.0,
        87.6,
        88.0,
        88.7,
        89.0,
        100.0,
        1e4,
        1e30,
        3e38,
    ]
    gate = np.array([*size, *(-s for s in size)], np.float32)
    for up in (0.0, 1e-3, -0.5, 1.0):
        check_swiglu(isa, gate, np.full(len(gate), up, np.float32))


@ISAS
@pytest.mark.parametrize("drop", [0, 1, 9])
def test_to_bf16_rounds_to_nearest_even(isa: str, drop: int) -> None:
    """Every upper half of a float32 with the lower halves around zero, the tie and one."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    bits = np.concatenate([upper | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])[: 6 * 2**16 - drop]
    x = bits.astype(np.uint32).view(np.float32)
    out = _native.rows_to_bf16(isa, x)
    magnitude = bits & 0x7FFFFFFF
    finite = magnitude < 0x7F800000

    def value(upper_half: NDArray[Any]) -> NDArray[np.float64]:
        """Of a bf16; the one after the largest would be 2^128."""
        exponent, fraction = upper_half >> 7, upper_half & 0x7F
        normal = np.ldexp(1 + fraction / 128, exponent.astype(np.int32) - 127)
        return np.where(exponent == 0, np.ldexp(fraction / 128, -126), normal)

    below, above = magnitude >> 16, (magnitude >> 16) + 1
    exact = np.abs(x[finite].astype(np.float64))
    down, up = exact - value(below[finite]), value(above[finite]) - exact
    nearest = np.where((down < up) | ((down == up) & (below[finite] % 2 == 0)), below[finite], above[finite])
    got = out[finite] & 0x7FFF
    tiny = exact < 2.0**-126
    assert np.all((got == nearest) | (tiny & (got == 0)))
    np.testing.assert_array_equal(out[finite] >> 15, bits[finite] >> 31)
    infinite = magnitude == 0x7F800000
    np.testing.assert_array_equal(out[infinite], bits[infinite] >> 16)
    quiet = magnitude >= 0x7FC00000
    assert np.all((out[quiet & (bits & 0xFFFF == 0)] & 0x7FFF) > 0x7F80)
