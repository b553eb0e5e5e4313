"""Qwen2 (arXiv 2407.10671): Qwen2 and 2.5, QwQ-32B, DeepSeek-R1-Distill-Qwen.

Llama with biases on q, k and v.
"""

from __future__ import annotations

from treadle.models.graph import Graph


def build(g: Graph) -> None:
    """Add the whole model to the graph."""
    x = g.embed("token_embd.weight")
    for i in range(g.config.layers):
        layer = f"blk.{i}"
        h = g.rms_norm(x, f"{layer}.attn_norm.weight")
        qkv = g.linear(h, [f"{layer}.attn_q", f"{layer}.attn_k", f"{layer}.attn_v"])
        a = g.attention(qkv, neox=True)
        x = g.linear(a, [f"{layer}.attn_output"], residual=x)
        h = g.rms_norm(x, f"{layer}.ffn_norm.weight")
        f = g.gated_linear(h, f"{layer}.ffn_gate", f"{layer}.ffn_up")
        x = g.linear(f, [f"{layer}.ffn_down"], residual=x)
    g.logits(g.rms_norm(g.select(x), "output_norm.weight"), "output", tied="token_embd")
