"""A long text cut into windows that a model can read, each token predicted exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treadle.core import TreadleError
from treadle.text.tokenizer import Tokenizer

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Window:
    """``targets[i]`` is to be predicted after ``ids[: first + i + 1]``."""

    ids: Ids
    first: int
    targets: Ids


@dataclass(frozen=True)
class Text:
    """The tokens of a text, and how they are read: ``size`` tokens at once, ``stride`` of them new.

    ``bos`` begins every window, if the model has such a token. Later windows repeat ``size - stride`` tokens,
    so that every prediction but those of the first window sees at least so many.
    """

    ids: Ids
    size: int
    stride: int
    bos: int | None

    def __post_init__(self) -> None:
        if self.size < 2:
            raise TreadleError(f"the context is {self.size} tokens; it must be at least 2")
        if not 1 <= self.stride < self.size:
            raise TreadleError(
                f"the stride is {self.stride} tokens; it must be from 1 to {self.size - 1}, less than the "
                "context"
            )
        if self.scored < 1:
            raise TreadleError(f"the text has {len(self.ids)} tokens; nothing can be predicted from that")

    @property
    def scored(self) -> int:
        """Tokens that are predicted: all, but the first one where nothing stands before it."""
        return len(self.ids) - (self.bos is None)

    def windows(self) -> Iterator[Window]:
        """In the order of the text."""
        start = [] if self.bos is None else [self.bos]
        room = self.size - len(start)
        done = len(self.ids) - self.scored  # tokens that need no prediction any more
        end = min(room, len(self.ids))
        while done < len(self.ids):
            begin = max(0, end - room)
            ids = np.array([*start, *self.ids[begin:end]], np.int32)
            yield Window(ids, done - begin - 1 + len(start), self.ids[done:end])
            done, end = end, min(end + self.stride, len(self.ids))


def read_text(path: Path, tokenizer: Tokenizer, size: int, stride: int, most: int | None = None) -> Text:
    """The text of a UTF-8 file, its first ``most`` tokens if that is given. Raises TreadleError."""
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TreadleError(f"cannot read the text {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TreadleError(f"{path} is no UTF-8 text: byte {error.start} does not belong there") from None
    bos = tokenizer.bos_id if tokenizer.adds_bos else None
    return Text(np.array(tokenizer.encode(content)[:most], np.int32), size, stride, bos)
