"""Which tensors get which type: the quantisations that synthetic files can have, by name.

As llama.cpp's ``llama-quantize`` (``llama-quant.cpp``) chooses without an importance matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LayerRule = Callable[[int, int], bool]  # (layer, layers) -> this layer gets the larger type


def _never(_layer: int, _layers: int) -> bool:
    return False


def _always(_layer: int, _layers: int) -> bool:
    return True


def _more_bits(layer: int, layers: int) -> bool:
    """llama.cpp's ``use_more_bits``: the first and last eighth, and every third layer between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _first_eighth(layer: int, layers: int) -> bool:
    return layer < layers // 8


def _first_four(layer: int, _layers: int) -> bool:
    return layer < 4


def _first_two(layer: int, _layers: int) -> bool:
    return layer < 2


@dataclass(frozen=True)
class Mixture:
    """One ``ftype`` of llama.cpp: the base type and the exceptions."""

    file_type: int  # general.file_type
    base: str
    output: str = "Q6_K"
    attn_v: tuple[str, LayerRule] = ("", _never)
    attn_v_rest: str = ""  # attn_v in the other layers, where not the base type
    ffn_down: tuple[str, LayerRule] = ("", _never)
    ffn_down_rest: str = ""
    attn_output: str = ""


MIXTURES = {
    "F32": Mixture(0, "F32", output="F32"),
    "F16": Mixture(1, "F16", output="F16"),
    "BF16": Mixture(32, "BF16", output="BF16"),
    "Q8_0": Mixture(7, "Q8_0", output="Q8_0"),
    "Q4_0": Mixture(2, "Q4_0"),
    "Q4_1": Mixture(3, "Q4_1"),
    "Q5_0": Mixture(8, "Q5_0"),
    "Q5_1": Mixture(9, "Q5_1"),
    "Q2_K": Mixture(10, "Q2_K", attn_v=("Q4_K", _always), ffn_down=("Q3_K", _always), attn_output="Q3_K"),
    "Q3_K_S": Mixture(11, "Q3_K"),
    "Q3_K_M": Mixture(12, "Q3_K", attn_v=("Q5_K", _first_two), attn_v_rest="Q4_K",
                      ffn_down=("Q5_K", lambda layer, layers: layer < layers // 16), ffn_down_rest="Q4_K",
                      attn_output="Q4_K"),
    "Q4_K_S": Mixture(14, "Q4_K", attn_v=("Q5_K", _first_four), ffn_down=("Q5_K", _first_eighth)),
    "Q4_K_M": Mixture(15, "Q4_K", attn_v=("Q6_K", _more_bits), ffn_down=("Q6_K", _more_bits)),
    "Q5_K_S": Mixture(16, "Q5_K"),
    "Q5_K_M": Mixture(17, "Q5_K", attn_v=("Q6_K", _more_bits), ffn_down=("Q6_K", _more_bits)),
    "Q6_K": Mixture(18, "Q6_K"),
}  # fmt: skip
