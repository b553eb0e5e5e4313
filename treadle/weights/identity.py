"""What tells one model file from another."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np

from treadle.weights.gguf import GgufModelFile

_SAMPLE = 4096  # bytes of each tensor that tell one model from another


def model_identity(file: GgufModelFile, *parts: object) -> bytes:
    """A hash of 16 bytes over the model's metadata, the shapes, types and first bytes of its tensors, and
    ``parts``: whatever else decides what is derived from the model.
    """
    digest = blake2b(repr(parts).encode(), digest_size=16)
    for key in sorted(file.metadata):
        value: Any = file.metadata[key]
        digest.update(key.encode("utf-8", "surrogatepass"))
        digest.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    for name in file.tensor_names:
        tensor = file.tensor(name)
        digest.update(repr((name, tensor.type, tensor.shape)).encode())
        digest.update(tensor.data[:_SAMPLE].tobytes())
    return digest.digest()
