"""SmolLM2 by transformers in float32, with the weights that the `gguf` package decodes from its file."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models.tiny import NAMES

_OTHERS = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def from_gguf(path: Path) -> LlamaForCausalLM:
    """A llama model with tied embeddings."""
    reader = gguf.GGUFReader(path)

    def key(name: str) -> float:
        return float(reader.fields[f"llama.{name}"].contents())

    stored = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    config = LlamaConfig(
        vocab_size=len(stored["token_embd.weight"]),
        hidden_size=int(key("embedding_length")),
        intermediate_size=int(key("feed_forward_length")),
        num_hidden_layers=int(key("block_count")),
        num_attention_heads=int(key("attention.head_count")),
        num_key_value_heads=int(key("attention.head_count_kv")),
        max_position_embeddings=int(key("context_length")),
        rms_norm_eps=key("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": key("rope.freq_base")},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = {name: torch.from_numpy(np.array(value)) for name, value in _weights(model, stored).items()}
    model.load_state_dict(weights, assign=True, strict=False)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # the meta device has no frequencies
    return model.eval()


def _weights(model: LlamaForCausalLM, stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    c = model.config
    out = {}
    for name in model.state_dict():
        if name == "lm_head.weight":
            continue
        if name in _OTHERS:
            out[name] = stored[_OTHERS[name]]
            continue
        parts = name.split(".")
        module = ".".join(parts[3:-1])
        array = stored[f"blk.{parts[2]}.{NAMES[module]}.{parts[-1]}"]
        if module.endswith(("q_proj", "k_proj")):  # from neighbouring pairs (GGUF) to halves
            heads = c.num_attention_heads if module.endswith("q_proj") else c.num_key_value_heads
            array = array.reshape(heads, -1, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        out[name] = array
    return out
