"""One loaded model: its program, its KV cache and its sampler, as the scheduler drives them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle import _native, machine
from treadle.core import Request, TreadleError
from treadle.engine.grammar import Grammars, GuidedState, is_guided, settle
from treadle.engine.interfaces import Ids, SampleResult
from treadle.engine.kv.pool import BLOCK
from treadle.engine.kv.spill import BlockStore
from treadle.models import builder
from treadle.models.config import ModelConfig, embeds, read_config
from treadle.models.graph import Graph
from treadle.models.rope import rotary
from treadle.weights.gguf import GgufModelFile
from treadle.weights.loader import Progress, Weights
from treadle.weights.pack_cache import PackCache

# Models with fewer weights than this feel the rounding of activations to 8 bits (docs/performance.md), and
# have speed to spare: they get 15 bits where the weight format allows it.
TWO_BYTES_BELOW = 400_000_000
_READ_BYTES = 256 << 20  # more than a core's share of any last-level cache


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """How a model is loaded."""

    threads: int | None = None  # None: one per usable physical core
    context: int | None = None  # tokens per sequence; None: what the model was trained for, at most 32768
    kv_memory: int | None = None  # bytes of KV cache; None: see `cache_blocks`
    kv_dtype: str = "bf16"  # of the KV cache: bf16, q8 or q4 (csrc/kernels/attention/attention.h)
    # Of linear operations on integer weights. auto: see TWO_BYTES_BELOW; int8; float32: unrounded, with all
    # weights unpacked to float32, for comparisons
    activations: str = "auto"
    pack_cache: str | None = None  # folder in which packed weights are kept over restarts; None: none
    pack_cache_size: int = 100 * 2**30  # most that it may take
    memory: int | None = None  # bytes for weights and KV cache together; None: what is available
    reserved: int = 0  # bytes of these that a draft model needs
    pinned: bool = True  # to one core each; else the system may move the threads among these cores
    max_sequences: int = 64  # decoded together
    max_tokens: int = 512  # per step: activations of a linear pass stay in L2 (csrc/program/ops_linear.cpp)


class Runner:
    """Implements treadle.engine.interfaces.StepRunner on the native core."""

    def __init__(
        self,
        file: GgufModelFile,
        eos_ids: frozenset[int],
        config: RunnerConfig | None = None,
        progress: Progress | None = None,
        grammars: Grammars | None = None,
        pool: _native.Pool | None = None,
    ) -> None:
        """Pack the weights. ``pool``: workers to share with another runner, in turn. Raises TreadleError when
        the model is unsupported or does not fit the memory.
        """
        config = config or RunnerConfig()
        build = builder(file.architecture)
        self.pool = pool or _new_pool(config)
        self.threads = self.pool.threads
        try:
            self.isa = _native.isa()
        except RuntimeError as error:
            raise TreadleError(str(error)) from None
        cache = None
        if config.pack_cache is not None:
            cache = PackCache(Path(config.pack_cache), config.pack_cache_size, file, self.pool)
        weights = Weights(file, self.pool, progress, unpacked=config.activations == "float32", cache=cache)
        model = read_config(file)
        self.context = context_of(file, model, config)
        self.max_tokens, self.max_sequences = config.max_tokens, config.max_sequences
        self.num_blocks = cache_blocks(file, model, self.context, config)
        self._program = _native.Program(
            self.pool,
            self.isa,
            self.max_tokens,
            self.max_sequences,
            self.num_blocks,
            two_bytes=config.activations == "auto" and _values(file) < TWO_BYTES_BELOW,
            kv_dtype=config.kv_dtype,
        )
        self.embeds = embeds(file)
        graph = Graph(self._program, weights, model, self.embeds)
        graph.rotary(*rotary(weights, model.head_dim))
        build(graph)
        if unused := weights.unused():
            raise TreadleError(
                f"{file.path}: tensor {unused[0]!r} is no part of architecture {file.architecture!r} as "
                "Treadle knows it; the model would answer wrongly without it"
            )
        weights.keep()
        self._output = graph.output_buffer
        self.weight_bytes = weights.packed_bytes
        output = "output.weight" if "output.weight" in weights else "token_embd.weight"
        self._output_bytes = 0 if self.embeds else weights.matrix(output).nbytes
        self.kv_token_bytes = self._program.block_bytes / BLOCK  # of the KV cache, in all layers
        self.cache_bytes = self._program.cache_bytes
        self.eos_ids = eos_ids
        self.vocab_size = int(file.tensor("token_embd.weight").shape[0])
        self.tables: Ids = np.zeros((self.max_sequences, -(-self.context // BLOCK)), np.int32)
        self._sampler = _native.Sampler(self.vocab_size)
        self._grammars = grammars

    @property
    def blocks(self) -> BlockStore:
        """The content of the KV blocks."""
        return self._program

    def run(self, tokens: Ids, query_lens: Ids, past_lens: Ids, slots: Ids, logits_rows: Ids, /) -> None:
        """See StepRunner.run."""
        if self._grammars is not None:
            self._grammars.begin()
        self._program.run(tokens, query_lens, past_lens, slots, logits_rows, self.tables)

    def step_bytes(self, query_lens: Ids, past_lens: Ids, logits_rows: Ids, /) -> int:
        """See StepRunner.step_bytes."""
        weights = self.weight_bytes if len(logits_rows) else self.weight_bytes - self._output_bytes
        return weights + int(self.kv_token_bytes * (query_lens.sum() + past_lens.sum()))

    def measure_read_limit(self) -> float:
        """Bytes per second at which the workers read memory: the limit of every step. Takes about 0.2 s."""
        seconds = _native.bench_read(self.pool, _READ_BYTES, 3)
        return _READ_BYTES / min(seconds)

    def copy_block(self, source: int, target: int, /) -> None:
        """See StepRunner.copy_block."""
        self._program.write_block(target, self._program.read_block(source))

    def use_threads(self, count: int, /) -> None:
        """See StepRunner.use_threads."""
        self.pool.active = count

    @property
    def logits(self) -> NDArray[np.float32]:
        """Logits of the last run's wanted rows [rows, vocab]; a view that the next run overwrites."""
        return self._program.rows(self._output)

    def embed(self, rows: Sequence[int], /) -> NDArray[np.float32]:
        """See StepRunner.embed."""
        hidden = self._program.rows(self._output)[list(rows)]
        length = np.linalg.norm(hidden, axis=1, keepdims=True)
        unit: NDArray[np.float32] = hidden / np.maximum(length, np.finfo(np.float32).tiny)
        return unit

    def sample(self, rows: Sequence[int], states: Sequence[_native.SamplerState], /) -> SampleResult:
        """See StepRunner.sample."""
        settle(states)
        return self._sampler.sample(self.logits, rows, states, self.pool)

    def new_state(self, request: Request, /) -> _native.SamplerState:
        """See StepRunner.new_state."""
        p = request.params
        stops = set(p.stop_token_ids) | (frozenset() if p.ignore_eos else self.eos_ids)
        sampling: dict[str, Any] = {
            "prompt_ids": request.prompt_ids,
            "temperature": p.temperature,
            "top_k": p.top_k,
            "top_p": p.top_p,
            "min_p": p.min_p,
            "repetition_penalty": p.repetition_penalty,
            "presence_penalty": p.presence_penalty,
            "frequency_penalty": p.frequency_penalty,
            "logit_bias": p.logit_bias,
            "min_tokens": p.min_tokens,
            "stop_ids": sorted(stops),
            "logprobs": p.logprobs,
            "seed": p.seed,
        }
        if not is_guided(p):
            return _native.SamplerState(self.vocab_size, **sampling)
        if self._grammars is None:
            raise ValueError("grammar: this engine has no tokenizer, so it cannot follow grammars")
        return GuidedState(self._grammars, p, **sampling)


