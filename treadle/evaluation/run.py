"""What `treadle eval` does: from files to a report."""

from __future__ import annotations

from pathlib import Path

import msgspec

from treadle import hub
from treadle.bench.provenance import Provenance, provenance
from treadle.core import TreadleError
from treadle.engine.runner import Runner, RunnerConfig
from treadle.evaluation.logits import ROWS, FileLogits, Logits, LogitsWriter, ModelLogits
from treadle.evaluation.scores import Divergence, Perplexity, Progress, divergence, perplexity
from treadle.evaluation.windows import Text, read_text
from treadle.models.config import embeds, read_config
from treadle.text.tokenizer import Tokenizer
from treadle.weights.gguf import GgufModelFile, open_gguf

_CONTEXT = 2048  # tokens, unless the model has fewer


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """Which text is read, and how. None: the default."""

    text: Path
    context: int | None = None  # tokens per window; at most 2048
    stride: int | None = None  # new tokens per window; half of them
    tokens: int | None = None  # of the text; all


class Loading(msgspec.Struct, frozen=True, kw_only=True):
    """A model and how it computes; see RunnerConfig."""

    model: str | None
    threads: int | None = None
    kv_dtype: str = "bf16"
    activations: str = "auto"


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """What gave the logits."""

    source: str  # a file's name
    isa: str | None = None  # and the rest: None where they come from a file of logits
    kv_dtype: str | None = None
    activations: str | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything ``treadle eval`` finds out."""

    model: Side
    reference: Side | None
    text: str
    context: int
    stride: int
    result: Perplexity | Divergence
    run: Provenance


def measure_perplexity(
    loading: Loading, reading: Reading, save: Path | None = None, progress: Progress | None = None
) -> Report:
    """Perplexity over a text. ``save``: file for the logits. Raises TreadleError."""
    file = _open(loading)
    text = _read(file, reading)
    logits, side = _load(file, loading, text)
    writer = None if save is None else LogitsWriter(save, text, logits.vocab)
    return _report(side, None, reading, text, perplexity(text, logits, writer, progress))


def measure_divergence(
    loading: Loading, reference: Loading, reading: Reading, progress: Progress | None = None
) -> Report:
    """Divergence from a reference: a model, or a file of logits (.npy). Raises TreadleError."""
    file = _open(loading)
    text = _read(file, reading)
    if reference.model is not None and reference.model.endswith(".npy"):
        path = Path(reference.model)
        base: Logits = FileLogits(path, text)
        base_side = Side(source=path.name)
    else:
        other = _open(reference)
        if (_read(other, reading).ids != text.ids).any():
            raise TreadleError(
                f"{other.path} makes other tokens of the text than {file.path}; they must have the same "
                "tokenizer"
            )
        base, base_side = _load(other, reference, text)
    logits, side = _load(file, loading, text)
    return _report(side, base_side, reading, text, divergence(text, logits, base, progress))


def _open(loading: Loading) -> GgufModelFile:
    file = open_gguf(hub.resolve(loading.model))
    if embeds(file):
        raise TreadleError(f"{file.path} makes embeddings; it predicts no tokens")
    return file


def _read(file: GgufModelFile, reading: Reading) -> Text:
    most = read_config(file).context
    context = reading.context or min(_CONTEXT, most)
    if context > most:
        raise TreadleError(f"the context is {context} tokens, but {file.path} is made for {most}")
    tokenizer = Tokenizer.from_gguf(file.metadata)
    return read_text(reading.text, tokenizer, context, reading.stride or context // 2, reading.tokens)


def _load(file: GgufModelFile, loading: Loading, text: Text) -> tuple[ModelLogits, Side]:
    config = RunnerConfig(
        threads=loading.threads,
        context=text.size,
        kv_dtype=loading.kv_dtype,
        activations=loading.activations,
        max_sequences=ROWS,
    )
    runner = Runner(file, frozenset(), config)
    side = Side(
        source=Path(file.path).name,
        isa=runner.isa,
        kv_dtype=loading.kv_dtype,
        activations=loading.activations,
    )
    return ModelLogits(runner), side


def _report(
    model: Side, reference: Side | None, reading: Reading, text: Text, result: Perplexity | Divergence
) -> Report:
    return Report(
        model=model,
        reference=reference,
        text=reading.text.name,
        context=text.size,
        stride=text.stride,
        result=result,
        run=provenance(),
    )
