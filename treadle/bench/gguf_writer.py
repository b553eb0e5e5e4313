"""Writes the GGUF container (version 3, little endian), tensor by tensor, with bounded memory.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 32
Value = bool | int | float | str | Sequence[str] | NDArray[np.int32]

_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. ``dims`` are ggml's: the contiguous dimension first."""

    name: str
    dims: tuple[int, ...]
    type_id: int
    nbytes: int


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Value) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", _ARRAY, _I32, len(value)) + value.astype("<i4").tobytes()
    return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(_string(text) for text in value)


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))


class GgufWriter:
    """Header at construction, then :meth:`write_tensor` once per tensor, in the order given."""

    def __init__(self, path: Path, metadata: Mapping[str, Value], tensors: Sequence[TensorInfo]) -> None:
        self._file = path.open("wb")
        self._expected = iter(tensors)
        self._file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
        for key, value in metadata.items():
            self._file.write(_string(key) + _value(value))
        offset = 0
        for info in tensors:
            self._file.write(_string(info.name))
            self._file.write(struct.pack(f"<I{len(info.dims)}Q", len(info.dims), *info.dims))
            self._file.write(struct.pack("<IQ", info.type_id, offset))
            offset += info.nbytes + -info.nbytes % ALIGNMENT
        _pad(self._file)

    def write_tensor(self, chunks: Iterable[NDArray[np.uint8]]) -> None:
        """The next tensor's bytes, in pieces. Raises ValueError when they are not as many as announced."""
        info = next(self._expected)
        written = 0
        for chunk in chunks:
            self._file.write(chunk.tobytes())
            written += chunk.nbytes
        if written != info.nbytes:
            raise ValueError(f"{info.name}: {written} bytes written, {info.nbytes} announced")
        _pad(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
