"""y = W x for every weight format and ISA, against float64 NumPy on what the `gguf` package decodes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from treadle import _native

Floats = NDArray[np.float32]

ISAS = [*_native.isas(), "amx-emulated"]

INTEGER = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
FORMATS = ["F32", "F16", "BF16", *INTEGER]
SUPER = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"}
# Where the 16-bit scales of a block are: byte offsets.
SCALES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_weights(name: str, rows: int, cols: int, seed: int = 0, factor: float = 1) -> NDArray[np.uint8]:
    """File bytes of a random matrix: every bit pattern of codes and integer scales, sane 16-bit scales."""
    rng = np.random.default_rng(seed)
    if name in ("F32", "F16", "BF16"):
        values = rng.normal(size=(rows, cols)).astype(np.float32)
        kind = gguf.GGMLQuantizationType[name]
        return np.ascontiguousarray(gguf.quants.quantize(values, kind)).view(np.uint8).reshape(-1)
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    blocks = rng.integers(0, 256, (rows * cols // block, nbytes), dtype=np.uint8)
    for offset in SCALES.get(name, (0,)):
        scale = (factor * rng.uniform(0.5e-3, 2e-3, len(blocks))).astype(np.float16)
        blocks[:, offset : offset + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(-1)


def decoded(name: str, data: NDArray[np.uint8], rows: int, cols: int) -> Floats:
    kind = gguf.GGMLQuantizationType[name]
    typed = data.view(np.float32) if name == "F32" else data.view(np.float16) if name == "F16" else data
    return np.asarray(gguf.quants.dequantize(typed.reshape(rows, -1), kind), np.float32).reshape(rows, cols)


def rounded_activations(x: Floats, name: str, isa: str, largest: int = 127) -> NDArray[np.float64]:
    """What the kernels multiply: integers up to ``largest`` per group, bf16, or the floats themselves."""
    if name == "BF16" and isa in ("bf16", "amx", "amx-emulated"):
        bits = x.view(np.uint32)
        return (
            ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000)
            .astype(np.uint32)
            .view(np.float32)
            .astype(np.float64)
        )
    if name not in INTEGER:
        return x.astype(np.float64)
    group = 256 if name in SUPER else 32
    out = np.empty(x.shape, np.float64)
    for begin in range(0, x.shape[1], group):
        part = x[:, begin : begin + group]
        scale = (np.abs(part).max(axis=1, keepdims=True) / np.float32(largest)).astype(np.float32)
        inverse = (np.float32(1) / scale).astype(np.float32)
        out[:, begin : begin + group] = np.rint(part * inverse).astype(np.float64) * scale
    return out


@pytest.fixture(scope="module")
def pool() -> _native.Pool:
    return _native.Pool(2)


@pytest.mark.parametrize("name", FORMATS)
def test_decoded_values_equal_those_of_the_gguf_package(name: str) -> None:
    data = random_weights(name, 8, 512, seed=3)
    np.testing.assert_array_equal(
        _native.dequantise(name, data).view(np.uint32),
        decoded(name, data, 8, 512).reshape(-1).view(np.uint32),
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 48, 1024), (7, 40, 512), (13, 16, 256), (33, 100, 1536)])
def test_product_equals_exact_arithmetic(
    pool: _native.Pool, name: str, isa: str, rows: int, n: int, k: int
) -> None:
    data = random_weights(name, n, k)
    x = np.random.default_rng(1).normal(size=(rows, k)).astype(np.float32)
    y = _native.linear(pool, isa, _native.pack(pool, name, data, n, k), x)
    w, used = decoded(name, data, n, k).astype(np.float64), rounded_activations(x, name, isa)
    exact = used @ w.T
    # Every product and sum in float32 rounds by at most 2^-24 of the sum of magnitudes, k times at worst;
    # formats with a minimum multiply codes and minimums apart, so that their magnitudes are up to twice those
    # of the weights.
    bound = (np.abs(used) @ np.abs(w).T) * 2.0**-24 * np.sqrt(k) * 4
    assert np.all(np.abs(y - exact) <= bound + 1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"])
def test_columns_that_are_no_whole_superblock(pool: _native.Pool, name: str, isa: str) -> None:
    rows, n, k = 5, 32, 576
    data = random_weights(name, n, k)
    x = np.random.default_rng(2).normal(size=(rows, k)).astype(np.float32)
    y = _native.linear(pool, isa, _native.pack(pool, name, data, n, k), x)
    exact = rounded_activations(x, name, isa) @ decoded(name, data, n, k).astype(np.float64).T
    np.testing.assert_allclose(y, exact, rtol=1e-4, atol=1e-4 * np.abs(exact).max())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_does_not_depend_on_its_neighbours(name: str, isa: str) -> None:
    k, n = 2304, 80
    one, two = _native.Pool(1), _native.Pool(2)
    x = np.random.default_rng(4).normal(size=(70, k)).astype(np.float32)
    data = random_weights(name, n, k)
    together = _native.linear(two, isa, _native.pack(two, name, data, n, k), x)
    matrix = _native.pack(one, name, data, n, k)
    for rows in (slice(0, 1), slice(3, 5), slice(10, 19), slice(0, 40)):
        alone = _native.linear(one, isa, matrix, x[rows])
        np.testing.assert_array_equal(alone.view(np.uint32), together[rows].view(np.uint32))


@pytest.mark.parametrize("name", INTEGER)
def test_every_isa_agrees_with_the_reference(pool: _native.Pool, name: str) -> None:
    data = random_weights(name, 64, 1024)
    x = np.random.default_rng(5).normal(size=(6, 1024)).astype(np.float32)
    matrix = _native.pack(pool, name, data, 64, 1024)
    reference = _native.linear(pool, "ref", matrix, x)
    for isa in ISAS:
        np.testing.assert_array_equal(
            _native.linear(pool, isa, matrix, x).view(np.uint32), reference.view(np.uint32)
        )


@pytest.mark.parametrize("name", INTEGER)
def test_packing_adds_at_most_four_percent(name: str) -> None:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert _native.packed_bytes(name, 64, 1024) <= 1.04 * (64 * 1024 // block * size)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"])
@pytest.mark.parametrize("rows", [1, 11, 35])
def test_activations_of_two_bytes(pool: _native.Pool, name: str, isa: str, rows: int) -> None:
    n, k = 40, 576
    data = random_weights(name, n, k)
    x = np.random.default_rng(6).normal(size=(rows, k)).astype(np.float32)
    matrix = _native.pack(pool, name, data, n, k)
    y = _native.linear(pool, isa, matrix, x, two_bytes=True)
    w = decoded(name, data, n, k).astype(np.float64)
    np.testing.assert_allclose(y, rounded_activations(x, name, isa, 127 * 128) @ w.T, rtol=1e-4, atol=2e-5)
    one_byte = np.abs(_native.linear(pool, isa, matrix, x) - x.astype(np.float64) @ w.T).mean()
    assert np.abs(y - x.astype(np.float64) @ w.T).mean() < one_byte / 50
    np.testing.assert_array_equal(
        y.view(np.uint32), _native.linear(pool, "ref", matrix, x, two_bytes=True).view(np.uint32)
    )


@pytest.mark.parametrize("name", [*INTEGER, "BF16"])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 16, 33, 512])
def test_tiles_equal_the_reference(pool: _native.Pool, name: str, rows: int) -> None:
    n, k = (40, 1280) if name in SUPER else (24, 1120)
    data = random_weights(name, n, k, seed=rows)
    x = np.random.default_rng(7).normal(size=(rows, k)).astype(np.float32)
    matrix = _native.pack(pool, name, data, n, k)
    for isa in ("amx-emulated", *(isa for isa in ISAS if isa == "amx")):
        y = _native.linear(pool, isa, matrix, x)
        if name == "BF16":
            used = rounded_activations(x, name, isa)
            bound = np.abs(used) @ np.abs(decoded(name, data, n, k)).T * 2.0**-24 * np.sqrt(k) * 4
            assert np.all(np.abs(y - used @ decoded(name, data, n, k).astype(np.float64).T) <= bound)
        else:
            reference = _native.linear(pool, "ref", matrix, x)
            np.testing.assert_array_equal(y.view(np.uint32), reference.view(np.uint32))
