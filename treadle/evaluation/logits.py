"""Where logits come from: a loaded model, or a file of them. Never more than ``ROWS`` rows are in memory.

A file is a NumPy array (.npy) of records, one per predicted token in the order of the text: ``token``, the id
that was to be predicted, and ``logits`` [vocab], float16 or float32. Any program can write one:

    np.zeros(tokens, dtype=[("token", "<i4"), ("logits", "<f4", (vocab,))])
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from treadle.core import TreadleError
from treadle.engine.runner import Runner
from treadle.evaluation.windows import Text, Window

ROWS = 128  # predictions per step: enough for the kernels of many rows
Rows = NDArray[np.float32]


class Logits(Protocol):
    """Gives the logits of the predictions of one window after another."""

    vocab: int

    def of(self, window: Window, /) -> Iterator[Rows]:
        """float32 [n, vocab], ``ROWS`` rows at a time; valid until the next ones are asked for."""
        ...


class ModelLogits:
    """Those of a model, whose cache holds one window."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.vocab = runner.vocab_size
        runner.tables[0] = np.arange(runner.tables.shape[1])

    def of(self, window: Window, /) -> Iterator[Rows]:
        """See Logits.of."""
        past = 0
        while past < window.first:
            past += self._step(window, past, min(window.first - past, self._runner.max_tokens), 0)
        while past < len(window.ids):
            count = min(window.first + len(window.targets) - past, ROWS)
            if not count:
                return  # the last token predicts nothing that is asked for
            past += self._step(window, past, count, count)
            yield self._runner.logits

    def _step(self, window: Window, past: int, count: int, wanted: int) -> int:
        length, before, slot = (np.array([n], np.int32) for n in (count, past, 0))
        ids = window.ids[past : past + count]
        self._runner.run(ids, length, before, slot, np.arange(wanted, dtype=np.int32))
        return count


class FileLogits:
    """Those of a file, for exactly this text. Raises TreadleError if they are not."""

    def __init__(self, path: Path, text: Text) -> None:
        self._path = path
        try:
            self._records: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        except OSError as error:
            raise TreadleError(f"cannot read the logits {path}: {error.strerror or error}") from None
        except ValueError as error:
            raise TreadleError(f"{path} is no file of logits: {error}") from None
        kind = self._records.dtype
        row = kind["logits"] if kind.names == ("token", "logits") else None
        if self._records.ndim != 1 or row is None or row.base not in (np.float16, np.float32):
            raise TreadleError(
                f"{path} has records of {kind}; they must be of a token and its logits, as "
                "`treadle eval perplexity --save-logits` writes them"
            )
        self.vocab = int(row.shape[0]) if len(row.shape) == 1 else 0
        self._done = 0
        if len(self._records) != text.scored:
            raise TreadleError(
                f"{path} has logits of {len(self._records)} predictions, but this text has {text.scored}; "
                "take the same text, --context and --stride"
            )

    def of(self, window: Window, /) -> Iterator[Rows]:
        """See Logits.of."""
        for begin in range(0, len(window.targets), ROWS):
            targets = window.targets[begin : begin + ROWS]
            records = self._records[self._done : self._done + len(targets)]
            if not np.array_equal(records["token"], targets):
                raise TreadleError(
                    f"{self._path} has the logits of another text, from prediction {self._done} on"
                )
            self._done += len(targets)
            yield np.asarray(records["logits"], np.float32)


class LogitsWriter:
    """Writes such a file, in float32."""

    def __init__(self, path: Path, text: Text, vocab: int) -> None:
        kind = np.dtype([("token", "<i4"), ("logits", "<f4", (vocab,))])
        try:
            self._records = np.lib.format.open_memmap(path, "w+", kind, (text.scored,))
        except OSError as error:
            raise TreadleError(f"cannot write the logits {path}: {error.strerror or error}") from None
        self._done = 0

    def add(self, targets: NDArray[np.int32], logits: Rows) -> None:
        """The next predictions."""
        part = self._records[self._done : self._done + len(targets)]
        part["token"], part["logits"] = targets, logits
        self._done += len(targets)
