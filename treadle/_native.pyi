"""Typed face of the native core. One section per folder of csrc/, in the order of csrc/bindings.cpp."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, overload

import numpy as np
import numpy.typing as npt

# threads

class Crowding:
    """Which CPUs other processes keep busy; a face for tests. Times in nanoseconds."""

    def __init__(self, places: int) -> None: ...
    def observe(self, now: int, job: int, places: Sequence[int], delays: Sequence[int]) -> None: ...
    def uncrowded(self, now: int, active: int) -> list[int]: ...

class Pool:
    """Worker threads that native calls share. Idle ones use no CPU."""

    active: int
    """How many of them take part in calls, 1 to ``threads``; counts from the next call on."""

    def __init__(self, threads: int, cpus: Sequence[int] | None = None, pinned: bool = True) -> None:
        """``cpus``: one logical CPU id per thread; None takes the first ones that this process may use.
        Unless ``pinned`` to one CPU each, the system may move threads among these."""

    @property
    def threads(self) -> int: ...
    @property
    def working(self) -> int:
        """How many took part in the last call: those on CPUs that other processes keep busy are left out of
        small steps."""

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

# program

BLOCK: int
"""Tokens per block of the KV cache."""

def kv_block_bytes(kv_dtype: str, kv_heads: int, head_dim: int) -> int:
    """Bytes of a KV block in one layer. ``kv_dtype``: bf16, q8 or q4.

    Raises ValueError, with a text for users, when there is no such type, or it does not fit the heads.
    """

def isa() -> str:
    """What TREADLE_ISA names, or the highest of ``isas()``. Raises RuntimeError with the allowed names."""

def isas() -> list[str]:
    """Levels of kernels that run on this CPU, lowest first, of: ref, avx2, avx512, vnni, bf16, amx.

    ``amx-emulated``, for tests, runs everywhere and is not listed.
    """

def dequantise(format: str, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Values float32 [n] of whole blocks ``data`` [bytes] as a GGUF file holds them. Raises ValueError."""

def packed_bytes(format: str, rows: int, cols: int) -> int:
    """Bytes that ``pack`` takes for such a matrix. Raises ValueError for an unknown format."""

class Matrix:
    """Weights [rows, cols] in the layout that the kernels read. Made by ``pack``."""

    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def format(self) -> str:
        """As in ggml: ``Q4_K``."""
    @property
    def nbytes(self) -> int: ...
    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """Read-only view [nbytes] of the packed weights."""

PACKED_LAYOUT: int
"""Number of the layouts in which matrices are packed; another number means other bytes."""

def pack(
    pool: Pool, format: str, data: npt.NDArray[np.uint8], rows: int, cols: int, mapped: bool = False
) -> Matrix:
    """Copy ``data`` [bytes], a matrix as a GGUF file holds it. Raises ValueError when sizes do not fit.

    ``mapped``: ``data`` is in a mapped file (GgufTensor.data), whose pages leave the process as they are
    packed. Other memory would lose its contents.
    """

def packed(format: str, data: npt.NDArray[np.uint8], rows: int, cols: int) -> Matrix:
    """A matrix from the ``data`` [nbytes] of an equal one, not copied, but kept alive.

    Raises ValueError when sizes do not fit, or ``data`` does not begin at a multiple of 64 bytes.
    """

def copied(pool: Pool, matrix: Matrix) -> Matrix:
    """The same in anonymous memory, in huge pages where the system grants them."""

def checksum(pool: Pool, data: npt.NDArray[np.uint8]) -> int:
    """Of ``data`` [bytes], 64 bits. Made for damage, not for enemies. Maps pages of a mapped file at once."""

def linear(
    pool: Pool, isa: str, matrix: Matrix, x: npt.NDArray[np.float32], two_bytes: bool = False
) -> npt.NDArray[np.float32]:
    """``x`` [m, cols] times the transposed matrix: [m, rows]. ``two_bytes`` as of Program. For tests."""

def bench_linear(pool: Pool, matrix: Matrix, rows: int, seconds: float) -> float:
    """Seconds per product with ``rows`` rows of activations, over at least ``seconds`` of products."""

