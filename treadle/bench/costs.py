"""What one step of a model must read and compute at least: the other half of every share of the limit."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from treadle import _native
from treadle.bench.machine import MachineReport
from treadle.core import TreadleError

# Types whose linear layers run in floating point; all others run as int8 dot products.
_FLOAT_TYPES = frozenset({"F32", "F16", "BF16"})


class LinearShape(msgspec.Struct, frozen=True):
    """All linear layers of one type and shape. ``rows`` are outputs, ``cols`` inputs."""

    type: str
    rows: int
    cols: int
    names: list[str]


class ModelCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes read per step; operations (a multiply-add counts as two) and KV numbers per token."""

    weight_bytes: int  # every weight that one token touches
    layer_ops: int  # linear layers without the output matrix
    output_ops: int
    kv_values: int  # numbers stored in the KV cache per token
    arithmetic: str  # "int8" or "float": what most of the operations are

    def decode_seconds(self, batch: int, context: int, kv_bytes: float, limits: Limits) -> float:
        """The fastest possible step of ``batch`` sequences with ``context`` tokens of KV each.

        ``kv_bytes``: what a number in the KV cache takes.
        """
        reading = (self.weight_bytes + batch * context * self.kv_values * kv_bytes) / limits.bytes_per_s
        return max(reading, batch * (self.layer_ops + self.output_ops) / self._peak(limits))

    def prefill_seconds(self, tokens: int, limits: Limits) -> float:
        """The fastest possible prefill, counted over the linear layers; logits for the last token only."""
        return (tokens * self.layer_ops + self.output_ops) / self._peak(limits)

    def _peak(self, limits: Limits) -> float:
        return limits.int8_ops_per_s if self.arithmetic == "int8" else limits.float_ops_per_s


class Limits(msgspec.Struct, frozen=True):
    """What the machine does at most with the threads in use, measured."""

    bytes_per_s: float
    int8_ops_per_s: float
    float_ops_per_s: float  # bf16 where the CPU has it, else f32


def limits_of(machine: MachineReport) -> Limits:
    """The limits that the thread count of ``machine`` allows."""
    return Limits(
        bytes_per_s=machine.best_bandwidth(),
        int8_ops_per_s=machine.best_peak("int8"),
        float_ops_per_s=machine.best_peak("bf16") or machine.best_peak("f32"),
    )


def model_costs(path: Path) -> tuple[ModelCosts, list[LinearShape]]:
    """Costs and distinct linear shapes of a GGUF file. Raises TreadleError when it is no readable GGUF."""
    try:
        file = _native.Gguf(str(path))
    except (OSError, ValueError) as error:
        raise TreadleError(str(error)) from error
    metadata: Mapping[str, Any] = file.metadata
    arch = metadata["general.architecture"]
    experts = metadata.get(f"{arch}.expert_count") or 1
    used = metadata.get(f"{arch}.expert_used_count") or 1
    names = file.tensor_names
    output = "output.weight" if "output.weight" in names else "token_embd.weight"
    weight_bytes = layer_ops = output_ops = float_ops = 0
    shapes: dict[tuple[str, int, int], list[str]] = {}
    for name in names:
        tensor = file.tensor(name)
        if name == "token_embd.weight" and output != name:
            continue  # one row per token
        share = used / experts if re.search(r"_exps\.weight$", name) else 1
        weight_bytes += round(tensor.nbytes * share)
        if len(tensor.shape) < 2:
            continue
        *_, rows, cols = tensor.shape
        operations = round(2 * math.prod(tensor.shape) * share)
        if name == output:
            output_ops = operations
        else:
            layer_ops += operations
        float_ops += operations if tensor.type in _FLOAT_TYPES else 0
        shapes.setdefault((tensor.type, rows, cols), []).append(name)
    costs = ModelCosts(
        weight_bytes=weight_bytes,
        layer_ops=layer_ops,
        output_ops=output_ops,
        kv_values=_kv_values(metadata, arch),
        arithmetic="float" if 2 * float_ops > layer_ops + output_ops else "int8",
    )
    return costs, [LinearShape(*key, names) for key, names in shapes.items()]


def _kv_values(metadata: Mapping[str, Any], arch: str) -> int:
    """K and V numbers per token over all layers (one latent row per layer with MLA)."""
    layers = int(metadata[f"{arch}.block_count"])
    heads = int(metadata[f"{arch}.attention.head_count"])
    if latent := metadata.get(f"{arch}.attention.kv_lora_rank"):
        return layers * (int(latent) + int(metadata[f"{arch}.rope.dimension_count"]))
    kv_heads = int(metadata.get(f"{arch}.attention.head_count_kv", heads))
    head_dim = int(metadata[f"{arch}.embedding_length"]) // heads
    key = int(metadata.get(f"{arch}.attention.key_length", head_dim))
    value = int(metadata.get(f"{arch}.attention.value_length", head_dim))
    return layers * kv_heads * (key + value)
