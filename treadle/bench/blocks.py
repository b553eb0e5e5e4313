"""Random weights in every block format of GGUF that synthetic models use.

Codes are uniformly random. Scales are small finite float16 numbers, chosen so that weights have about the
standard deviation asked for and a mean near zero: activations stay in a real model's range. Layouts: ggml's
``ggml-common.h``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class BlockType:
    """One ggml tensor type."""

    name: str
    id: int  # enum ggml_type
    values: int  # per block
    nbytes: int  # per block
    make_valid: Callable[
        [Bytes, float, np.random.Generator], None
    ]  # (blocks of random bytes, deviation, rng)

    def random(self, blocks: int, deviation: float, rng: np.random.Generator) -> Bytes:
        """``blocks`` blocks as uint8[blocks, nbytes] whose values have about this standard deviation."""
        words = -(-blocks * self.nbytes // 8)
        raw = rng.integers(0, 2**64, words, np.uint64).view(np.uint8)[: blocks * self.nbytes]
        out = raw.reshape(blocks, self.nbytes)
        self.make_valid(out, deviation, rng)
        return out


def _float(bits: int, mantissa: int) -> Callable[[Bytes, float, np.random.Generator], None]:
    """Sign, mantissa and the lowest exponent bit stay random, so magnitudes cover two octaves [m, 4m).

    Their root mean square is sqrt((7/3 + 28/3) / 2) = 2.4 m; m is the nearest power of four.
    """
    bias = {16: 15 if mantissa == 10 else 127, 32: 127}[bits]
    kept = (1 << (bits - 1)) | ((1 << (mantissa + 1)) - 1)

    def make_valid(blocks: Bytes, deviation: float, _rng: np.random.Generator) -> None:
        exponent = round(np.log2(deviation / 2.4)) + bias
        exponent = max(2, exponent + exponent % 2)  # the lowest bit is random
        words = blocks.reshape(-1).view(f"u{bits // 8}")
        words &= kept
        words |= exponent << mantissa

    return make_valid


def _scales(count: int, scale: float, rng: np.random.Generator) -> NDArray[np.float16]:
    """``count`` positive float16 numbers within 25 % of ``scale``."""
    return (scale * rng.uniform(0.75, 1.25, count)).astype(np.float16)


def _put(blocks: Bytes, offset: int, values: NDArray[np.float16]) -> None:
    blocks[:, offset : offset + 2] = values[:, None].view(np.uint8)


def _legacy(spread: float, middle: float | None) -> Callable[[Bytes, float, np.random.Generator], None]:
    """d first; formats with an offset (``middle`` given) store m = -middle * d after it."""

    def make_valid(blocks: Bytes, deviation: float, rng: np.random.Generator) -> None:
        d = _scales(len(blocks), deviation / spread, rng)
        _put(blocks, 0, d)
        if middle is not None:
            _put(blocks, 2, (d * np.float16(-middle)).astype(np.float16))

    return make_valid


def _super(offset: int, spread: float) -> Callable[[Bytes, float, np.random.Generator], None]:
    """One d per super-block at ``offset``; everything else is codes and integer sub-scales."""

    def make_valid(blocks: Bytes, deviation: float, rng: np.random.Generator) -> None:
        _put(blocks, offset, _scales(len(blocks), deviation / spread, rng))

    return make_valid


def _q2_k(blocks: Bytes, deviation: float, rng: np.random.Generator) -> None:
    """A byte of scales holds scale (low nibble) and minimum (high); both equal, dmin = 1.5 d: mean zero."""
    blocks[:, :16] &= 0x0F
    blocks[:, :16] |= blocks[:, :16] << 4
    d = _scales(len(blocks), deviation / 9.84, rng)
    _put(blocks, 80, d)
    _put(blocks, 82, (d * np.float16(1.5)).astype(np.float16))


def _with_minimums(middle: float, spread: float) -> Callable[[Bytes, float, np.random.Generator], None]:
    """Q4_K and Q5_K: minimums equal to the scales (8 + 8 six-bit numbers in 12 bytes), dmin = middle * d."""

    def make_valid(blocks: Bytes, deviation: float, rng: np.random.Generator) -> None:
        d = _scales(len(blocks), deviation / spread, rng)
        _put(blocks, 0, d)
        _put(blocks, 2, (d * np.float16(middle)).astype(np.float16))
        blocks[:, 8:12] = blocks[:, 4:8]
        blocks[:, 12:16] &= 0x0F
        blocks[:, 12:16] |= blocks[:, 12:16] << 4

    return make_valid


# Spreads are the standard deviation of a value at d = 1 with uniform codes: sqrt(E[sub-scale^2] * Var[code]).
_ALL = (
    BlockType("F32", 0, 1, 4, _float(32, 23)),
    BlockType("F16", 1, 1, 2, _float(16, 10)),
    BlockType("BF16", 30, 1, 2, _float(16, 7)),
    BlockType("Q4_0", 2, 32, 18, _legacy(4.61, None)),
    BlockType("Q4_1", 3, 32, 20, _legacy(4.61, 7.5)),
    BlockType("Q5_0", 6, 32, 22, _legacy(9.23, None)),
    BlockType("Q5_1", 7, 32, 24, _legacy(9.23, 15.5)),
    BlockType("Q8_0", 8, 32, 34, _legacy(73.9, None)),
    BlockType("Q2_K", 10, 256, 84, _q2_k),
    BlockType("Q3_K", 11, 256, 110, _super(108, 43.3)),
    BlockType("Q4_K", 12, 256, 144, _with_minimums(7.5, 168.0)),
    BlockType("Q5_K", 13, 256, 176, _with_minimums(15.5, 337.0)),
    BlockType("Q6_K", 14, 256, 210, _super(208, 1366.0)),
)
BLOCK_TYPES = {block.name: block for block in _ALL}
