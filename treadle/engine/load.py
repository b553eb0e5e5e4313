"""From a model file to an engine: what an engine process, and `treadle.LLM`, start with."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from treadle import machine
from treadle.core import TreadleError
from treadle.engine.engine import Engine, EngineConfig
from treadle.engine.grammar import Grammars
from treadle.engine.kv.spill import VERSION, Spill
from treadle.engine.runner import Runner, RunnerConfig, context_of, least_memory
from treadle.engine.spec.runner import NativeDraftRunner, check_vocabularies
from treadle.models import builder
from treadle.models.config import ModelConfig, embeds, read_config
from treadle.text.tokenizer import Tokenizer
from treadle.weights.gguf import GgufModelFile, open_gguf
from treadle.weights.identity import model_identity
from treadle.weights.loader import Progress


class LoadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is loaded, and how: fields of RunnerConfig, then of EngineConfig."""

    path: str
    draft: str | None = None  # file of a draft model
    threads: int | None = None
    context: int | None = None
    kv_memory: int | None = None
    kv_dtype: str = "bf16"
    kv_spill: str | None = None  # folder; None: none
    kv_spill_size: int = 0
    pack_cache: str | None = None  # folder; None: none
    pack_cache_size: int = RunnerConfig.pack_cache_size
    target_itl: float = 0.1
    max_queue: int = 256
    speculation: bool = True
    memory: int | None = None
    pinned: bool = True

    def runner(self, reserved: int = 0) -> RunnerConfig:
        """What the runner is told. ``reserved``: bytes for the draft model."""
        return RunnerConfig(
            reserved=reserved,
            threads=self.threads,
            context=self.context,
            kv_memory=self.kv_memory,
            kv_dtype=self.kv_dtype,
            pack_cache=self.pack_cache,
            pack_cache_size=self.pack_cache_size,
            memory=self.memory,
            pinned=self.pinned,
        )


class Outline(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a model before it is loaded."""

    context: int  # tokens of prompt and answer together
    memory: int  # bytes that it cannot do without
    embedding: int | None  # values of its embeddings; None: it continues texts


def outline(config: LoadConfig) -> Outline:
    """Read it from the model's file. Raises TreadleError when the file or a setting is wrong."""
    file = open_gguf(Path(config.path))
    builder(file.architecture)
    model = read_config(file)
    runner = config.runner()
    return Outline(
        context=context_of(file, model, runner),
        memory=least_memory(file, model, runner) + _draft_memory(config, file, model),
        embedding=model.hidden if embeds(file) else None,
    )


def _draft_config(
    config: LoadConfig, file: GgufModelFile, model: ModelConfig, draft: ModelConfig
) -> RunnerConfig:
    context = min(context_of(file, model, config.runner()), draft.context)
    return dataclasses.replace(config.runner(), context=context, kv_memory=None, kv_dtype="bf16")


def _draft_memory(config: LoadConfig, file: GgufModelFile, model: ModelConfig) -> int:
    """Bytes that the draft model cannot do without. Raises TreadleError if it does not fit the model."""
    if config.draft is None:
        return 0
    if not config.speculation:
        raise TreadleError("a draft model is of no use with speculation off; leave one of the two out")
    draft = open_gguf(Path(config.draft))
    builder(draft.architecture)
    for one, name in ((file, "needs no draft model"), (draft, "cannot be a draft model")):
        if embeds(one):
            raise TreadleError(f"{one.path} makes embeddings, so it {name}")
    check_vocabularies(file, draft)
    small = read_config(draft)
    return least_memory(draft, small, _draft_config(config, file, model, small))


def load_runner(config: LoadConfig, progress: Callable[[float], None] | None = None) -> Runner:
    """Load the model, without its draft model. ``progress`` is told the share that is done, 0 to 1."""
    file = open_gguf(Path(config.path))
    builder(file.architecture)  # an unknown one is the first thing to say
    tokenizer = Tokenizer.from_gguf(file.metadata)
    rows = embedding_rows(file)
    if rows < tokenizer.vocab_size:
        raise TreadleError(
            f"{file.path}: tensor 'token_embd.weight' has {rows} rows for the tokenizer's "
            f"{tokenizer.vocab_size} tokens"
        )
    reserved = _draft_memory(config, file, read_config(file))
    grammars = None if embeds(file) else Grammars(tokenizer, rows)
    if grammars is not None:
        grammars.prepare()  # beside the loading
    with _blamed_on(file):
        return Runner(file, tokenizer.eos_ids, config.runner(reserved), _share(progress), grammars)


def load_draft(
    config: LoadConfig, model: Runner, progress: Callable[[float], None] | None = None
) -> NativeDraftRunner | None:
    """Load the draft model of ``model``, if there is to be one."""
    if config.draft is None:
        return None
    file, draft = open_gguf(Path(config.path)), open_gguf(Path(config.draft))
    embedding_rows(draft)
    # Less what the model may still take of the memory for its KV cache.
    room = min(machine.available_memory(), (config.memory or sys.maxsize) - model.weight_bytes)
    plan = _draft_config(config, file, read_config(file), read_config(draft))
    plan = dataclasses.replace(plan, memory=room - model.cache_bytes)
    with _blamed_on(draft):
        return NativeDraftRunner(draft, model, plan, _share(progress))


def load_models(
    config: LoadConfig, progress: Callable[[float], None] | None = None
) -> tuple[Runner, NativeDraftRunner | None]:
    """Load the model and its draft model. ``progress`` is told the share that is done, 0 to 1."""
    sizes = [Path(path).stat().st_size for path in (config.path, config.draft) if path is not None]
    share = sizes[0] / max(sum(sizes), 1)
    if progress is None:
        runner = load_runner(config)
        return runner, load_draft(config, runner)
    runner = load_runner(config, lambda done: progress(share * done))
    return runner, load_draft(config, runner, lambda done: progress(share + (1 - share) * done))


def _share(progress: Callable[[float], None] | None) -> Progress | None:
    return None if progress is None else lambda done, total: progress(done / total)


@contextmanager
def _blamed_on(file: GgufModelFile) -> Iterator[None]:
    """What the checks of the file did not foresee still has to name the file."""
    try:
        yield
    except (ValueError, ArithmeticError, LookupError, MemoryError) as error:
        raise TreadleError(f"{file.path}: the model cannot be built: {error!r}") from error


def embedding_rows(file: GgufModelFile) -> int:
    """Tokens that the embedding table has a row for. Raises TreadleError when there is no such table."""
    if "token_embd.weight" not in file.tensor_names:
        raise TreadleError(
            f"{file.path}: tensor 'token_embd.weight' is missing; the file is no language model"
        )
    return int(file.tensor("token_embd.weight").shape[0])


def load_engine(config: LoadConfig, progress: Callable[[float], None]) -> Engine:
    """The loader of engine processes, see treadle.engine.process."""
    runner, draft = load_models(config, progress)
    spill = None
    if config.kv_spill is not None:
        identity = model_identity(open_gguf(Path(config.path)), VERSION, config.kv_dtype, runner.isa)
        spill = Spill(Path(config.kv_spill), config.kv_spill_size, identity, runner.blocks)
    return Engine(
        runner,
        EngineConfig(
            target_itl=config.target_itl,
            max_queue=config.max_queue,
            speculation=config.speculation and not runner.embeds,
            read_limit=runner.measure_read_limit(),
        ),
        spill=spill,
        draft=draft,
    )
