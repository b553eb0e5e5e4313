"""What model files are written in: named weights, operations, and the buffers between them.

A `Graph` adds operations to a native `Program`. Buffers are reused from layer to layer; their leading
dimension is the tokens of a step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treadle import _native
from treadle.core import TreadleError
from treadle.models.config import ModelConfig
from treadle.weights.loader import Weights


class Graph:
    """Builds the program of one model."""

    def __init__(
        self, program: _native.Program, weights: Weights, config: ModelConfig, embeds: bool = False
    ) -> None:
        """``embeds``: the model ends with the last normalised hidden states instead of logits."""
        self.config = config
        self._program = program
        self._weights = weights
        self._buffers: dict[tuple[str, int, bool], int] = {}
        self._of_logits: set[int] = set()  # buffers with one row per wanted logits row
        self._embeds = embeds
        self.output_buffer = -1  # logits, or hidden states

    def rotary(self, frequency: NDArray[np.float32], magnitude: float = 1.0) -> None:
        """Set the rotation of the attention operations that follow: radians per token [pairs]."""
        self._program.angles(np.ascontiguousarray(frequency, np.float32), magnitude)

    def embed(self, name: str) -> int:
        """Rows of an embedding table: [tokens, hidden]."""
        table = self._weights.raw(name)
        if len(table.shape) != 2 or table.shape[1] != self.config.hidden:
            raise TreadleError(
                f"{self._weights.file.path}: tensor {name!r} has shape {table.shape}, not one row of "
                f"{self.config.hidden} values per token"
            )
        out = self._buffer("x", table.shape[1])
        with self._weights.naming(name):
            self._program.embed(table.type, table.data, table.shape[0], out)
        return out

    def rms_norm(self, x: int, name: str) -> int:
        """RMSNorm with the weight vector ``name``."""
        weight = self._weights.vector(name)
        out = self._buffer("norm", len(weight), logits=x in self._of_logits)
        with self._weights.naming(name):
            self._program.rms_norm(x, weight, self.config.eps, out)
        return out

    def linear(self, x: int, names: list[str], residual: int | None = None) -> int:
        """Outputs of several matrices side by side: ``{name}.weight`` plus ``{name}.bias``, if there is one.

        With ``residual`` the result is added to that buffer in place.
        """
        matrices = [self._matrix(name) for name in names]
        width = sum(m.rows for m in matrices)
        biases = [self._weights.optional_vector(f"{name}.bias") for name in names]
        bias = None
        if any(b is not None for b in biases):
            bias = np.concatenate(
                [
                    np.zeros(m.rows, np.float32) if b is None else b
                    for m, b in zip(matrices, biases, strict=True)
                ]
            )
        out = (
            self._buffer("+".join(n.rsplit(".", 1)[-1] for n in names), width)
            if residual is None
            else residual
        )
        with self._weights.naming(*names):
            self._program.linear(x, matrices, bias, -1 if residual is None else residual, out=out)
        return out

    def gated_linear(self, x: int, gate: str, up: str) -> int:
        """silu(gate x) * (up x)."""
        gate_matrix, up_matrix = self._matrix(gate), self._matrix(up)
        out = self._buffer("gated", gate_matrix.rows)
        with self._weights.naming(gate, up):
            self._program.gated_linear(x, gate_matrix, up_matrix, out)
        return out

    def attention(self, qkv: int, *, neox: bool, norms: tuple[str, str] | None = None) -> int:
        """Causal grouped-query attention of fused q, k, v; ``norms``: per-head RMSNorm weights of q and k."""
        c = self.config
        out = self._buffer("attention", c.heads * c.head_dim)
        q_norm, k_norm = (self._weights.vector(n) for n in norms) if norms else (None, None)
        with self._weights.naming(*norms or ("attention",)):
            self._program.attention(
                qkv,
                (c.heads, c.kv_heads, c.head_dim),
                neox=neox,
                q_norm=q_norm,
                k_norm=k_norm,
                eps=c.eps,
                out=out,
            )
        return out

    def select(self, x: int) -> int:
        """The rows whose logits are wanted."""
        out = self._buffer("select", self.config.hidden, logits=True)
        self._program.select(x, out)
        return out

    def logits(self, x: int, name: str, tied: str) -> None:
        """The output matrix ``name``, or the embedding ``tied`` where the file has none."""
        if self._embeds:
            self._weights.leave_out(f"{name}.weight")
            self.output_buffer = x
            return
        matrix = self._weights.matrix(
            f"{name}.weight" if f"{name}.weight" in self._weights else f"{tied}.weight"
        )
        self.output_buffer = self._buffer("logits", matrix.rows, logits=True)
        with self._weights.naming(name):
            self._program.linear(x, [matrix], None, out=self.output_buffer)

    def _matrix(self, name: str) -> _native.Matrix:
        """A matrix of a layer, with as many outputs as the hyper-parameters say."""
        matrix = self._weights.matrix(f"{name}.weight")
        expected = self.config.outputs(name.rsplit(".", 1)[-1])
        if matrix.rows != expected:
            raise TreadleError(
                f"{self._weights.file.path}: tensor '{name}.weight' has {matrix.rows} outputs; the file's "
                f"hyper-parameters ask for {expected}"
            )
        return matrix

    def _buffer(self, role: str, width: int, logits: bool = False) -> int:
        key = (role, width, logits)
        if key not in self._buffers:
            self._buffers[key] = self._program.buffer(width, logits)
            if logits:
                self._of_logits.add(self._buffers[key])
        return self._buffers[key]
