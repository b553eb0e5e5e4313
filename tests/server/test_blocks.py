"""An answer as blocks: its parts become runs of one kind, and a call has nothing but its own arguments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from treadle.server.blocks import Begin, BlockAnswer, End
from treadle.server.generation import Piece, TextDelta
from treadle.text.tools import ToolDelta

CONTENT = b"content"


class Pieces:
    """A job whose only choice gains ``pieces``."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.choices = [SimpleNamespace(reasoning_tokens=0, stopped=None)]
        self._pieces = pieces

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        for piece in self._pieces:
            yield 0, piece


def read(*parts: list[TextDelta | ToolDelta]) -> list[tuple[str, str, str]]:
    """(kind, name, text) of the blocks, after checking that the steps tell the same."""
    pieces = [Piece(list(part), None, None) for part in parts]
    pieces[-1].finish = "tool_calls"
    job: Any = Pieces(pieces)
    answer = BlockAnswer(job)

    async def steps() -> list[Any]:
        return [step async for step in answer.steps()]

    texts: dict[int, str] = {}
    ended: set[int] = set()
    for step in asyncio.run(steps()):
        if isinstance(step, Begin):
            assert len(texts) == len(ended) == step.block.index
            texts[step.block.index] = ""
        elif isinstance(step, End):
            ended.add(step.block.index)
        else:
            assert step.block.index not in ended
            texts[step.block.index] += step.text
    assert list(texts.values()) == [block.text for block in answer.blocks]
    return [(block.kind, block.name, block.text) for block in answer.blocks]


PARTS: list[TextDelta | ToolDelta] = [
    TextDelta(b"reasoning_content", "Hm."),
    TextDelta(CONTENT, "One. "),
    ToolDelta(0, "a", "f", '{"x": '),
    ToolDelta(0, arguments="1}"),
    ToolDelta(1, "b", "g", "{"),
    ToolDelta(1, arguments="}"),
    TextDelta(CONTENT, "Two."),
    ToolDelta(2, "c", "f", "{}"),
    TextDelta(CONTENT, "Three."),
]


@pytest.mark.parametrize("size", range(1, len(PARTS) + 1))
def test_however_many_parts_are_in_one_piece(size: int) -> None:
    assert read(*(PARTS[at : at + size] for at in range(0, len(PARTS), size))) == [
        ("reasoning", "", "Hm."),
        ("text", "", "One. "),
        ("call", "f", '{"x": 1}'),
        ("call", "g", "{}"),
        ("text", "", "Two."),
        ("call", "f", "{}"),
        ("text", "", "Three."),
    ]
