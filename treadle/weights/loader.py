"""Weights of a model file, by name, in the form that programs take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from treadle import _native
from treadle.core import TreadleError
from treadle.weights.gguf import GgufModelFile
from treadle.weights.pack_cache import PackCache

# Called with (bytes done, bytes in total).
Progress = Callable[[int, int], None]


class Weights:
    """Hands out the tensors of one file and remembers which were asked for."""

    def __init__(
        self,
        file: GgufModelFile,
        pool: _native.Pool,
        progress: Progress | None = None,
        *,
        unpacked: bool = False,
        cache: PackCache | None = None,
    ) -> None:
        """``unpacked``: all matrices become float32, with the same values. ``cache``: where packed ones are
        kept otherwise.
        """
        self.file = file
        self._pool = pool
        self._progress = progress
        self._unpacked = unpacked
        self._cache = None if unpacked else cache
        self._kept = self._cache.load() if self._cache is not None else {}
        self._matrices: dict[str, _native.Matrix] = {}
        self._used: set[str] = set()
        self._done = 0
        self._total = sum(file.tensor(name).nbytes for name in file.tensor_names)

    def __contains__(self, name: str) -> bool:
        return name in self.file.tensor_names

    def raw(self, name: str) -> _native.GgufTensor:
        """The tensor as it is in the file. Raises TreadleError when it is absent."""
        if name not in self:
            raise TreadleError(
                f"{self.file.path}: tensor {name!r} is missing; the file is incomplete or needs a newer "
                "Treadle"
            )
        self._used.add(name)
        return self.file.tensor(name)

    def matrix(self, name: str) -> _native.Matrix:
        """A packed matrix [outputs, inputs]; the same object when asked again."""
        if name not in self._matrices:
            tensor = self.raw(name)
            if len(tensor.shape) != 2:
                raise TreadleError(
                    f"{self.file.path}: tensor {name!r} has shape {tensor.shape}, not two dimensions"
                )
            with self.naming(name):
                self._matrices[name] = self._pack(tensor)
            self._advance(tensor.nbytes)
        return self._matrices[name]

    def vector(self, name: str) -> NDArray[np.float32]:
        """A vector as float32."""
        tensor = self.raw(name)
        if len(tensor.shape) != 1:
            raise TreadleError(
                f"{self.file.path}: tensor {name!r} has shape {tensor.shape}, not one dimension"
            )
        with self.naming(name):
            return _native.dequantise(tensor.type, tensor.data)

    def optional_vector(self, name: str) -> NDArray[np.float32] | None:
        """A vector as float32, or None when the file does not have it."""
        return self.vector(name) if name in self else None

    def leave_out(self, name: str) -> None:
        """Say that this tensor is not needed, if the file has it."""
        self._used.add(name)

    def unused(self) -> list[str]:
        """Tensors that nobody asked for."""
        return [name for name in self.file.tensor_names if name not in self._used]

    @property
    def packed_bytes(self) -> int:
        """Memory of all packed matrices."""
        return sum(m.nbytes for m in self._matrices.values())

    @contextmanager
    def naming(self, *names: str) -> Iterator[None]:
        """Turn a shape error of the native side into one that names the file and the tensors."""
        try:
            yield
        except ValueError as error:
            raise TreadleError(f"{self.file.path}: {', '.join(names)}: {error}") from None

    def keep(self) -> None:
        """Have the cache, if there is one, keep what was packed: all matrices of the model are here now."""
        if self._cache is not None and any(self._kept.get(n) is not m for n, m in self._matrices.items()):
            self._kept = {}
            self._cache.store(self._matrices)

    def _pack(self, tensor: _native.GgufTensor) -> _native.Matrix:
        rows, cols = tensor.shape
        kept = self._kept.get(tensor.name)
        if kept is not None and (kept.format, kept.rows, kept.cols) == (tensor.type, rows, cols):
            return kept
        if self._unpacked:
            values = _native.dequantise(tensor.type, tensor.data)
            return _native.pack(self._pool, "F32", values.view(np.uint8), rows, cols)
        return _native.pack(self._pool, tensor.type, tensor.data, rows, cols, mapped=True)

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress:
            self._progress(self._done, self._total)
