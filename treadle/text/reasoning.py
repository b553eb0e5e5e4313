"""Telling a model's reasoning from its answer, and the sampling that reasoning models were published with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from treadle.text.detokenizer import pending_suffix

OPEN, CLOSE = "<think>", "</think>"


class Part(NamedTuple):
    """What a piece of output adds to the two fields of a message."""

    reasoning: str
    content: str


class ReasoningSplitter:
    """Splits streamed text at ``<think>`` and ``</think>``. ``push`` for every piece, then ``finish`` once.

    started: the prompt ends inside a think block, so the first text is reasoning. Otherwise a block counts
    only when the output begins with it (blanks aside). After the first ``</think>`` everything is content,
    tags included. Blank lines around the reasoning and before the content are left out.
    raw: everything is content.
    """

    def __init__(self, *, started: bool = False, raw: bool = False) -> None:
        self._state = "content" if raw else "reasoning" if started else "start"
        self._held = ""
        self._blank = ""  # blanks at the end of the reasoning so far: left out if it ends there
        self._may_open = started  # the model may repeat the tag that the prompt ended with
        self._trim = started and not raw  # leave out blanks at the head of what comes next
        self._pushed = 0  # characters
        self._block = 0  # characters up to the end of the block, its tags included, once it is closed

    @property
    def in_reasoning(self) -> bool:
        """Whether a think block is open."""
        return self._state == "reasoning"

    @property
    def length(self) -> int:
        """Characters of text in the think block so far, tags included: a token that begins before it is
        reasoning."""
        return self._pushed if self.in_reasoning else self._block

    def push(self, text: str) -> Part:
        """Split the next piece of text."""
        self._pushed += len(text)
        text, self._held = self._held + text, ""
        reasoning = content = ""
        if self._state == "start":
            text = self._start(text)
        if self._state == "reasoning":
            reasoning, text = self._reason(text)
        if self._state == "content":
            content = self._trimmed(text)
        return Part(reasoning, content)

    def finish(self) -> Part:
        """What was withheld because it could have become a tag."""
        held, self._held = self._held, ""
        if self._state == "reasoning":
            return Part(self._blank + held if held else "", "")
        return Part("", held)

    def _start(self, text: str) -> str:
        head = text.lstrip()
        if head.startswith(OPEN):
            self._state, self._trim = "reasoning", True
            return head[len(OPEN) :]
        if OPEN.startswith(head):
            self._held = text
            return ""
        self._state = "content"
        return text

    def _reason(self, text: str) -> tuple[str, str]:
        if self._may_open:
            head = text.lstrip()
            if head.startswith(OPEN):
                text, self._may_open = head[len(OPEN) :], False
            elif OPEN.startswith(head):
                self._held = text
                return "", ""
            else:
                self._may_open = False
        end = text.find(CLOSE)
        if end >= 0:
            reasoning, rest = self._trimmed(text[:end]).rstrip(), text[end + len(CLOSE) :]
            reasoning = self._blank + reasoning if reasoning else ""
            self._state, self._trim, self._blank = "content", True, ""
            self._block = self._pushed - len(rest)
            return reasoning, rest
        keep = pending_suffix(text, (CLOSE,))
        self._held = text[len(text) - keep :]
        body = self._trimmed(text[: len(text) - keep])
        solid = body.rstrip()
        if not solid:
            self._blank += body
            return "", ""
        solid, self._blank = self._blank + solid, body[len(solid) :]
        return solid, ""

    def _trimmed(self, text: str) -> str:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text


def split_reasoning(text: str, *, started: bool = False) -> Part:
    """Split a whole text at once."""
    splitter = ReasoningSplitter(started=started)
    first, rest = splitter.push(text), splitter.finish()
    return Part(first.reasoning + rest.reasoning, first.content + rest.content)


@dataclass(frozen=True)
class Preset:
    """Recommended sampling; ``words`` are looked for in the model's name, lower case, without separators."""

    words: tuple[str, ...]
    temperature: float
    top_p: float
    top_k: int = 0
    min_p: float = 0.0


# From the model cards: deepseek-ai/DeepSeek-R1 (usage recommendations), Qwen/QwQ-32B, Qwen/Qwen3-8B (best
# practices), HuggingFaceTB/SmolLM2-1.7B-Instruct. The 135M model is too unsure of itself to be sampled:
# even at the card's 0.2 many an answer to a plain question opens with a token that leads nowhere.
PRESETS = (
    Preset(("smollm2135m",), 0.0, 1.0),
    Preset(("smollm2",), 0.2, 0.9),
    Preset(("deepseekr1",), 0.6, 0.95),
    Preset(("qwq",), 0.6, 0.95, top_k=40),
    Preset(("qwen3",), 0.6, 0.95, top_k=20),
)


def preset_for(name: str) -> Preset | None:
    """The recommended sampling of a model by its name, None where there is none."""
    plain = "".join(character for character in name.lower() if character.isalnum())
    return next((preset for preset in PRESETS if any(word in plain for word in preset.words)), None)
