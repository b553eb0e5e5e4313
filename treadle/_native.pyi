"""Typed face of the native core. One section per folder of csrc/, in the order of csrc/bindings.cpp."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

# threads

class Pool:
    """Pinned worker threads that native calls share. Idle ones use no CPU."""

    def __init__(self, threads: int, cpus: Sequence[int] | None = None) -> None:
        """``cpus``: one logical CPU id per thread; None takes the first ones that this process may use."""

    @property
    def threads(self) -> int: ...

# gguf

class GgufTensor:
    """One tensor of a GGUF file, not copied."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> str:
        """As in ggml: ``Q4_K``."""
    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes, the contiguous dimension last."""
    @property
    def nbytes(self) -> int: ...
    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """Read-only view [nbytes] of the mapped file, which it keeps open."""

class Gguf:
    """A GGUF model (versions 2 and 3, little endian), memory-mapped; all files of it if it is split.

    Raises ValueError with one line that names the file, the field and its value.
    """

    def __init__(self, path: str | bytes | PathLike[str]) -> None: ...
    @property
    def metadata(self) -> dict[str, Any]:
        """Every key: scalars, str, NumPy arrays of numbers, lists of str; bytes where text is not UTF-8."""
    @property
    def tensor_names(self) -> list[str]: ...
    def tensor(self, name: str) -> GgufTensor:
        """Raises KeyError for an unknown name."""

# sampling

class NoTokenLeft(ValueError):
    """Nothing is left to choose from for the picks of these indices; the states are unchanged."""

    picks: list[int]

class SamplerState:
    """What one request brings to the choice of its next token. Parameters as in treadle.core.SamplingParams."""

    def __init__(
        self,
        vocab_size: int,
        *,
        prompt_ids: Sequence[int] = ...,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] = ...,
        min_tokens: int = 0,
        stop_ids: Sequence[int] = ...,
        logprobs: int | None = None,
        seed: int | None = None,
    ) -> None: ...
    def accept(self, token: int) -> None: ...
    def set_mask(self, words: npt.NDArray[np.uint32] | npt.NDArray[np.int32]) -> None: ...
    def clear_mask(self) -> None: ...
    @property
    def output_tokens(self) -> int: ...

class Sampler:
    """Chooses tokens from logits. Holds buffers only; one serves a whole engine."""

    def __init__(self, vocab_size: int) -> None: ...
    def sample(
        self,
        logits: npt.NDArray[np.float32],
        rows: Sequence[int],
        states: Sequence[SamplerState],
        pool: Pool | None = None,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], list[list[tuple[int, float]] | None]]:
        """Tokens int32 [n], log-probabilities float32 [n] and the most likely (id, log-probability) pairs [n]."""

# bench

def bench_peaks() -> list[tuple[str, str]]:
    """(ISA, number type) pairs that ``bench_peak`` accepts on this CPU."""

def bench_peak(pool: Pool, isa: str, type: str, seconds: float, repeats: int) -> list[float]:
    """Operations per second (a multiply-add counts as two) of all workers together, once per repeat."""

def bench_read(pool: Pool, bytes: int, passes: int) -> list[float]:
    """Seconds of each pass of reading ``bytes`` (rounded up to 1 MiB) of memory with all workers."""
