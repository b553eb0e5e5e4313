"""Conversations to prompts, by the model's own chat template."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.core import TreadleError
from treadle.text.messages import CALL_STYLES, CallStyle, normalise
from treadle.text.reasoning import CLOSE, OPEN
from treadle.text.sandbox import Template
from treadle.text.shield import Shield
from treadle.text.tokenizer import Tokenizer
from treadle.text.toolprompt import instructions, listed, told, with_place
from treadle.text.tools import ToolFormat, tool_format
from treadle.text.vocabulary import THINK_TAGS

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
_R1_ASSISTANT = "<｜Assistant｜>"
_EMPTY_THOUGHT = f"{OPEN}\n\n{CLOSE}\n\n"
_PROBE = "probe_of_tools"
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": _PROBE, "description": _PROBE, "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation. ``in_reasoning``: it ends inside a think block, so the answer starts in
    one."""

    text: str
    ids: list[int]
    in_reasoning: bool


class ChatTemplate:
    """Renders conversations for one model.

    Equals ``apply_chat_template`` of Hugging Face for the same messages, except that what users wrote never
    becomes a control token, that reasoning in past turns is given to the template apart from the answer, that
    tools are told in words where the template does not know them, and that DeepSeek-R1's older template gets
    its think block opened (``force_thinking``; a request switches it with ``enable_thinking``). Raises
    TreadleError for a template that cannot be compiled, or where the model has none and no ChatML tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, source: str | None = None, *, force_thinking: bool = True
    ) -> None:
        source = source or tokenizer.chat_template
        if source is None:
            if not {"<|im_start|>", "<|im_end|>"} <= tokenizer.control_texts:
                raise TreadleError(
                    "this model has no chat template; use text completion, or give a template file"
                )
            source = _CHATML
        self.source = source
        self._tokenizer = tokenizer
        self._template = Template(source)
        self._force_thinking = force_thinking
        self._is_r1 = _R1_ASSISTANT in source and CLOSE in source and "thinking" not in source
        self._spellings = sorted(tokenizer.control_texts | set(THINK_TAGS))
        style = self._call_style()
        self._calls = style or CallStyle(False, "")
        self._knows_history = style is not None
        self._format = tool_format(source) or ToolFormat.HERMES
        self._teach_in: str | None = None  # role of the message that tells about tools
        self.tools = self._tools()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> Prompt:
        """The prompt for ``messages`` (OpenAI's shape; ``tools`` likewise).

        continue_final_message: the last message, an assistant's, is left open for the model to go on with.
        template_kwargs: further variables of the template. Raises TreadleError naming the message at fault,
        or with the template's own message.
        """
        if reserved := _RESERVED & template_kwargs.keys():
            raise TreadleError(f"chat_template_kwargs: {sorted(reserved)[0]!r} cannot be set there")
        chat = normalise(messages, self.source, self._calls, keep_last=continue_final_message)
        if not self._knows_history:
            chat = list(told(chat, self._format))
        place = f"place{secrets.token_hex(8)}" if tools and self._teach_in else ""
        if place:
            chat = with_place(chat, place, self._teach_in or "")
        final = _Final(chat) if continue_final_message else None
        given = {
            "messages": chat,
            "tools": [dict(tool) for tool in tools] if tools else None,
            "documents": None,
            **template_kwargs,
        }
        fixed = {
            **self._tokenizer.template_variables,
            "add_generation_prompt": add_generation_prompt and final is None,
        }
        shield = Shield(self._spellings, [given, final.text if final else ""])
        text = self._template.render({**fixed, **shield.cover(given)})
        if shield.has_edges(given):
            # What the template takes apart and joins again could spell a control token anew, unless it meets
            # no edge character of the user's at all. That second rendering is taken wherever it makes no
            # other difference.
            thorough = Shield(self._spellings, [given, final.text if final else ""], thorough=True)
            again = self._template.render({**fixed, **thorough.cover(given)})
            if thorough.uncover(again) == shield.uncover(text):
                shield, text = thorough, again
        if place and tools:
            told_tools = instructions(self._format, shield.cover(listed(tools)))
            text = text.replace(place, told_tools, 1)
        if final is not None:
            text = final.complete(text, shield)
        elif add_generation_prompt and self._is_r1:
            text += self._thinking(text, template_kwargs.get("enable_thinking"))
        pieces = [p if isinstance(p, int) else shield.uncover(p) for p in self._tokenizer.split(text)]
        return Prompt(
            shield.uncover(text), self._tokenizer.encode_pieces(pieces), _in_reasoning(text, self._tokenizer)
        )

    def _thinking(self, text: str, enabled: bool | None) -> str:
        opened = text.rstrip().endswith(OPEN)
        if enabled is False:
            return f"\n{CLOSE}\n\n" if opened else _EMPTY_THOUGHT if text.endswith(_R1_ASSISTANT) else ""
        force = enabled or self._force_thinking
        return f"{OPEN}\n" if force and not opened and text.endswith(_R1_ASSISTANT) else ""

    def _tools(self) -> ToolFormat | None:
        """How the model writes calls; None if it cannot be told of tools, or writes them in a way of its
        own."""
        question = [{"role": "user", "content": "x"}]
        if self._shows(_PROBE, question, [_PROBE_TOOL]):
            return tool_format(self.source)
        for role in ("system", "user"):
            if self._shows(_PROBE, with_place(question, _PROBE, role), None):
                self._teach_in = role
                return self._format
        return None

    def _shows(self, text: str, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> bool:
        try:
            variables = {**self._tokenizer.template_variables, "messages": chat, "tools": tools}
            return text in self._template.render({**variables, "add_generation_prompt": True})
        except TreadleError:
            return False

    def _call_style(self) -> CallStyle | None:
        """How this template wants tool calls: the first form of a small example that it shows; None if it
        shows none, or no results."""
        for style in CALL_STYLES if "tool_calls" in self.source else ():
            arguments = {"probe": 1} if style.objects else '{"probe": 1}'
            call = {
                "id": "call00000",
                "type": "function",
                "function": {"name": "seek", "arguments": arguments},
            }
            chat = [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": style.empty_content, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call00000", "name": "seek", "content": _PROBE},
            ]
            try:
                text = self._template.render(
                    {**self._tokenizer.template_variables, "messages": chat, "tools": None}
                )
            except TreadleError:
                continue
            if "seek" in text and _PROBE in text and "'probe'" not in text and '\\"probe' not in text:
                return style
        return None


class _Final:
    """The open last message: rendered as a placeholder, then put in its place with everything after it cut
    off."""

    def __init__(self, chat: list[dict[str, Any]]) -> None:
        last = chat[-1]
        if last["role"] != "assistant" or last.get("tool_calls"):
            raise TreadleError(
                "continue_final_message: the last message must be an assistant's, without tool calls"
            )
        self.text: str = last["content"]
        body = self.text.strip()
        self._tail = self.text[len(self.text.rstrip()) :] if body else ""
        self._place = f"place{secrets.token_hex(8)}"
        lead = self.text[: len(self.text) - len(self.text.lstrip())]
        last["content"] = f"{lead}{self._place}{self._tail}"

    def complete(self, text: str, shield: Shield) -> str:
        before, found, after = text.rpartition(self._place)
        if not found:
            raise TreadleError(
                "continue_final_message: the model's chat template does not show the last message"
            )
        body = self.text.strip()
        if body.startswith(OPEN):
            before = before.removesuffix(_EMPTY_THOUGHT)
        # Think tags are real ones here: the caller goes on with the model's own words.
        blocks = [CLOSE.join(map(shield.cover, block.split(CLOSE))) for block in body.split(OPEN)]
        return before + OPEN.join(blocks) + (self._tail if after.startswith(self._tail) else "")


def _in_reasoning(text: str, tokenizer: Tokenizer) -> bool:
    """Whether a think block is open at the end of ``text``, whose users' tags are covered."""
    start = text.rfind(OPEN)
    if start < 0:
        return False
    rest = text[start + len(OPEN) :]
    return CLOSE not in rest and not any(isinstance(piece, int) for piece in tokenizer.split(rest))


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> Prompt:
    """``ChatTemplate(tokenizer).render(…)`` for a single conversation."""
    return ChatTemplate(tokenizer).render(messages, tools, **options)
