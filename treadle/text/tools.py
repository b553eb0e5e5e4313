"""Tool calls in a model's output, recognised while it streams.

Arguments are passed on as the model spelled them, so the fragments of a stream join to exactly the string
that an answer in one piece holds.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum

from treadle.text.detokenizer import pending_suffix
from treadle.text.tokenizer import Tokenizer


class ToolFormat(Enum):
    """How a family of models writes calls; the values are the marks that begin them."""

    HERMES = ("<tool_call>",)  # <tool_call>{"name": …, "arguments": {…}}</tool_call>; also Qwen2.5 and Qwen3
    DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    LLAMA3 = ("<|python_tag|>",)  # or an answer that is one JSON object: {"name": …, "parameters": {…}}
    MISTRAL = ("[TOOL_CALLS]",)  # [TOOL_CALLS][{"name": …, "arguments": {…}}, …] or [TOOL_CALLS]name[ARGS]{…}

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that begin a call."""
        marks: tuple[str, ...] = self.value
        return marks


_ENDS = {
    ToolFormat.HERMES: ("</tool_call>",),
    ToolFormat.DEEPSEEK: ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ToolFormat.LLAMA3: (";",),
    ToolFormat.MISTRAL: (),
}
_SEP = "<｜tool▁sep｜>"
_FIELDS = frozenset(("name", "arguments", "parameters", "type", "id"))


