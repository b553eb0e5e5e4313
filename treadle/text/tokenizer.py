"""Text to token ids and back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from treadle.core import TreadleError
from treadle.text.from_directory import vocabulary_from_directory
from treadle.text.from_gguf import vocabulary_from_gguf
from treadle.text.vocabulary import THINK_TAGS, Kind, Vocabulary

_LONG = 4096  # characters
_HIDDEN = (Kind.CONTROL, Kind.UNKNOWN)  # left out of shown text


class Tokenizer:
    """Encodes and decodes for one model; safe to share between threads.

    Ids equal those of the model's Hugging Face tokenizer. Unlike there, text never becomes a control token
    unless the caller asks for it with ``specials=True``: the control tokens are not even known to the encoder
    of plain text.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._v = vocabulary
        self._bytes: list[bytes | None] = [None] * len(vocabulary.tokens)
        self._pattern = _control_pattern(vocabulary)
        self._controls = {control.id: control for control in vocabulary.controls.values()}
        self._special = frozenset(
            {id for id, kind in enumerate(vocabulary.kinds) if kind != 1 and kind in _HIDDEN}
            | {id for id, control in self._controls.items() if control.special}
        )
        self.bos_id: int | None = vocabulary.bos_id
        self.adds_bos: bool = vocabulary.adds_bos
        self.eos_id: int | None = vocabulary.eos_id
        self.adds_eos: bool = vocabulary.adds_eos
        self.eos_ids: frozenset[int] = frozenset(vocabulary.eos_ids)
        self.chat_template: str | None = vocabulary.chat_template
        self.template_variables: Mapping[str, str] = vocabulary.template_variables
        self.family: str = vocabulary.family
        self.name: str = vocabulary.name

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the metadata of a GGUF file. Raises TreadleError naming the key that is missing or wrong."""
        return cls(vocabulary_from_gguf(metadata))

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """From ``tokenizer.json`` and its neighbours. Raises TreadleError naming the file that is wrong."""
        return cls(vocabulary_from_directory(Path(directory)))

    @property
    def vocab_size(self) -> int:
        """Number of token ids, unused ones included."""
        return len(self._v.tokens)

    @property
    def control_texts(self) -> frozenset[str]:
        """Spellings of the tokens that only the program may write."""
        return frozenset(self._v.controls)

    def encode(self, text: str, *, specials: bool = False, add_bos: bool = False) -> list[int]:
        """Token ids of ``text``.

        specials: spellings of control tokens become those tokens; only for text that no user wrote.
        add_bos: put BOS first if the model's metadata asks for it and ``text`` does not start with it
        already.
        """
        pieces = self.split(text) if specials else [text]
        ids = self.encode_pieces(pieces)
        if add_bos and self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_whole(self, text: str) -> list[int]:
        """Token ids of a text that is read to its end, not continued: with BOS and EOS if the model's
        metadata asks for them.
        """
        ids = self.encode(text, add_bos=True)
        if self.adds_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        return ids

    def split(self, text: str) -> list[str | int]:
        """Cut text at the spellings of control tokens: strings of plain text and ids in between."""
        if self._pattern is None:
            return [text]
        pieces: list[str | int] = []
        end = 0
        for match in self._pattern.finditer(text):
            if match.start() > end:
                pieces.append(text[end : match.start()])
            pieces.append(self._v.controls[next(group for group in match.groups() if group is not None)].id)
            end = match.end()
        if end < len(text):
            pieces.append(text[end:])
        return pieces

    def encode_pieces(self, pieces: Iterable[str | int]) -> list[int]:
        """Ids of plain texts and of the control tokens between them."""
        ids: list[int] = []
        backend = self._v.backend
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            elif piece:
                try:
                    if len(piece) < _LONG:
                        encoding = backend.encode(piece, add_special_tokens=False)
                    else:  # only this call lets other threads run meanwhile
                        encoding = backend.encode_batch_fast([piece], add_special_tokens=False)[0]
                    ids.extend(encoding.ids)
                except (TypeError, UnicodeEncodeError):  # what the library says of a lone surrogate
                    raise TreadleError(
                        "the text holds half of a surrogate pair, which is not a character"
                    ) from None
            backend = self._v.backend_inside or backend
        return ids

    def decode(self, ids: Iterable[int], skip_specials: bool = True) -> str:
        """Text of ``ids``; invalid UTF-8 becomes U+FFFD. A space that encoding had put first is taken
        away."""
        kept = [id for id in ids if not (skip_specials and id in self._special)]
        text = b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")
        return text[1:] if self._v.space_prefix and text.startswith(" ") else text

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token stands for: not always whole characters, empty for unused ids. Raises
        IndexError."""
        if id < 0:
            raise IndexError(f"token id {id} is negative")
        data = self._bytes[id]
        if data is None:
            data = self._bytes[id] = self._token_bytes(id)
        return data

    def _token_bytes(self, id: int) -> bytes:
        text, kind = self._v.tokens[id], self._v.kinds[id]
        if kind == Kind.UNUSED:
            return b""
        if id in self._controls or kind in _HIDDEN:
            return text.encode()
        if kind == Kind.BYTE:
            return bytes([int(text[3:5], 16)])
        if not self._v.byte_level:
            return text.replace("▁", " ").encode()
        table = _byte_alphabet()
        try:
            return bytes([table[character] for character in text])
        except KeyError:  # an added token, spelled as itself
            return text.encode()

    def token_id(self, text: str) -> int | None:
        """Id of a control token by its spelling."""
        control = self._v.controls.get(text)
        return control.id if control else None

    def is_special(self, id: int) -> bool:
        """Whether ``skip_specials`` leaves this token out."""
        return id in self._special

    def special_text(self, id: int) -> str:
        """Spelling of a token as the vocabulary has it. Raises IndexError."""
        return self._v.tokens[id]


def think_ids(tokenizer: Tokenizer) -> tuple[int | None, int | None]:
    """Ids of ``<think>`` and ``</think>`` where they are tokens of their own."""
    return tokenizer.token_id(THINK_TAGS[0]), tokenizer.token_id(THINK_TAGS[1])


def _control_pattern(vocabulary: Vocabulary) -> re.Pattern[str] | None:
    """Matches any control token, the longest first, with the blanks that it takes with it."""
    plain: list[str] = []
    greedy: list[str] = []
    for text, control in sorted(vocabulary.controls.items(), key=lambda item: -len(item[0])):
        if not text:
            continue
        if control.lstrip or control.rstrip:
            before, after = r"\s*" * control.lstrip, r"\s*" * control.rstrip
            greedy.append(f"{before}({re.escape(text)}){after}")
        else:
            plain.append(re.escape(text))
    parts = greedy + (["(" + "|".join(plain) + ")"] if plain else [])
    return re.compile("|".join(parts)) if parts else None


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for every byte, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table
