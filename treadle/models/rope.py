"""Rotation frequencies of RoPE (arXiv 2104.09864) and its extensions to longer contexts."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from treadle.core import TreadleError
from treadle.models.config import bounded, positive
from treadle.weights.loader import Weights

Floats = NDArray[np.float32]


def rotary(weights: Weights, head_dim: int) -> tuple[Floats, float]:
    """Radians per token [pairs] and the magnitude of the rotated vectors, from GGUF metadata.

    Scaling types: none, linear (arXiv 2306.15595) and yarn (arXiv 2309.00071). Llama 3's scaling comes as the
    tensor ``rope_freqs.weight``, divisors per pair.
    """
    file = weights.file
    dims = bounded(file, "rope.dimension_count", 2, head_dim, head_dim)
    if dims % 2:
        raise TreadleError(f"{file.path}: rope.dimension_count is {dims}; it must be even")
    base = positive(file, "rope.freq_base", 10000.0)
    # In float32 as the models are trained with; the exponent as PyTorch computes it.
    frequency = (
        1.0 / (np.float32(base) ** (np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)))
    ).astype(np.float32)
    divisors = weights.optional_vector("rope_freqs.weight")
    if divisors is not None:
        if len(divisors) != len(frequency) or not (np.isfinite(divisors) & (divisors > 0)).all():
            raise TreadleError(
                f"{file.path}: tensor 'rope_freqs.weight' must have {len(frequency)} finite values above 0"
            )
        frequency = frequency / divisors
    scaling = file.string("rope.scaling.type", "none")
    factor = positive(file, "rope.scaling.factor", 1.0)
    if scaling == "linear":
        return (frequency / np.float32(factor)).astype(np.float32), 1.0
    if scaling == "yarn":
        original = bounded(file, "rope.scaling.original_context_length", 1, 2**31 - 1)
        fast = positive(file, "rope.scaling.yarn_beta_fast", 32.0)
        slow = positive(file, "rope.scaling.yarn_beta_slow", 1.0)
        magnitude = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        return yarn(frequency, base, factor, original, (fast, slow)), magnitude
    if scaling != "none":
        raise TreadleError(
            f"{file.path}: rope.scaling.type is {scaling!r}; supported are none, linear and yarn"
        )
    return frequency, 1.0


def yarn(frequency: Floats, base: float, factor: float, original: int, beta: tuple[float, float]) -> Floats:
    """Interpolate slow pairs by ``factor``, keep fast ones, blend in between (arXiv 2309.00071, section 3.2).

    ``beta``: rotations over the original context above which a pair is kept, and below which it is
    interpolated.
    """
    dims = 2 * len(frequency)

    def pair_with(rotations: float) -> float:
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_with(beta[0])), 0)
    high = min(math.ceil(pair_with(beta[1])), dims - 1)
    ramp = (np.arange(len(frequency), dtype=np.float32) - low) / max(high - low, 0.001)
    interpolated = np.clip(ramp, 0, 1).astype(np.float32)
    blended = frequency / np.float32(factor) * interpolated + frequency * (1 - interpolated)
    return np.asarray(blended, np.float32)
