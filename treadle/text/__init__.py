"""Text in, text out: tokenizer, chat template, detokenizer, reasoning and tool calls."""

from treadle.text.chat import ChatTemplate, Prompt, render_chat
from treadle.text.detokenizer import Detokenizer
from treadle.text.reasoning import PRESETS, Part, Preset, ReasoningSplitter, preset_for, split_reasoning
from treadle.text.tokenizer import Tokenizer
from treadle.text.tools import ToolDelta, ToolFormat, ToolParser, mark_ids, tool_format

__all__ = [
    "PRESETS",
    "ChatTemplate",
    "Detokenizer",
    "Part",
    "Preset",
    "Prompt",
    "ReasoningSplitter",
    "Tokenizer",
    "ToolDelta",
    "ToolFormat",
    "ToolParser",
    "mark_ids",
    "preset_for",
    "render_chat",
    "split_reasoning",
    "tool_format",
]
