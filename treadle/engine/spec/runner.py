"""Runs a draft model on the workers of the model that it guesses for."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from treadle import _native
from treadle.core import TreadleError
from treadle.engine.grammar import settle
from treadle.engine.interfaces import SamplerState
from treadle.engine.runner import Runner, RunnerConfig
from treadle.weights.gguf import GgufModelFile
from treadle.weights.loader import Progress

_UNUSED = 5  # tokenizer.ggml.token_type of ids that only fill the table up
_PADDING = re.compile(r"\[PAD\d+\]")


def check_vocabularies(model: GgufModelFile, draft: GgufModelFile) -> None:
    """Raise TreadleError unless every id is the same token in both. One may have more ids than the other, as
    long as these only fill its table up.
    """
    ours, theirs = _Words(model), _Words(draft)
    shared = min(len(ours.tokens), len(theirs.tokens))
    for id in range(max(len(ours.tokens), len(theirs.tokens))):
        if id < shared and ours.tokens[id] == theirs.tokens[id]:
            continue
        if ours.pads(id) and theirs.pads(id):
            continue
        raise TreadleError(
            f"the draft model {draft.path} does not fit {model.path}: token {id} is {theirs.show(id)} there, "
            f"and {ours.show(id)} here; take a smaller model of the same family, with the same tokenizer"
        )


class _Words:
    """The tokens of a model."""

    def __init__(self, file: GgufModelFile) -> None:
        self.tokens: list[str] = file.metadata.get("tokenizer.ggml.tokens", [])
        kinds = file.metadata.get("tokenizer.ggml.token_type")
        self._kinds: list[int] = [] if kinds is None else list(kinds)

    def pads(self, id: int) -> bool:
        """Whether the id only fills the table up, or is beyond it."""
        if id >= len(self.tokens):
            return True
        return self._kinds[id : id + 1] == [_UNUSED] or _PADDING.fullmatch(self.tokens[id]) is not None

    def show(self, id: int) -> str:
        return repr(self.tokens[id]) if id < len(self.tokens) else "missing"


class _ForkedState(_native.SamplerState):
    """Chooses as another one would. A mask holds for the next token only."""

    def accept(self, token: int, /) -> None:
        super().accept(token)
        self.clear_mask()


class NativeDraftRunner(Runner):
    """Implements treadle.engine.spec.model.DraftRunner. Its logits are for the vocabulary of ``model``;
    tokens that the draft model does not know are never chosen.
    """

    def __init__(
        self, file: GgufModelFile, model: Runner, config: RunnerConfig, progress: Progress | None = None
    ) -> None:
        super().__init__(file, frozenset(), config, progress, pool=model.pool)
        self.rows = self.vocab_size
        self.vocab_size = model.vocab_size
        self._sampler = _native.Sampler(self.vocab_size)
        self._widened = np.full((self.max_sequences, self.vocab_size), -np.inf, np.float32)

    @property
    def logits(self) -> NDArray[np.float32]:
        """See Runner.logits."""
        logits = super().logits
        if self.rows == self.vocab_size:
            return logits
        known = min(self.rows, self.vocab_size)
        widened = self._widened[: len(logits)]
        widened[:, :known] = logits[:, :known]
        return widened

    def fork(self, state: SamplerState, /) -> SamplerState:
        """See DraftRunner.fork."""
        assert isinstance(state, _native.SamplerState)
        settle([state])
        return _ForkedState(state)