class Program:
    """A model as a list of operations on buffers, run whole for one step.

    Buffers are activations float32 [rows, width], named by index. Building calls raise ValueError when shapes
    do not fit, IndexError for an unknown buffer.
    """

    def __init__(
        self,
        pool: Pool,
        isa: str,
        max_tokens: int,
        max_logits: int,
        blocks: int,
        two_bytes: bool,
        kv_dtype: str = "bf16",
    ) -> None:
        """Limits of a step: ``max_tokens`` rows, ``max_logits`` wanted rows; and of the cache: ``blocks`` of
        keys and values in ``kv_dtype``: bf16, q8 or q4 (csrc/kernels/attention/attention.h).

        ``two_bytes``: integer kernels read activations in 15 bits instead of 8 where the format allows it.
        """

    def buffer(self, width: int, logits: bool = False) -> int:
        """Index of a new buffer: one row per token of a step, or with ``logits`` one per wanted row."""

    def embed(self, format: str, table: npt.NDArray[np.uint8], rows: int, out: int) -> None:
        """out = the rows of ``table``, [rows, width of out] as a GGUF file holds it, that the tokens name.

        The table is not copied; the program keeps it alive.
        """

    def select(self, x: int, out: int) -> None:
        """out, a buffer of wanted rows = these rows of x."""

    def rms_norm(self, x: int, weight: npt.NDArray[np.float32], eps: float, out: int) -> None:
        """out = x / sqrt(mean(x²) + eps) * weight [width] (arXiv 1910.07467)."""

    def linear(
        self,
        x: int,
        parts: Sequence[Matrix],
        bias: npt.NDArray[np.float32] | None = None,
        residual: int = -1,
        *,
        out: int,
    ) -> None:
        """out = x times each of ``parts`` transposed, side by side, + bias [width of out] + residual.

        ``residual``: a buffer, which may be ``out`` itself; -1: none.
        """

    def gated_linear(self, x: int, gate: Matrix, up: Matrix, out: int) -> None:
        """out = silu(x gateᵀ) * (x upᵀ) (SwiGLU, arXiv 2002.05202)."""

    def angles(self, frequency: npt.NDArray[np.float32], magnitude: float = 1.0) -> None:
        """Rotation of the attention operations that follow: radians per token of each pair [head_dim / 2].

        ``magnitude`` scales sine and cosine (YaRN, arXiv 2309.00071).
        """

    def attention(
        self,
        qkv: int,
        shape: tuple[int, int, int],
        *,
        neox: bool,
        q_norm: npt.NDArray[np.float32] | None = None,
        k_norm: npt.NDArray[np.float32] | None = None,
        eps: float = 1e-6,
        out: int,
    ) -> None:
        """out = causal attention over the sequence's cache, to which the step's keys and values are added.

        ``shape``: (heads, kv_heads, head_dim); a row of ``qkv`` holds queries, keys and values in this order.
        ``neox``: a pair is (i, i + head_dim / 2), else (2 i, 2 i + 1).
        ``q_norm``, ``k_norm`` [head_dim]: weights of an RMS norm of every head before the rotation.
        """

    def run(
        self,
        tokens: npt.NDArray[np.int32],
        query_lens: npt.NDArray[np.int32],
        past_lens: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int32],
        logits_rows: npt.NDArray[np.int32],
        tables: npt.NDArray[np.int32],
    ) -> None:
        """Run one step, without the GIL; arrays as of treadle.engine.interfaces.StepRunner.

        Raises ValueError when the arrays contradict each other or exceed the limits, and within one operation
        what a signal handler raises (KeyboardInterrupt).
        """

    def rows(self, buffer: int) -> npt.NDArray[np.float32]:
        """Rows [rows, width] of a buffer after the last step; a view that the next step overwrites."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache of all layers."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block in all layers."""

    def read_block(self, block: int) -> npt.NDArray[np.uint8]:
        """A copy of the content of a KV block [block_bytes]. Raises ValueError for one that is not there."""

    def write_block(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        """Put the content that ``read_block`` gave into a block. Raises ValueError when it does not fit."""

# kernels: one at a time on a named ISA, for tests. All raise ValueError when sizes do not fit.

def rows_rms_norm(
    isa: str, x: npt.NDArray[np.float32], weight: npt.NDArray[np.float32], eps: float
) -> npt.NDArray[np.float32]:
    """x / sqrt(mean(x²) + eps) * weight, all [n]."""

def rows_quantise(
    isa: str, x: npt.NDArray[np.float32], scale_k: int, two_bytes: bool
) -> tuple[
    npt.NDArray[np.int8],
    npt.NDArray[np.int8],
    npt.NDArray[np.float32],
    npt.NDArray[np.float32],
    npt.NDArray[np.int32],
    npt.NDArray[np.int32],
    npt.NDArray[np.int16],
]:
    """The fields of csrc/kernels/rows/quantised.h for ``x`` [n]; zeros in those that the form does not have.

    q [n], low [n], scale [n / scale_k], sum [n / 32], neg32 [n / 32] (times -128),
    neg16 [n / 16] (times -32), words [n / 32].
    """

def rows_rope(
    isa: str,
    x: npt.NDArray[np.float32],
    cos: npt.NDArray[np.float32],
    sin: npt.NDArray[np.float32],
    neox: bool,
) -> npt.NDArray[np.float32]:
    """``x`` [n] rotated; ``cos`` and ``sin`` [n / 2]. ``neox`` as of Program.attention."""

def rows_swiglu(
    isa: str, gate: npt.NDArray[np.float32], up: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """silu(gate) * up, all [n]."""

def rows_to_bf16(isa: str, x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of ``x`` [n] rounded to bf16, ties to even."""

def attention(
    isa: str,
    query: npt.NDArray[np.float32],
    limit: npt.NDArray[np.int64],
    keys: npt.NDArray[np.float32],
    values: npt.NDArray[np.float32],
    stale: int = 0,
    kv_dtype: str = "bf16",
) -> npt.NDArray[np.float32]:
    """Attention [rows, dim] of one kv head; row r of ``query`` [rows, dim] sees the first ``limit[r]`` keys.

    ``keys``, ``values`` [tokens, dim]. ``stale``: 16 bits that fill the unused places of the cache.
    """

# sampling

class NoTokenLeft(ValueError):
    """Nothing is left to choose from for the picks of these indices; the states are unchanged."""

    picks: list[int]

class SamplerState:
    """What one request brings to the choice of its next token. Parameters: treadle.core.SamplingParams."""

    @overload
    def __init__(self, other: SamplerState) -> None: ...
    @overload
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
        """Tokens int32 [n], log-probabilities float32 [n], most likely (id, log-probability) pairs [n]."""

# bench

def bench_peaks() -> list[tuple[str, str]]:
    """(ISA, number type) pairs that ``bench_peak`` accepts on this CPU."""

def bench_peak(pool: Pool, isa: str, type: str, seconds: float, repeats: int) -> list[float]:
    """Operations per second (a multiply-add counts as two) of all workers together, once per repeat."""

def bench_read(pool: Pool, bytes: int, passes: int) -> list[float]:
    """Seconds of each pass of reading ``bytes`` (rounded up to 1 MiB) of memory with all workers."""
