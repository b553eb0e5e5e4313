"""Tiny random models: the transformers module that is the oracle, and the same weights as a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 320


def bf16_cache_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Causal attention in float32; queries, keys, values, softmax weights rounded to bf16 as in Treadle."""
    groups = query.shape[1] // key.shape[1]
    q, k, v = (t.bfloat16().float() for t in (query, key, value))
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) / query.shape[-1] ** 0.5
    new, total = scores.shape[-2:]
    scores = scores.masked_fill(torch.ones(new, total).tril(total - new) == 0, float("-inf"))
    weights = (scores - scores.max(-1, keepdim=True).values).exp()
    return (weights.bfloat16().float() @ v / weights.sum(-1, keepdim=True)).transpose(1, 2), None


AttentionInterface.register("bf16_cache", bf16_cache_attention)
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,  # of transformers
}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make(architecture: str, **changes: Any) -> PreTrainedModel:
    """A random float32 model. ``changes`` override SHAPE."""
    torch.manual_seed(0)
    shape = {**SHAPE, "attn_implementation": "bf16_cache", **changes}
    if architecture == "llama":
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**shape))
    elif architecture == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**shape))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(head_dim=32, **shape))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.8, 1.2)
            if name.endswith("bias"):
                parameter.normal_(0, 0.05)
    return model.eval()


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from halves (transformers) to neighbouring pairs (GGUF's llama architecture)."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def tensors(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    """GGUF names and values."""
    out = {}
    for name, value in model.state_dict().items():
        array = value.float().numpy()
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        parts = name.split(".")
        if parts[1] == "layers":
            module = ".".join(parts[3:-1])
            target = f"blk.{parts[2]}.{NAMES[module]}.{parts[-1]}"
            if architecture == "llama" and module.endswith(("q_proj", "k_proj")):
                q = module.endswith("q_proj")
                heads = model.config.num_attention_heads if q else model.config.num_key_value_heads
                array = interleave(array, heads)
        else:
            target = {"lm_head": "output", "model.norm": "output_norm", "model.embed_tokens": "token_embd"}[
                ".".join(parts[:-1])
            ] + ".weight"
        out[target] = np.ascontiguousarray(array)
    return out


def assign(model: PreTrainedModel, values: dict[str, np.ndarray]) -> None:
    """Set the weights to ``values`` as `tensors` gives them; not for llama, whose q and k it permutes."""
    with torch.no_grad():
        for (name, parameter), value in zip(model.state_dict().items(), values.values(), strict=True):
            assert parameter.shape == value.shape, name
            parameter.copy_(torch.from_numpy(value))


def write(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    kind: str = "F32",
    *,
    extra: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
    raw: dict[str, np.ndarray] | None = None,
    tokenizer: bool = False,
) -> None:
    """A GGUF file with matrices of type ``kind`` and float32 vectors.

    ``metadata``: more keys, or other values of those there are, without the architecture in front.
    ``tokenizer``: its tokens are the 256 bytes, two line breaks, unused ones, and at last ``<|endoftext|>``,
    which ends texts.
    ``raw``: file bytes of matrices, for kinds that `gguf.quants.quantize` cannot write.
    """
    c = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_key_length(getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads)
    writer.add_rope_freq_base(float(c.rope_parameters["rope_theta"]))
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{architecture}.{key}", value)
    if tokenizer:
        _add_tokenizer(writer)
    for name, array in {**tensors(model, architecture), **(extra or {})}.items():
        if raw is not None and name in raw:
            rows = raw[name].reshape(array.shape[0], -1)
            writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[kind])
        elif array.ndim == 1 or kind == "F32":
            writer.add_tensor(name, array.astype(np.float32))
        else:
            type_ = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(array, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    alphabet = sorted(ByteLevel.alphabet())
    unused = [f"<unused{i}>" for i in range(VOCAB - len(alphabet) - 2)]
    kinds = [1] * (len(alphabet) + 1) + [5] * len(unused) + [3]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*alphabet, "ĊĊ", *unused, "<|endoftext|>"])
    writer.add_token_types(kinds)
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_eos_token_id(VOCAB - 1)
    writer.add_add_eos_token(True)


def byte_ids(text: str) -> list[int]:
    """The tokens of a text without line breaks for that tokenizer, by another way."""
    alphabet = sorted(ByteLevel.alphabet())
    split = ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return [alphabet.index(character) for piece, _ in split for character in piece]


def logits(model: PreTrainedModel, ids: list[int]) -> NDArray[np.float32]:
    """[tokens, vocab] by transformers, eager attention, float32."""
    with torch.no_grad():
        return np.asarray(model(torch.tensor([ids])).logits[0].float())


def greedy(model: PreTrainedModel, ids: list[int], count: int) -> list[int]:
    """The next ``count`` greedy tokens by transformers."""
    out = model.generate(
        torch.tensor([ids]), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return [int(i) for i in out[0, len(ids) :]]
