"""What tells one model file from another."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np

from treadle.weights.gguf import GgufModelFile

_SAMPLE = 4096  # bytes at the begin, in the middle and at the end of each tensor that tell models apart


def model_identity(file: GgufModelFile, *parts: object) -> bytes:
    """A hash of 16 bytes over the model's metadata, the shapes and types of its tensors, three samples of
    their bytes, and ``parts``: whatever else decides what is derived from the model.
    """
    pieces = [repr(parts).encode()]
    for key in sorted(file.metadata):
        value: Any = file.metadata[key]
        pieces.append(key.encode("utf-8", "surrogatepass"))
        pieces.append(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    for name in file.tensor_names:
        tensor = file.tensor(name)
        pieces.append(repr((name, tensor.type, tensor.shape)).encode())
        begins = (0, tensor.nbytes // 2, max(0, tensor.nbytes - _SAMPLE))
        pieces.extend(tensor.data[begin : begin + _SAMPLE].tobytes() for begin in begins)
    # All at once: each update gives up the interpreter, and other threads give it back after a while.
    return blake2b(b"".join(pieces), digest_size=16).digest()
