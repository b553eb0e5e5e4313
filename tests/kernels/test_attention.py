"""Attention on every ISA, against NumPy in float64 on the same bf16 queries, keys and values."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle import _native

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

ISAS = pytest.mark.parametrize("isa", _native.isas())
U = 2.0**-24  # an operation in float32 is off by at most this share of its result
NAN, INFINITY = 0x7FC0, 0x7F80  # as bf16


def bf16(x: Floats) -> Floats:
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def exact_attention(
    query: Floats, keys: Floats, values: Floats, limit: NDArray[np.int64]
) -> tuple[Doubles, Doubles]:
    """Results [rows, dim] for queries that see the first ``limit`` keys, and the kernels' greatest error."""
    q, k, v = (bf16(np.ascontiguousarray(a)).astype(np.float64) for a in (query, keys, values))
    tokens, dim = k.shape
    scores = q @ k.T / np.sqrt(dim)
    scores[np.arange(tokens) >= limit[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    # A score is a sum of dim exact products. An error of a score, or of its distance to the largest, is a
    # share of the weight. Weights are rounded to the 8 bits of bf16 before they meet the values; then there
    # are as many sums as tokens. The power and the sum of the weights, and one rescaling per step of 128
    # keys, round a few times more.
    largest = (np.abs(q) @ np.abs(k).T).max() / np.sqrt(dim)
    share = 2 * (dim + 4) * U * largest + 2.0**-8 + tokens * U + (16 + 8 * (tokens / 128 + 1)) * U
    return weights @ v, weights @ np.abs(v) * share + 1e-30


def random(rows: int, dim: int, tokens: int) -> tuple[Floats, Floats, Floats]:
    rng = np.random.default_rng(rows * 1000 + dim + tokens)
    query, keys, values = (rng.normal(size=(n, dim)).astype(np.float32) for n in (rows, tokens, tokens))
    return query * np.float32(1.5), keys, values


@ISAS
@pytest.mark.parametrize("dim", [16, 48, 64, 80, 128, 256])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (7, 33), (32, 128), (3, 301), (13, 512), (6, 1101)])
def test_attention(isa: str, dim: int, rows: int, tokens: int) -> None:
    query, keys, values = random(rows, dim, tokens)
    # The last query sees all, the others any number: none in later splits, an end inside a step or block.
    limit = np.random.default_rng(dim).integers(1, tokens + 1, rows)
    limit[-1] = tokens
    exact, bound = exact_attention(query, keys, values, limit)
    assert np.all(np.abs(_native.attention(isa, query, limit, keys, values) - exact) <= bound)


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
@pytest.mark.parametrize("dim", [48, 64])
def test_a_row_does_not_depend_on_its_neighbours(isa: str, dim: int) -> None:
    query, keys, values = random(32, dim, 531)
    limit = np.arange(500, 532)
    together = _native.attention(isa, query, limit, keys, values)
    for rows in range(1, 33):
        some = _native.attention(isa, query[:rows], limit[:rows], keys, values)
        np.testing.assert_array_equal(some.view(np.uint32), together[:rows].view(np.uint32))


@ISAS
@pytest.mark.parametrize("tokens", [1, 31, 64, 129, 530])
@pytest.mark.parametrize("stale", [NAN, INFINITY])
def test_what_another_sequence_left_in_a_block_has_no_effect(isa: str, tokens: int, stale: int) -> None:
    query, keys, values = random(9, 80, tokens)
    limit = np.full(9, tokens)
    clean = _native.attention(isa, query, limit, keys, values)
    reused = _native.attention(isa, query, limit, keys, values, stale=stale)
    np.testing.assert_array_equal(reused.view(np.uint32), clean.view(np.uint32))


@ISAS
@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(1, 1), (2, 1), (6, 2), (5, 1), (7, 1), (8, 2), (14, 2), (12, 1), (16, 1), (32, 1)],
)
def test_groups_of_heads_in_a_program(isa: str, heads: int, kv_heads: int) -> None:
    """A prompt in odd chunks, then single tokens beyond one split, beside a second sequence."""
    dim, tokens = 32, 600
    program = _native.Program(_native.Pool(2), isa, 512, 1, 48, two_bytes=False)
    width = (heads + 2 * kv_heads) * dim
    qkv, out = program.buffer(width), program.buffer(heads * dim)
    rows = np.random.default_rng(heads).normal(size=(tokens, width)).astype(np.float32)
    program.embed("F32", rows.view(np.uint8).reshape(-1), tokens, out=qkv)
    program.angles(np.zeros(dim // 2, np.float32))
    program.attention(qkv, (heads, kv_heads, dim), neox=True, out=out)
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
        exact, bound = exact_attention(q[:, head], k[:, kv_head], v[:, kv_head], limit)
        assert np.all(np.abs(result[:, head] - exact) <= bound)
