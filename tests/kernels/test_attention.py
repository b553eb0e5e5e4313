"""Attention on every ISA and type of cache, against NumPy in float64 on the queries, keys and values that the
cache holds.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle import _native

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

ISAS = pytest.mark.parametrize("isa", _native.isas())
KV = pytest.mark.parametrize("kv", ["bf16", "q8", "q4"])
U = 2.0**-24  # an operation in float32 is off by at most this share of its result
NAN, INFINITY = 0x7FC0, 0x7F80  # as bf16


def bf16(x: Floats) -> Floats:
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def rotated(x: Floats) -> Floats:
    """Heads [n, dim] times a Hadamard matrix, in the kernels' order of operations."""
    width = x.shape[1] & -x.shape[1]
    x = (x * (np.float32(1) / np.sqrt(np.float32(width)))).reshape(-1, width)
    distance = 1
    while distance < width:
        pairs = x.reshape(-1, width // (2 * distance), 2, distance)
        x = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
        distance *= 2
    return x.reshape(-1, width)


def quantised(x: Floats, kv: str) -> tuple[Floats, Floats]:
    """What a cache keeps of heads [n, dim]: whole codes [n, dim], and a bf16 scale [n, 1], rounded up."""
    turned = rotated(np.ascontiguousarray(x)).reshape(x.shape)
    divisor = np.float32(1 / 127 if kv == "q8" else 1 / 16)
    wanted = np.abs(turned).max(1, keepdims=True) * divisor
    scale = ((wanted.view(np.uint32) + 0xFFFF) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    if kv == "q8":
        return np.clip(np.rint(turned * (np.float32(1) / scale)), -127, 127), scale
    code = np.clip(np.rint(turned * (np.float32(0.5) / scale) - np.float32(0.5)), -8, 7)
    return 2 * code + 1, scale


def turned_back(x: Doubles) -> Doubles:
    """The inverse of ``rotated``, exactly."""
    width = x.shape[1] & -x.shape[1]
    matrix = np.array([[1.0]])
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    back: Doubles = x.reshape(-1, width) @ matrix / np.sqrt(width)
    return back.reshape(x.shape)


def exact_attention(
    query: Floats, keys: Floats, values: Floats, limit: NDArray[np.int64], kv: str = "bf16"
) -> tuple[Doubles, Doubles]:
    """Results [rows, dim] for queries that see the first ``limit`` keys, and the kernels' greatest error."""
    arrays = [np.ascontiguousarray(a) for a in (query, keys, values)]
    if kv == "bf16":
        q, k, v = (bf16(a).astype(np.float64) for a in arrays)
    else:
        turned = rotated(arrays[0]).reshape(query.shape)
        most = np.abs(turned).max(1, keepdims=True)
        q = np.rint(turned * (np.float32(127) / most)).astype(np.float64) * (most / np.float32(127))
        (k, key_scale), (codes, scale) = (
            tuple(part.astype(np.float64) for part in quantised(a, kv)) for a in arrays[1:]
        )
        k, v = k * key_scale, codes * scale
    tokens, dim = k.shape
    scores = q @ k.T / np.sqrt(dim)
    scores[np.arange(tokens) >= limit[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    # A score is a sum of dim exact products. An error of a score, or of its distance to the largest, is a
    # share of the weight. The power and the sum of the weights, and one rescaling per step of 128 keys, round
    # a few times more.
    largest = (np.abs(q) @ np.abs(k).T).max() / np.sqrt(dim)
    share = 2 * (dim + 4) * U * largest + tokens * U + (16 + 8 * (tokens / 128 + 1)) * U
    if kv == "bf16":  # weights are rounded to 8 bits before they meet the values
        return weights @ v, weights @ np.abs(v) * (share + 2.0**-8) + 1e-30
    # Weights, times the scales of their values, are rounded to 14 bits of the largest of their step. An error
    # of one dimension is spread over all those that it is turned back with.
    rounding = 2.0**-15 * 1.01 * (weights * scale.T).max(1, keepdims=True) * np.abs(codes).sum(0)
    width = dim & -dim
    bound = (weights @ np.abs(v) * share + rounding).reshape(len(q), -1, width).sum(2) / np.sqrt(width)
    return turned_back(weights @ v), np.repeat(bound, width, 1) + 1e-30


def random(rows: int, dim: int, tokens: int) -> tuple[Floats, Floats, Floats]:
    rng = np.random.default_rng(rows * 1000 + dim + tokens)
    query, keys, values = (rng.normal(size=(n, dim)).astype(np.float32) for n in (rows, tokens, tokens))
    return query * np.float32(1.5), keys, values


@ISAS
@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(
    ("kv", "rows", "tokens"),
    [
        ("bf16", 1, 1), ("bf16", 7, 33), ("bf16", 32, 128), ("bf16", 3, 301), ("bf16", 13, 512),
        ("bf16", 6, 1101),
        ("q8", 1, 1), ("q8", 32, 128), ("q8", 13, 301), ("q8", 2, 1101),
        ("q4", 1, 1), ("q4", 32, 128), ("q4", 13, 301), ("q4", 2, 1101),
    ],
)  # fmt: skip
def test_attention(isa: str, kv: str, dim: int, rows: int, tokens: int) -> None:
    query, keys, values = random(rows, dim, tokens)
    if kv == "q4" and dim % 32:
        with pytest.raises(ValueError, match=f"multiple of 32 dimensions, this model's have {dim}; use q8"):
            _native.attention(isa, query, np.ones(rows, np.int64), keys, values, kv_dtype=kv)
        return
    # The last query sees all, the others any number: none in later splits, an end inside a step or block.
    limit = np.random.default_rng(dim).integers(1, tokens + 1, rows)
    limit[-1] = tokens
    exact, bound = exact_attention(query, keys, values, limit, kv)
    assert np.all(np.abs(_native.attention(isa, query, limit, keys, values, kv_dtype=kv) - exact) <= bound)


@ISAS
def test_one_key_far_above_the_others(isa: str) -> None:
    """The largest score comes late, and is so large that everything before it vanishes."""
    query, keys, values = random(2, 64, 700)
    keys[690] = query[0] * 40
    limit = np.array([700, 690])
    out = _native.attention(isa, query, limit, keys, values)
    np.testing.assert_array_equal(out[0], bf16(values[690]))
    exact, bound = exact_attention(query, keys[:690], values[:690], limit)
    assert np.all(np.abs(out[1] - exact[1]) <= bound[1])


@ISAS
@KV
@pytest.mark.parametrize("dim", [96, 64])
def test_a_row_does_not_depend_on_its_neighbours(isa: str, kv: str, dim: int) -> None:
    query, keys, values = random(32, dim, 531)
    limit = np.arange(500, 532)
    together = _native.attention(isa, query, limit, keys, values, kv_dtype=kv)
    for rows in range(1, 33):
        some = _native.attention(isa, query[:rows], limit[:rows], keys, values, kv_dtype=kv)
        np.testing.assert_array_equal(some.view(np.uint32), together[:rows].view(np.uint32))


@ISAS
@KV
@pytest.mark.parametrize("tokens", [1, 31, 64, 129, 530])
@pytest.mark.parametrize("stale", [NAN, INFINITY])
def test_what_another_sequence_left_in_a_block_has_no_effect(
    isa: str, kv: str, tokens: int, stale: int
) -> None:
    query, keys, values = random(9, 96 if kv == "q4" else 80, tokens)
    limit = np.full(9, tokens)
    clean = _native.attention(isa, query, limit, keys, values, kv_dtype=kv)
    reused = _native.attention(isa, query, limit, keys, values, stale=stale, kv_dtype=kv)
    np.testing.assert_array_equal(reused.view(np.uint32), clean.view(np.uint32))


@ISAS
@pytest.mark.parametrize(
    ("kv", "heads", "kv_heads"),
    [
        ("bf16", 1, 1), ("bf16", 2, 1), ("bf16", 6, 2), ("bf16", 5, 1), ("bf16", 7, 1), ("bf16", 8, 2),
        ("bf16", 14, 2), ("bf16", 12, 1), ("bf16", 16, 1), ("bf16", 32, 1),
        ("q8", 7, 1), ("q8", 8, 2), ("q4", 7, 1), ("q4", 8, 2),
    ],
)  # fmt: skip
def test_groups_of_heads_in_a_program(isa: str, kv: str, heads: int, kv_heads: int) -> None:
    """A prompt in odd chunks, then single tokens beyond one split, beside a second sequence."""
    dim, tokens = 32, 600
    program = _native.Program(_native.Pool(2), isa, 512, 1, 48, two_bytes=False, kv_dtype=kv)
    width = (heads + 2 * kv_heads) * dim
    qkv, out = program.buffer(width), program.buffer(heads * dim)
    rows = np.random.default_rng(heads).normal(size=(tokens, width)).astype(np.float32)
    program.embed("F32", rows.view(np.uint8).reshape(-1), tokens, out=qkv)
    program.angles(np.zeros(dim // 2, np.float32))
    program.attention(qkv, (heads, kv_heads, dim), neox=True, out=out)
    assert program.cache_bytes == 48 * _native.kv_block_bytes(kv, kv_heads, dim)
    tables = np.random.default_rng(1).permutation(48).astype(np.int32).reshape(2, 24)

    got, past = [], 0
    for length in (3, 41, 256, 255, 1, 1, 43):
        ids = np.arange(past, past + length, dtype=np.int32)
        other = np.arange(past % 7, past % 7 + 2, dtype=np.int32)  # of a sequence that starts anew every time
        program.run(
            np.concatenate([other, ids]), np.array([2, length], np.int32), np.array([0, past], np.int32),
            np.array([1, 0], np.int32), np.zeros(0, np.int32), tables,
        )  # fmt: skip
        got.append(np.array(program.rows(out)[2:]))
        past += length
    result = np.concatenate(got).reshape(tokens, heads, dim)
    q, k, v = np.split(rows.reshape(tokens, -1, dim), [heads, heads + kv_heads], axis=1)
    limit = np.arange(1, tokens + 1)
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        exact, bound = exact_attention(q[:, head], k[:, kv_head], v[:, kv_head], limit, kv)
        assert np.all(np.abs(result[:, head] - exact) <= bound)


@ISAS
@KV
def test_a_block_can_be_taken_out_and_put_elsewhere(isa: str, kv: str) -> None:
    """The next token gives the same result, bit for bit, when the blocks before it have moved."""
    dim, tokens = 64, 64
    rows = np.random.default_rng(4).normal(size=(tokens + 1, 3 * dim)).astype(np.float32)

    def program() -> tuple[_native.Program, int]:
        made = _native.Program(_native.Pool(1), isa, 64, 1, 6, two_bytes=False, kv_dtype=kv)
        qkv, out = made.buffer(3 * dim), made.buffer(dim)
        made.embed("F32", rows.view(np.uint8).reshape(-1), tokens + 1, out=qkv)
        made.angles(np.ones(dim // 2, np.float32))
        for _ in range(2):
            made.attention(qkv, (1, 1, dim), neox=True, out=out)
        return made, out

    def run(made: _native.Program, past: int, count: int, table: list[int]) -> None:
        ids = np.arange(past, past + count, dtype=np.int32)
        one = np.zeros(1, np.int32)
        made.run(ids, one + count, one + past, one, one[:0], np.array([table], np.int32))

    first, out = program()
    run(first, 0, tokens, [3, 1, 0])
    run(first, tokens, 1, [3, 1, 0])
    second, _ = program()
    for block, to in ((3, 5), (1, 2)):
        content = first.read_block(block)
        assert content.nbytes == first.block_bytes == 2 * _native.kv_block_bytes(kv, 1, dim)
        second.write_block(to, content)
    run(second, tokens, 1, [5, 2, 4])
    np.testing.assert_array_equal(second.rows(out), first.rows(out))
    with pytest.raises(ValueError, match="there is no cache block 6"):
        second.read_block(6)
    with pytest.raises(ValueError, match="not 3"):
        second.write_block(0, np.zeros(3, np.uint8))
