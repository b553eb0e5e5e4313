"""DeepSeek-R1-Distill-Qwen-1.5B with random weights for OpenVINO: int4 in groups of 128.

    python -m benchmarks.peers.genai_model FOLDER

Runs in a Python of its own that has `optimum-intel`, `nncf`, `openvino-genai`, `torch` and `msgspec`, without
`torchvision`. Compression is optimum's default for int4 (a zero point per group); the embedding and the
output matrix become int8.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from treadle.bench.shapes import find_shape

SHAPE = find_shape("r1-distill-qwen-1.5b")
CONFIG = Qwen2Config(
    vocab_size=SHAPE.vocab,
    hidden_size=SHAPE.hidden,
    intermediate_size=SHAPE.intermediate,
    num_hidden_layers=SHAPE.layers,
    num_attention_heads=SHAPE.heads,
    num_key_value_heads=SHAPE.kv_heads,
    max_position_embeddings=SHAPE.context,
    rms_norm_eps=SHAPE.rms_eps,
    tie_word_embeddings=SHAPE.tied,
    bos_token_id=1,
    eos_token_id=2,
)


def save_tokenizer(folder: Path) -> None:
    """Bytes, and names for the other ids: the benchmark sends ids only, but a pipeline wants a tokenizer."""
    vocabulary = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary += [f"<{token}>" for token in range(len(vocabulary), CONFIG.vocab_size)]
    model = models.BPE(vocab={text: token for token, text in enumerate(vocabulary)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(folder)


def main() -> None:
    """Command line; see the module's text."""
    if len(sys.argv) != 2:
        raise SystemExit((__doc__ or "").split("\n")[2].strip())
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        Qwen2ForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(folder)
        save_tokenizer(Path(folder))
        export = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", folder]
        export += ["--task", "text-generation-with-past", "--weight-format", "int4", "--group-size", "128"]
        subprocess.run([*export, "--ratio", "1.0", sys.argv[1]], check=True)


if __name__ == "__main__":
    main()
