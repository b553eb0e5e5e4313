"""Packed weights outlive the process that packed them: their bytes, and what is refused."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from tests.kernels.test_linear import FORMATS, random_weights
from treadle import _native

# Of kPackedLayout = 1. A change of a layout changes these: raise kPackedLayout in csrc/quant/pack.h then, so
# that nobody reads old bytes as new ones.
LAYOUT = 1
HASHES = {
    "F32": "6edb87358a1f8c64",
    "F16": "b39f563d0574d72c",
    "BF16": "e9b1f7b69541d94a",
    "Q4_0": "85a5d9e38fe06462",
    "Q4_1": "c49c8857d1ed6584",
    "Q5_0": "5e1cbcda31eb4fdc",
    "Q5_1": "04cb52ece48f8fc4",
    "Q8_0": "04835037ae78c314",
    "Q2_K": "3e46be61a9ff8b59",
    "Q3_K": "0bd4d4b2531a36a0",
    "Q4_K": "c4538b7d1768eb6a",
    "Q5_K": "82c2c55c5fbb1523",
    "Q6_K": "53d6182d0705b534",
    "IQ4_NL": "85a5d9e38fe06462",
    "IQ4_XS": "a9cf3e4200187837",
}


def bytes_of(name: str, rows: int, cols: int) -> np.ndarray:
    """File bytes that the same seed gives for ever: no library has a say in them."""
    count = len(random_weights(name, rows, cols))
    mixed = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(56)).astype(np.uint8)


@pytest.mark.parametrize("name", FORMATS)
def test_the_number_of_the_layout_stands_for_these_bytes(name: str) -> None:
    rows, cols = 40, 512
    matrix = _native.pack(_native.Pool(1), name, bytes_of(name, rows, cols), rows, cols)
    assert _native.PACKED_LAYOUT == LAYOUT
    assert hashlib.sha256(matrix.data.tobytes()).hexdigest()[:16] == HASHES[name]


@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_matrix_is_made_of_another_ones_bytes(name: str) -> None:
    rows, cols = 40, 512
    pool = _native.Pool(2)
    matrix = _native.pack(pool, name, random_weights(name, rows, cols), rows, cols)
    room = np.empty(matrix.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    data = room[start : start + matrix.nbytes]
    data[:] = matrix.data
    again = _native.packed(name, data, rows, cols)
    del room, data
    x = np.random.default_rng(1).normal(size=(3, cols)).astype(np.float32)
    isa = _native.isa()
    np.testing.assert_array_equal(
        _native.linear(pool, isa, again, x), _native.linear(pool, isa, matrix, x), strict=True
    )
    assert (again.rows, again.cols, again.format, again.nbytes) == (rows, cols, name, matrix.nbytes)


def test_bytes_that_do_not_fit_are_refused() -> None:
    room = np.zeros(2**16 + 64, np.uint8)
    start = -room.ctypes.data % 64
    size = _native.packed_bytes("Q8_0", 16, 64)
    for data, rows, cols, why in (
        (room[start : start + size - 1], 16, 64, "does not have"),
        (room[start : start + size], 17, 64, "does not have"),
        (room[start : start + size], 16, 63, "does not have"),
        (room[start : start + size], 0, 64, "does not have"),
        (room[start + 1 : start + 1 + size], 16, 64, "multiple of 64"),
    ):
        with pytest.raises(ValueError, match=why):
            _native.packed("Q8_0", data, rows, cols)
    with pytest.raises(ValueError, match="Q9"):
        _native.packed("Q9", room, 16, 64)


def test_checksums_tell_of_any_damage() -> None:
    pool, one = _native.Pool(2), _native.Pool(1)
    data = np.random.default_rng(0).integers(0, 256, (9 << 20) + 13, np.uint8)
    sum = _native.checksum(pool, data)
    assert sum == _native.checksum(one, data) == _native.checksum(pool, data.copy())
    for place in (0, 5, 127, 128, 4 << 20, (8 << 20) - 1, len(data) - 1):
        data[place] ^= 0x10
        assert _native.checksum(pool, data) != sum
        data[place] ^= 0x10
    assert _native.checksum(pool, data[:-1]) != sum
    assert _native.checksum(pool, np.append(data, np.uint8(0))) != sum
    swapped = np.concatenate([data[4 << 20 : 8 << 20], data[: 4 << 20], data[8 << 20 :]])
    assert _native.checksum(pool, swapped) != sum