def _new_pool(config: RunnerConfig) -> _native.Pool:
    cpus = machine.threads()
    if config.threads is not None:
        if not 1 <= config.threads <= len(cpus):
            raise TreadleError(
                f"{config.threads} threads were asked for; this process may use 1 to {len(cpus)} "
                "physical cores"
            )
        cpus = cpus[: config.threads]
    return _native.Pool(len(cpus), cpus, config.pinned)


def context_of(file: GgufModelFile, model: ModelConfig, config: RunnerConfig) -> int:
    """Tokens per sequence. Raises TreadleError if more are asked for than the model is made for."""
    if config.context is not None and config.context > model.context:
        raise TreadleError(
            f"a context of {config.context} tokens was asked for, but {file.path} is made for "
            f"{model.context}; its answers would be wrong beyond that"
        )
    return config.context or min(model.context, 32768)


def least_memory(file: GgufModelFile, model: ModelConfig, config: RunnerConfig) -> int:
    """Bytes without which `cache_blocks` refuses: weights, and one context or the given size of KV cache."""
    context = -(-context_of(file, model, config) // BLOCK) * _block_bytes(file, model, config)
    return _weight_bytes(file, config) + max(context, config.kv_memory or 0)


def _block_bytes(file: GgufModelFile, model: ModelConfig, config: RunnerConfig) -> int:
    try:
        return model.layers * _native.kv_block_bytes(config.kv_dtype, model.kv_heads, model.head_dim)
    except ValueError as error:
        raise TreadleError(f"{file.path}: {error}") from None


def _values(file: GgufModelFile) -> int:
    return sum(math.prod(file.tensor(name).shape) for name in file.tensor_names)


def _weight_bytes(file: GgufModelFile, config: RunnerConfig) -> int:
    if config.activations == "float32":
        return 4 * _values(file)
    return int(sum(file.tensor(name).nbytes for name in file.tensor_names) * 1.04)


def cache_blocks(file: GgufModelFile, model: ModelConfig, context: int, config: RunnerConfig) -> int:
    """KV blocks that fit beside the weights. Raises TreadleError with the numbers when memory is too small.

    Without a given size: one full context for each of 8 sequences, or a quarter of the memory that is left
    after the weights, whichever is less; never under one full context. Memory is taken from the system only
    as blocks are used.
    """
    block_bytes = _block_bytes(file, model, config)
    least = -(-context // BLOCK)
    weights = _weight_bytes(file, config)
    available = min(machine.available_memory(), config.memory or sys.maxsize)
    left = available - weights - config.reserved
    if config.kv_memory is not None:
        blocks = config.kv_memory // block_bytes
        if blocks < least:
            raise TreadleError(
                f"{_size(config.kv_memory)} of KV cache hold {blocks * BLOCK} tokens, but one context of "
                f"{context} tokens needs {_size(least * block_bytes)}; give more or serve a smaller context"
            )
    else:
        blocks = max(least, min(8 * least, left // 4 // block_bytes))
    if blocks * block_bytes > left:
        draft = f", and its draft model {_size(config.reserved)}" if config.reserved else ""
        raise TreadleError(
            f"{file.path} needs {_size(weights)} for weights and {_size(blocks * block_bytes)} of KV "
            f"cache for a context of {context} tokens{draft}, but {_size(available)} are available; free "
            "memory, use a smaller model or quantisation, or a smaller context"
        )
    return int(blocks)


def _size(number: float) -> str:
    """Bytes in the largest unit that they fill: ``1.75 GiB``, ``90.0 MiB``, ``4 KiB``."""
    if number >= 2**30:
        return f"{number / 2**30:.2f} GiB"
    return f"{number / 2**20:.1f} MiB" if number >= 2**20 else f"{number / 2**10:.0f} KiB"
