"""The engine without a server, as a process that is asked over its standard streams: one JSON line per batch.

    python -m benchmarks.serving.offline MODEL.gguf THREADS

In: ``{"chats": [[{"role": …, "content": …}], …], "answer": TOKENS}``. Out: ``{"ready": true}`` once, then per
batch ``{"seconds": …, "prompt_tokens": …, "completion_tokens": …}``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from treadle import LLM
from treadle.core import SamplingParams
from treadle.text.chat import ChatTemplate
from treadle.text.tokenizer import Tokenizer
from treadle.weights.gguf import open_gguf


def main(path: Path, threads: int) -> None:
    """Answer batches until standard input ends."""
    template = ChatTemplate(Tokenizer.from_gguf(open_gguf(path).metadata))
    with LLM(path, threads=threads) as llm:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            prompts = [template.render(chat).ids for chat in asked["chats"]]
            params = SamplingParams(max_tokens=asked["answer"], temperature=0.0, ignore_eos=True)
            start = time.perf_counter()
            done = llm.generate(prompts, params)
            found = {
                "seconds": time.perf_counter() - start,
                "prompt_tokens": sum(c.usage.prompt_tokens - c.usage.cached_tokens for c in done),
                "completion_tokens": sum(c.usage.completion_tokens for c in done),
            }
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
