"""GGUF model files, checked beyond what the container format asks for.

The container (counts, lengths, types, offsets, tensor sizes) is checked by csrc/gguf; this module checks what
a model must have: an architecture, and tokenizer arrays of the right element types and lengths.
Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import builtins
import os
from typing import Any, TypeVar

import numpy as np

from treadle import _native
from treadle.core import TreadleError

T = TypeVar("T")

# Keys of these families are written in full in the file; all others belong to an architecture.
_SHARED = ("general.", "tokenizer.", "split.", "quantize.")
_REQUIRED: Any = object()  # no default

# Tokenizer arrays: element type as named to users, None for text.
_TOKENIZER_ARRAYS: dict[str, type[np.generic] | None] = {
    "tokenizer.ggml.tokens": None,
    "tokenizer.ggml.merges": None,
    "tokenizer.ggml.added_tokens": None,
    "tokenizer.ggml.scores": np.float32,
    "tokenizer.ggml.token_type": np.int32,
}
_PER_TOKEN = ("tokenizer.ggml.scores", "tokenizer.ggml.token_type")


def open_gguf(path: str | os.PathLike[str]) -> GgufModelFile:
    """Map a GGUF file, or all files of a split model when ``path`` is the first.

    Raises TreadleError, one line naming file, field and value, when the file is broken or no model.
    """
    return GgufModelFile(path)


class GgufModelFile:
    """A GGUF model file, memory-mapped. Getters take keys in full or without the architecture in front.

    ``metadata``: every key with its value: numbers, str, NumPy arrays of numbers, lists of str; text that is
    not UTF-8 is bytes. ``tensor_names``: in file order.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fsencode(path).decode("utf-8", "backslashreplace")  # for messages
        try:
            self._file = _native.Gguf(path)
        except ValueError as error:
            raise TreadleError(str(error)) from None
        self.metadata: dict[str, Any] = self._file.metadata
        self.tensor_names: list[str] = self._file.tensor_names
        self.architecture = self._architecture()
        self._check_tokenizer()

    def tensor(self, name: str) -> _native.GgufTensor:
        """One tensor. Raises TreadleError when the file does not have it."""
        try:
            return self._file.tensor(name)
        except KeyError:
            raise TreadleError(f"{self.path}: tensor {name!r} is missing") from None

    def int(self, key: str, default: builtins.int | None = _REQUIRED) -> builtins.int:
        """An integer of any width. ``default`` stands for an absent key; without one, absence is an error."""
        return self._get(key, default, "an integer", int)

    def float(self, key: str, default: builtins.float | None = _REQUIRED) -> builtins.float:
        """A float32 or float64."""
        return self._get(key, default, "a float", float)

    def bool(self, key: str, default: builtins.bool | None = _REQUIRED) -> builtins.bool:
        """A bool."""
        return self._get(key, default, "a bool", bool)

    def string(self, key: str, default: str | None = _REQUIRED) -> str:
        """A text."""
        return self._get(key, default, "a string", str)

    def _get(self, key: str, default: Any, expected: str, kind: type[T]) -> T:
        full = key if key.startswith((*_SHARED, f"{self.architecture}.")) else f"{self.architecture}.{key}"
        value = self.metadata.get(full)
        if value is None:
            if default is _REQUIRED:
                raise TreadleError(f"{self.path}: metadata {full!r} is missing; expected {expected}")
            found: T = default
            return found
        if type(value) is not kind:  # bool is an int to isinstance
            raise self._wrong(full, expected)
        return value

    def _wrong(self, key: str, expected: str) -> TreadleError:
        value = self.metadata.get(key)
        found = "missing" if value is None else _describe(value)
        return TreadleError(f"{self.path}: metadata {key!r} is {found}; expected {expected}")

    def _architecture(self) -> str:
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise self._wrong("general.architecture", "a name such as 'llama' or 'qwen2'")
        return value

    def _check_tokenizer(self) -> None:
        for key, element in _TOKENIZER_ARRAYS.items():
            value = self.metadata.get(key)
            if value is None:
                continue
            if element is None and not isinstance(value, list):
                raise self._wrong(key, "an array of strings")
            if element is not None and not (isinstance(value, np.ndarray) and value.dtype == element):
                raise self._wrong(key, f"an array of {element.__name__}")
        tokens = len(self.metadata.get("tokenizer.ggml.tokens", ()))
        for key in _PER_TOKEN:
            count = len(self.metadata.get(key, ()))
            if key in self.metadata and count != tokens:
                raise TreadleError(f"{self.path}: metadata {key!r} has {count} elements for {tokens} tokens")


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype.name}"
    if isinstance(value, list):
        return "an array of strings"
    if isinstance(value, bytes):
        return "text that is not UTF-8"
    text = repr(value)
    return f"the {type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