@dataclass
class ToolDelta:
    """A piece of call number ``index``: first with ``id`` and ``name``, then with fragments of
    ``arguments``."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


Parts = list[str | ToolDelta]  # of a message, in the order in which the model wrote them: content and calls


def tool_format(template: str | None) -> ToolFormat | None:
    """The format that a chat template teaches its model; None where it knows no tools, or a format not
    supported."""
    source = template or ""
    if "<tool_call>" in source and "<function=" not in source and "<arg_key>" not in source:
        return ToolFormat.HERMES
    if "<｜tool▁call▁begin｜>" in source:
        return ToolFormat.DEEPSEEK
    if "[TOOL_CALLS]" in source:
        return ToolFormat.MISTRAL
    if "<|start_header_id|>" in source and "tool" in source and "parameters" in source:
        return ToolFormat.LLAMA3
    return None


def mark_ids(tokenizer: Tokenizer, format: ToolFormat | None) -> frozenset[int]:
    """Ids of the tokens that a detokenizer must show for the calls to be recognised (its ``keep``)."""
    if format is None:
        return frozenset()
    texts = (*format.marks, *_ENDS[format], _SEP, "[ARGS]", "[CALL_ID]")
    return frozenset(id for text in texts if (id := tokenizer.token_id(text)) is not None)


class _NotACall(Exception):
    pass


_Reader = Generator[None, str, str]  # takes characters; returns those it did not need


class ToolParser:
    """One per choice. ``push`` for every piece of answer text (without reasoning), then ``finish`` once.

    single: the first call ends the answer: ``done`` is set, and what follows is left out.
    """

    def __init__(self, format: ToolFormat, *, single: bool = False) -> None:
        self.count = 0  # calls so far
        self.done = False
        self.in_call = False  # the text so far ends inside a call: before its arguments are complete
        self._format = format
        self._single = single
        self._marks = format.marks + _ENDS[format] if format is not ToolFormat.LLAMA3 else format.marks
        self._bare = (
            format is ToolFormat.LLAMA3
        )  # nothing but blanks so far: the answer may be one JSON object
        self._after_call = False
        self._text = ""
        self._raw = ""  # of the call being read, as long as it may turn out to be none
        self._reader: _Reader | None = None
        self._parts: Parts = []

    def push(self, text: str) -> Parts:
        """Content and fragments of calls in the next piece of text."""
        self._parts = []
        self._text += text
        while self._text and not self.done:
            if self._reader is not None:
                self._read()
            elif not self._scan():
                break
        return self._parts

    def finish(self) -> Parts:
        """The rest. A call that was cut off before its name is complete comes out as content."""
        self._parts = []
        if self.done:
            return self._parts
        if self._reader is not None:
            self._reader.close()
            self._reader = None
            if self.in_call:
                self._write(self._raw)
        elif not (self._after_call and self._is_end_start(self._text.strip())):
            self._write(self._text)
        self._text = self._raw = ""
        return self._parts

    def _write(self, content: str) -> None:
        if self._parts and isinstance(last := self._parts[-1], str):
            self._parts[-1] = last + content
        elif content:
            self._parts.append(content)

    def _scan(self) -> bool:
        """Pass on content up to the next mark; False when more text is needed."""
        if self._bare or self._after_call:
            head = self._text.lstrip()
            if not head:
                return False
            if self._format is ToolFormat.LLAMA3 and head[0] == "{":
                self._text = head
                self._begin(None)
                return True
            if self._format is ToolFormat.LLAMA3 and self._after_call and head[0] == ";":
                self._text = head[1:]
                return True
            if self._after_call and not self._is_mark_start(head):
                self._after_call = False
            elif self._after_call:
                if not head.startswith(self._marks):
                    return False
                self._text = head
            self._bare = self._bare and self._is_mark_start(head)
        found = [(at, mark) for mark in self._marks if (at := self._text.find(mark)) >= 0]
        if not found:
            keep = pending_suffix(self._text, self._marks)
            self._write(self._text[: len(self._text) - keep])
            self._text = self._text[len(self._text) - keep :]
            return False
        at, mark = min(found)
        if mark in _ENDS[self._format] and not self.count:
            self._write(self._text[: at + len(mark)])
            self._text = self._text[at + len(mark) :]
            return True
        self._write(self._text[:at])
        self._text = self._text[at + len(mark) :]
        if mark in _ENDS[self._format] or mark == "<｜tool▁calls▁begin｜>":
            self._after_call = True
        else:
            self._begin(mark)
        return True

    def _is_mark_start(self, head: str) -> bool:
        return any(head.startswith(mark) or mark.startswith(head) for mark in self._marks)

    def _is_end_start(self, head: str) -> bool:
        return not head or any(end.startswith(head) for end in _ENDS[self._format])

    def _begin(self, mark: str | None) -> None:
        self.in_call = True
        self._raw = mark or ""
        self._bare = False
        if self._format is ToolFormat.DEEPSEEK:
            self._reader = self._deepseek()
        elif self._format is ToolFormat.MISTRAL:
            self._reader = self._mistral()
        else:
            self._reader = self._object(only_known_fields=mark is None)
        next(self._reader)

    def _read(self) -> None:
        reader = self._reader
        assert reader is not None
        for index, character in enumerate(self._text):
            self._raw += character
            try:
                reader.send(character)
            except StopIteration as stop:
                self._over(stop.value + self._text[index + 1 :])
                return
            except _NotACall:
                if self.in_call:
                    self._write(self._raw)
                    self._text = self._text[index + 1 :]
                    self._raw, self._reader, self.in_call = "", None, False
                else:  # the arguments are complete, but not what they are wrapped in
                    self._over(self._raw + self._text[index + 1 :])
                return
        self._text = ""

    def _over(self, rest: str) -> None:
        """The call being read ends; ``rest`` comes after it."""
        self._text = rest
        self._raw, self._reader, self._after_call, self.in_call = "", None, True, False
        self.done = self._single and self.count > 0

    def _announce(self, name: str, id: str | None = None) -> None:
        if not name:
            raise _NotACall
        id = id or (
            secrets.token_hex(5)[:9]
            if self._format is ToolFormat.MISTRAL
            else "call_" + secrets.token_hex(12)
        )
        self._parts.append(ToolDelta(self.count, id, name))
        self.count += 1

    def _argue(self, text: str) -> None:
        """Arguments of the newest call. From here on the text is known to be a call."""
        self._raw = ""
        if text:
            last = self._parts[-1] if self._parts else None
            if isinstance(last, ToolDelta) and last.index == self.count - 1:
                last.arguments += text
            else:
                self._parts.append(ToolDelta(self.count - 1, arguments=text))

    def _object(self, *, only_known_fields: bool = False) -> _Reader:
        """``{"name": …, "arguments": …}`` in any order of the fields."""
        character = yield from _after_blanks()
        return (yield from self._fields(character, only_known_fields))

    def _fields(self, character: str, only_known_fields: bool = False) -> _Reader:
        if character != "{":
            raise _NotACall
        name = id = early = None
        announced = False
        while True:
            character = yield from _after_blanks()
            if character == ",":
                continue
            if character == "}":
                break
            if character != '"':
                raise _NotACall
            key = _loads(character + (yield from _string()))
            if only_known_fields and key not in _FIELDS:
                raise _NotACall
            if (yield from _after_blanks()) != ":":
                raise _NotACall
            character = yield from _after_blanks()
            live = key in ("arguments", "parameters") and name is not None and character in "{["
            if live and name is not None and not announced:
                self._announce(name, id)
                announced = True
            value, rest = yield from self._value(character, live)
            if key == "name":
                loaded = _loads(value)
                name = loaded if isinstance(loaded, str) else None
            elif key == "id" and value.startswith('"'):
                id = str(_loads(value))
            elif key in ("arguments", "parameters") and not live:
                early = str(_loads(value)) if value.startswith('"') else "{}" if value == "null" else value
            if rest == "}":
                break
            if rest.strip(", \t\r\n"):
                raise _NotACall
        if name is None or (only_known_fields and early is None and not announced):
            raise _NotACall
        if not announced:
            self._announce(name, id)
            self._argue(early if early is not None else "{}")
            self.in_call = False
        return ""

    def _value(self, character: str, live: bool) -> Generator[None, str, tuple[str, str]]:
        """One JSON value and the character after it, if that had to be read. ``live``: passed on as it
        comes."""
        if character == '"':
            return character + (yield from _string()), ""
        parts = [character]
        if character not in "{[":
            while (character := (yield)) not in ",}] \t\r\n":
                parts.append(character)
            return "".join(parts), character
        if live:
            self._argue(character)
        depth, quoted, escaped = 1, False, False
        while depth:
            character = yield
            parts.append(character)
            if live:
                self._argue(character)
            if quoted:
                quoted = escaped or character != '"'
                escaped = character == "\\" and not escaped
            elif character == '"':
                quoted = True
            else:
                depth += (character in "{[") - (character in "}]")
        self.in_call = self.in_call and not live
        return "".join(parts), ""

    def _deepseek(self) -> _Reader:
        """R1 and V3: type, separator, name, fenced JSON; V3.1: name, separator, JSON."""
        head = ""
        while not head.endswith(_SEP):
            head += yield
        head = head[: -len(_SEP)].strip()
        character = yield from _after_blanks()
        name = head
        if character != "{":
            name = character
            while (character := (yield)) != "\n":
                name += character
            while (character := (yield)) != "{":
                pass
        self._announce(name.strip())
        yield from self._value(character, True)
        character = yield from _after_blanks()
        while character == "`":
            character = yield
        return character

    def _mistral(self) -> _Reader:
        character = yield from _after_blanks()
        if character == "[":
            while (character := (yield from _after_blanks())) != "]":
                if character != ",":
                    self._raw, self.in_call = character, True
                    yield from self._fields(character)
                    if self._single:
                        return ""
            return ""
        if character == "{":
            return (yield from self._fields(character))
        name = character
        while (character := (yield)) != "{":
            name += character
        name, _, id = name.removesuffix("[ARGS]").partition("[CALL_ID]")
        self._announce(name.strip(), id.strip() or None)
        yield from self._value(character, True)
        return ""


def _after_blanks() -> Generator[None, str, str]:
    while True:
        character = yield
        if not character.isspace():
            return character


def _string() -> Generator[None, str, str]:
    """The rest of a JSON string whose opening quote was read, with its closing quote."""
    parts: list[str] = []
    escaped = False
    while True:
        character = yield
        parts.append(character)
        if character == '"' and not escaped:
            return "".join(parts)
        escaped = character == "\\" and not escaped


def _loads(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except ValueError:
        raise _NotACall from None
