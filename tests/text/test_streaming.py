"""Detokenizer, reasoning splitter and tool parsers give the same in pieces as at once."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.text import (
    Detokenizer,
    Part,
    ReasoningSplitter,
    Tokenizer,
    ToolDelta,
    ToolFormat,
    ToolParser,
    mark_ids,
    preset_for,
    split_reasoning,
    tool_format,
)


@given(st.text(), st.lists(st.text("ab <>é", min_size=1, max_size=4), max_size=4), st.booleans())
def test_tokens_one_by_one(smol: Tokenizer, text: str, stop: list[str], include: bool) -> None:
    ids = smol.encode(text)
    whole = smol.decode(ids)
    ends = [(whole.find(s) + len(s), whole.find(s), s) for s in stop if s in whole]
    expected = whole
    if ends:
        end, start, _ = min(ends)
        expected = whole[:end] if include else whole[:start]
    for size in (1, 3, len(ids) + 1):
        detokenizer = Detokenizer(smol, stop, include_stop=include)
        parts = [detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)]
        assert not any("\ufffd" in part for part in parts) or "\ufffd" in whole
        assert "".join(parts) + detokenizer.finish() == expected
        assert detokenizer.stopped == (min(ends)[2] if ends else None)


def test_every_character_byte_by_byte(smol: Tokenizer) -> None:
    bytes_ = {smol.token_bytes(id): id for id in range(smol.vocab_size) if len(smol.token_bytes(id)) == 1}
    for code in [*range(0x80, 0x3000, 7), *range(0x3000, 0xD800, 97), *range(0xE000, 0x110000, 997)]:
        encoded = [bytes_.get(bytes([byte])) for byte in chr(code).encode()]
        if None in encoded:  # a byte that this vocabulary cannot spell
            continue
        detokenizer = Detokenizer(smol)
        parts = [detokenizer.push([id]) for id in encoded if id is not None]
        assert parts == [""] * (len(encoded) - 1) + [chr(code)]
        assert detokenizer.finish() == ""


def test_incomplete_character_is_flushed_once(smol: Tokenizer) -> None:
    ids = smol.encode("ok 😸")
    detokenizer = Detokenizer(smol)
    text = detokenizer.push(ids[:-1])
    assert "\ufffd" not in text
    assert detokenizer.finish() == "\ufffd" and detokenizer.finish() == ""


def test_text_without_a_possible_stop_is_not_held_back(smol: Tokenizer) -> None:
    detokenizer = Detokenizer(smol, ["beta gamma"])
    seen = [detokenizer.push([id]) for id in smol.encode("alpha beta gamma delta")]
    assert "".join(seen) == "alpha " and detokenizer.stopped == "beta gamma"


def test_offsets_count_characters(smol: Tokenizer) -> None:
    ids = smol.encode("Hello 世界 x")
    detokenizer = Detokenizer(smol, ["zzz"])
    detokenizer.push(ids)
    assert len(detokenizer.offsets) == len(ids)
    assert detokenizer.offsets == sorted(detokenizer.offsets) and detokenizer.offsets[-1] == len("Hello 世界")


def test_specials(smol: Tokenizer) -> None:
    assert Detokenizer(smol).push([1, 2]) == ""
    assert Detokenizer(smol, skip_specials=False).push([2]) == "<|im_end|>"
    assert Detokenizer(smol, keep=frozenset((2,))).push([1, 2]) == "<|im_end|>"


@pytest.mark.parametrize(
    ("text", "started", "expected"),
    [
        ("a</think>b<think>c</think>d", True, Part("a", "b<think>c</think>d")),
        ("<think>a</think>b<think>c</think>d", False, Part("a", "b<think>c</think>d")),
        ("<think>\na\n\n b\n</think>\n\nanswer\n", False, Part("a\n\n b", "answer\n")),
        ("<think>\nagain\n</think>\n\nx", True, Part("again", "x")),
        ("plain <think>no</think>", False, Part("", "plain <think>no</think>")),
        ("\n\n</think>\n\nx", True, Part("", "x")),
        ("cut off in thou", True, Part("cut off in thou", "")),
        ("cut off </thi", True, Part("cut off </thi", "")),
        ("<thi", False, Part("", "<thi")),
    ],
)
def test_reasoning(text: str, started: bool, expected: Part) -> None:
    assert split_reasoning(text, started=started) == expected


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<th", "a", "\n", " ", "</", "b"])).map("".join),
    st.booleans(),
)
def test_reasoning_character_by_character(text: str, started: bool) -> None:
    splitter = ReasoningSplitter(started=started)
    parts = [*map(splitter.push, text), splitter.finish()]
    joined = Part("".join(part.reasoning for part in parts), "".join(part.content for part in parts))
    assert joined == split_reasoning(text, started=started)
    seen_content = False
    for part in parts:
        assert not (seen_content and part.reasoning)
        seen_content = seen_content or bool(part.content)


def test_raw_keeps_the_tags() -> None:
    splitter = ReasoningSplitter(started=True, raw=True)
    assert splitter.push("a</think>b") == Part("", "a</think>b")


def test_presets() -> None:
    r1, qwen3 = preset_for("DeepSeek R1 Distill Qwen 7B"), preset_for("Qwen3-8B")
    assert r1 and (r1.temperature, r1.top_p) == (0.6, 0.95)
    assert qwen3 and qwen3.top_k == 20
    assert preset_for("Llama-3-8B") is None
    smallest = preset_for("smollm2-135m-instruct")
    assert smallest is not None and smallest.temperature == 0


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.sampled_from(['"}', "\\", "</tool_call>x"[:5], "北京", "]}{["]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(["f", "get_weather"]), st.dictionaries(st.text(max_size=5), JSON)),
    min_size=1,
    max_size=3,
)


def _write(format: ToolFormat, name: str, arguments: str) -> str:
    return {
        ToolFormat.HERMES: f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>\n',
        ToolFormat.DEEPSEEK: "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        f"{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>\n",
        ToolFormat.LLAMA3: f'{{"name": "{name}", "parameters": {arguments}}}; ',
        ToolFormat.MISTRAL: f'{{"name": "{name}", "arguments": {arguments}}}, ',
    }[format]


def _parts(format: ToolFormat, pieces: list[str]) -> list[str | tuple[str, str]]:
    """Content, and calls as (name, arguments), in their order."""
    parser = ToolParser(format)
    found: list[str | tuple[str, str]] = []
    at: dict[int, int] = {}  # where the calls are in ``found``
    ids: set[str | None] = set()
    for part in [*(part for piece in pieces for part in parser.push(piece)), *parser.finish()]:
        if isinstance(part, ToolDelta):
            if part.name is not None:
                assert part.index == len(at) and part.id not in ids
                ids.add(part.id)
                at[part.index] = len(found)
                found.append((part.name, ""))
            assert at[part.index] == len(found) - 1  # nothing has come in between
            call = found[-1]
            assert not isinstance(call, str)
            found[-1] = (call[0], call[1] + part.arguments)
        elif found and isinstance(last := found[-1], str):
            found[-1] = last + part
        else:
            assert part
            found.append(part)
    assert parser.count == len(at)
    return found


def _read(format: ToolFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parts = _parts(format, pieces)
    content = "".join(part for part in parts if isinstance(part, str))
    return content, [part for part in parts if not isinstance(part, str)]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_content_and_calls_keep_their_order(size: int) -> None:
    one, two = ("f", '{"a": {"b": 1}}'), ("g", "{}")
    text = "One. " + _write(ToolFormat.HERMES, *one) + "Two. " + _write(ToolFormat.HERMES, *two) + "Three."
    text += "\n<tool_call>none"
    parts = _parts(ToolFormat.HERMES, [text[at : at + size] for at in range(0, len(text), size)])
    assert parts == ["One. ", one, "\nTwo. ", two, "\nThree.\n<tool_call>none"]


@pytest.mark.parametrize("format", ToolFormat)
@given(calls=CALLS, ascii_only=st.booleans(), size=st.integers(1, 40))
def test_tool_calls_in_pieces(
    format: ToolFormat, calls: list[tuple[str, dict[str, object]]], ascii_only: bool, size: int
) -> None:
    written = [(name, json.dumps(arguments, ensure_ascii=ascii_only)) for name, arguments in calls]
    text = "".join(_write(format, *call) for call in written)
    if format is ToolFormat.DEEPSEEK:
        text = f"<｜tool▁calls▁begin｜>{text}<｜tool▁calls▁end｜>"
    if format is ToolFormat.MISTRAL:
        text = f"[TOOL_CALLS][{text.removesuffix(', ')}]"
    assert _read(format, [text]) == ("", written) if format is not ToolFormat.LLAMA3 else True
    content, got = _read(format, [text[at : at + size] for at in range(0, len(text), size)])
    assert got == written and not content.strip("; ")


@pytest.mark.parametrize(
    ("format", "text", "content", "calls"),
    [
        (
            ToolFormat.HERMES,
            'I will look.\n<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
            "I will look.\n",
            [("f", '{"a": 1}')],
        ),
        (
            ToolFormat.HERMES,
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
            "",
            [("f", '{"a": 1}')],
        ),
        (ToolFormat.HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        (ToolFormat.HERMES, "say <tool_call>not json", "say <tool_call>not json", []),
        (ToolFormat.HERMES, '<tool_call>{"na', '<tool_call>{"na', []),
        (ToolFormat.HERMES, "a < b <tool", "a < b <tool", []),
        (ToolFormat.HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x', "", [("f", '{"a": "x')]),
        (
            ToolFormat.DEEPSEEK,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
            '{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "",
            [("f", '{"a": 1}')],
        ),
        (ToolFormat.LLAMA3, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        (ToolFormat.LLAMA3, '{"city": "Paris"}', '{"city": "Paris"}', []),
        (
            ToolFormat.LLAMA3,
            'Here: {"name": "f", "parameters": {}}',
            'Here: {"name": "f", "parameters": {}}',
            [],
        ),
        (ToolFormat.MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
        (
            ToolFormat.MISTRAL,
            '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "123456789"}]',
            "",
            [("f", "{}")],
        ),
    ],
)
def test_tool_call_shapes(format: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert _read(format, [text]) == (content, calls)
    assert _read(format, list(text)) == (content, calls)


_HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
    '```json\n{"a": "x"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
_LLAMA3 = '{"name": "f", "parameters": {"a": "x"}};'
_MISTRAL = '[TOOL_CALLS][{"name": "f", "arguments": {"a": "x"}}]'


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (ToolFormat.HERMES, _HERMES),
        (ToolFormat.DEEPSEEK, _DEEPSEEK),
        (ToolFormat.LLAMA3, _LLAMA3),
        (ToolFormat.MISTRAL, _MISTRAL),
    ],
)
def test_a_call_that_is_cut_anywhere(format: ToolFormat, text: str) -> None:
    whole = '{"a": "x"}'
    opened, complete = text.index(whole), text.index(whole) + len(whole)
    for end in range(1, len(text) + 1):
        for pieces in ([text[:end]], list(text[:end])):
            parser = ToolParser(format)
            for piece in pieces:
                parser.push(piece)
            parser.finish()
            content, calls = _read(format, pieces)
            if end <= opened:
                assert not calls and text[:end].endswith(content)
            else:
                assert (content, calls) == ("", [("f", text[opened : min(end, complete)])])
                assert parser.in_call == (end < complete)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (_HERMES + "\n</tool", [("f", '{"a": "x"}')]),
        (_HERMES.removesuffix("}\n</tool_call>") + "</tool_call>", [("f", '{"a": "x"}')]),
        (_HERMES + "\n</tools", [("f", '{"a": "x"}'), "\n</tools"]),
        (_HERMES + " a </tool", [("f", '{"a": "x"}'), " a </tool"]),
        (_HERMES + "\n<tool_call>", [("f", '{"a": "x"}'), "<tool_call>"]),
    ],
)
def test_marks_right_after_a_call_are_no_content(text: str, expected: list[str | tuple[str, str]]) -> None:
    assert _parts(ToolFormat.HERMES, [text]) == expected
    assert _parts(ToolFormat.HERMES, list(text)) == expected


def test_format_is_chosen_by_the_template(r1: Tokenizer, smol: Tokenizer) -> None:
    assert tool_format(r1.chat_template) is ToolFormat.DEEPSEEK
    assert tool_format(smol.chat_template) is None
    assert tool_format("… <tool_call> …") is ToolFormat.HERMES
    assert 151657 in mark_ids(r1, ToolFormat.HERMES)


@pytest.mark.parametrize("step", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "started"), [(" ab c\n</think>\n\nhi", True), (" <think>ab</think>hi", False)]
)
def test_length_of_a_think_block(text: str, started: bool, step: int) -> None:
    splitter = ReasoningSplitter(started=started)
    for start in range(0, len(text), step):
        splitter.push(text[start : start + step])
    assert splitter.length == text.index("</think>") + len("</think>")
