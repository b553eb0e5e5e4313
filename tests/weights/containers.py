"""GGUF files written byte by byte, so that every field can be wrong."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

U8, U32, I32, F32, BOOL, STRING, ARRAY = 0, 4, 5, 6, 7, 8, 9


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def string(key: bytes, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", STRING) + text(value)


def u32(key: bytes, value: int) -> bytes:
    return text(key) + struct.pack("<II", U32, value)


def u16(key: bytes, value: int) -> bytes:
    return text(key) + struct.pack("<IH", 2, value)


def i32(key: bytes, value: int) -> bytes:
    return text(key) + struct.pack("<Ii", I32, value)


def array(key: bytes, element: int, count: int, data: bytes) -> bytes:
    return text(key) + struct.pack("<IIQ", ARRAY, element, count) + data


def tensor(
    name: bytes, dims: Sequence[int], kind: int = 0, offset: int = 0, ndims: int | None = None
) -> bytes:
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return (
        text(name)
        + struct.pack("<I", len(dims) if ndims is None else ndims)
        + sizes
        + struct.pack("<IQ", kind, offset)
    )


def container(
    keys: Sequence[bytes],
    tensors: Sequence[bytes] = (),
    *,
    data: bytes = bytes(64),
    key_count: int | None = None,
    tensor_count: int | None = None,
    magic: bytes = b"GGUF",
    version: int = 3,
) -> bytes:
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


OK = string(b"general.architecture", b"qwen2")
T = tensor(b"t", [4])
GOOD = container([OK], [T])

# name -> (bytes, words that the error must contain)
BROKEN: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "magic": (container([OK], magic=b"GGJT"), ("not a GGUF file", "GGJT")),
    "version": (container([OK], version=99), ("version 99", "2 and 3")),
    "big_endian": (container([OK], version=3 << 24), ("big-endian",)),
    "zero_dim": (container([OK], [tensor(b"t", [0, 4])]), ("'t'", "size 0", "dimension 0")),
    "ndims0": (container([OK], [tensor(b"t", [])]), ("'t'", "0 dimensions", "1 to 4")),
    "ndims9": (container([OK], [tensor(b"t", [1] * 9)]), ("'t'", "9 dimensions", "1 to 4")),
    "ndims_huge": (container([OK], [tensor(b"t", [4], ndims=2**32 - 1)]), ("'t'", "4294967295 dimensions")),
    "dim_overflow": (
        container([OK], [tensor(b"t", [4, 2**42 + 1, 2**22])]),
        ("'t'", "4398046511105", "2^64"),
    ),
    "row_of_blocks": (container([OK], [tensor(b"t", [33], kind=2)]), ("'t'", "Q4_0", "33", "multiple of 32")),
    "offset_eof": (container([OK], [tensor(b"t", [4], offset=2**40)]), ("file truncated", "have 192", "'t'")),
    "offset_wrap": (container([OK], [tensor(b"t", [4], offset=2**64 - 32)]), ("'t'", str(2**64 - 32))),
    "offset_odd": (container([OK], [tensor(b"t", [4], offset=16)]), ("'t'", "16", "alignment 32")),
    "align0": (
        container([OK, u32(b"general.alignment", 0)], [T]),
        ("general.alignment is 0", "power of two"),
    ),
    "align4": (container([OK, u32(b"general.alignment", 4)], [T]), ("general.alignment is 4",)),
    "align48": (container([OK, u32(b"general.alignment", 48)], [T]), ("general.alignment is 48",)),
    "align_text": (
        container([OK, string(b"general.alignment", b"32")], [T]),
        ("alignment", "string", "uint32"),
    ),
    "nkv_huge": (container([OK], key_count=2**60), ("metadata_kv_count", str(2**60))),
    "nt_huge": (container([OK], tensor_count=2**60), ("tensor_count", str(2**60))),
    "strlen": (container([struct.pack("<Q", 2**63) + b"x"]), ("metadata key 0", str(2**63))),
    "array_huge": (container([OK, array(b"a", U32, 2**62, b"")]), ("'a'", str(2**62))),
    "strings_huge": (container([OK, array(b"a", STRING, 2**61, b"")]), ("'a'", str(2**61))),
    "nested": (container([OK, array(b"a", ARRAY, 1, bytes(12))]), ("'a'", "array of arrays")),
    "bad_bool": (container([OK, text(b"a") + struct.pack("<IB", BOOL, 2)]), ("'a'", "2", "0 and 1")),
    "bad_kind": (container([OK, text(b"a") + struct.pack("<II", 77, 0)]), ("'a'", "77")),
    "empty_key": (container([text(b"") + struct.pack("<II", U32, 1)]), ("key 0 is empty",)),
    "odd_key": (container([u32(b"a\n\xff", 1)]), ("key 0", "a\\x0a\\xff", "ASCII")),
    "dup_key": (container([OK, OK]), ("'general.architecture' appears twice",)),
    "bad_type": (container([OK], [tensor(b"t", [32], kind=250)]), ("'t'", "250", "Q4_K", "IQ4_XS")),
    "no_arch": (container([u32(b"x", 1)], [T]), ("general.architecture", "missing")),
    "empty_arch": (container([string(b"general.architecture", b"")]), ("general.architecture", "''")),
    "number_arch": (container([u32(b"general.architecture", 7)]), ("general.architecture", "int 7")),
    "tok_u8": (
        container([OK, array(b"tokenizer.ggml.scores", U8, 8, bytes(8))]),
        ("tokenizer.ggml.scores", "uint8", "float32"),
    ),
    "tok_numbers": (
        container([OK, array(b"tokenizer.ggml.tokens", I32, 2, bytes(8))]),
        ("tokenizer.ggml.tokens", "int32", "strings"),
    ),
    "tok_lengths": (
        container(
            [
                OK,
                array(b"tokenizer.ggml.tokens", STRING, 1, text(b"a")),
                array(b"tokenizer.ggml.token_type", I32, 2, bytes(8)),
            ]
        ),
        ("tokenizer.ggml.token_type", "2 elements", "1 tokens"),
    ),
    "dup_tensor": (container([OK], [T, T]), ("'t' appears twice",)),
    "overlap": (container([OK], [T, tensor(b"u", [4])]), ("'u'", "'t'", "overlaps")),
    "empty_name": (container([OK], [tensor(b"", [4])]), ("tensor 0 is empty",)),
    "long_name": (container([OK], [tensor(b"n" * 65, [4])]), ("65 bytes", "64")),
    "odd_name": (container([OK], [tensor(b"t\xff", [4])]), ("t\\xff", "UTF-8")),
    "trunc": (container([OK, u32(b"general.alignment", 0)], [T])[:40], ("file truncated", "have 40")),
    "zero": (b"", ("empty (0 bytes)",)),
}


def write_all(folder: Path) -> list[Path]:
    """Every broken file and a good one, as files."""
    paths = [folder / "good.gguf"]
    paths[0].write_bytes(GOOD)
    for name, (content, _) in BROKEN.items():
        paths.append(folder / f"{name}.gguf")
        paths[-1].write_bytes(content)
    return paths
