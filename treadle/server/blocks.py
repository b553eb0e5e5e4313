"""One answer as blocks: runs of reasoning, text and tool calls, in the order in which the model wrote them.

The Responses API and the Messages API are made of such blocks; chat completions have fields of a message
instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from treadle.server.generation import Job, Piece, TokenText
from treadle.text.tools import ToolDelta

Kind = Literal["reasoning", "text", "call"]


@dataclass(eq=False)
class Block:
    """A run of one kind. ``text``: all of it so far; of a call, the arguments."""

    kind: Kind
    index: int
    id: str = ""  # of a call
    name: str = ""  # of a call
    text: str = ""
    tokens: list[TokenText] = field(default_factory=list)  # of text, if log-probabilities were asked for


class Begin(NamedTuple):
    """A block begins."""

    block: Block


class Grow(NamedTuple):
    """``block`` has become longer by ``text``, which may be empty, and by ``tokens``."""

    block: Block
    text: str
    tokens: list[TokenText]


class End(NamedTuple):
    """A block is complete, or, if it is the last one, as long as it gets."""

    block: Block


Step = Begin | Grow | End


class BlockAnswer:
    """The only choice of ``job``. ``finish`` is the finish_reason, set before the last block ends."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.blocks: list[Block] = []
        self.finish = ""
        self._open: Block | None = None
        self._calls: list[Block] = []
        self._read = 0  # tokens

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the answer."""
        return self.job.choices[0].stopped

    @property
    def cut(self) -> bool:
        """Whether the answer was cut off: by the limit of tokens, or in one of its calls."""
        return self.finish == "length" or bool(self._calls and self.finish == "stop")

    def is_whole(self, block: Block) -> bool:
        """Whether nothing is missing from ``block``. Only the end of the answer can cut one off."""
        if not self.cut or block.index < len(self.blocks) - 1:
            return True
        return block.kind == "call" and not self.job.choices[0].in_call

    async def steps(self) -> AsyncGenerator[Step, None]:
        """What happens, until the answer is complete. Raises ApiError if the engine fails; closing it cancels
        the answer."""
        async with contextlib.aclosing(self.job.pieces()) as pieces:
            async for _, piece in pieces:
                for step in self._take(piece):
                    yield step
        for step in self._end():
            yield step

    async def complete(self) -> None:
        """Run to the end; the result is in ``blocks``."""
        async with contextlib.aclosing(self.steps()) as steps:
            async for _ in steps:
                pass

    def _take(self, piece: Piece) -> Iterator[Step]:
        tokens = self._answer_tokens(piece)
        for part in piece.parts:
            if isinstance(part, ToolDelta):
                yield from self._call(part)
                continue
            kind: Kind = "reasoning" if part.field == b"reasoning_content" else "text"
            block = self._open
            if block is None or block.kind != kind:
                block = Block(kind, len(self.blocks))
                yield from self._begin(block)
            if kind == "text":
                yield self._grow(block, part.text, tokens)
                tokens = []
            else:
                yield self._grow(block, part.text, [])
        if tokens and not piece.parts and self._open is not None and self._open.kind == "text":
            yield self._grow(self._open, "", tokens)
        self.finish = piece.finish or ""

    def _answer_tokens(self, piece: Piece) -> list[TokenText]:
        """The tokens of a piece that are not reasoning."""
        tokens = piece.tokens or []
        reasoning = max(self.job.choices[0].reasoning_tokens - self._read, 0)
        self._read += len(tokens)
        return tokens[reasoning:]

    def _call(self, delta: ToolDelta) -> Iterator[Step]:
        if delta.name is not None:
            self._calls.append(Block("call", len(self.blocks), delta.id or "", delta.name))
            yield from self._begin(self._calls[-1])
        if delta.arguments:
            yield self._grow(self._calls[delta.index], delta.arguments, [])

    def _begin(self, block: Block) -> Iterator[Step]:
        yield from self._end()
        self._open = block
        self.blocks.append(block)
        yield Begin(block)

    @staticmethod
    def _grow(block: Block, text: str, tokens: list[TokenText]) -> Grow:
        block.text += text
        block.tokens += tokens
        return Grow(block, text, tokens)

    def _end(self) -> Iterator[Step]:
        block, self._open = self._open, None
        if block is not None:
            yield End(block)
