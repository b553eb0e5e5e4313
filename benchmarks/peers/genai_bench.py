"""One case of run.py with OpenVINO GenAI; prints its token/s as JSON.

    python benchmarks/peers/genai_bench.py FOLDER prefill 512
    python benchmarks/peers/genai_bench.py FOLDER decode 1 --batch 20

Runs in a Python that has `openvino-genai`, which need not be ours. FOLDER is what genai_model.py wrote, or
any other model in OpenVINO's format.
"""

from __future__ import annotations

import argparse
import json
import random
import time

import openvino
import openvino_genai


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("kind", choices=("prefill", "decode"))
    parser.add_argument("tokens", type=int, help="of the prompt, or before the first step")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=32)
    options = parser.parse_args()

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2  # GiB
    scheduler.max_num_batched_tokens = 2048
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        options.folder, scheduler, "CPU", {"INFERENCE_NUM_THREADS": options.threads}
    )
    random.seed(0)

    def seconds(prompt: int, answer: int) -> float:
        """Time for prompts that no cache knows, and answers of exactly so many tokens."""
        prompts = [
            openvino.Tensor([[random.randrange(1000, 150000) for _ in range(prompt)]])
            for _ in range(options.batch)
        ]
        config = openvino_genai.GenerationConfig(max_new_tokens=answer, ignore_eos=True, do_sample=False)
        begin = time.perf_counter()
        results = pipeline.generate(prompts, [config] * options.batch)
        took = time.perf_counter() - begin
        lengths = {len(ids) for result in results for ids in result.m_generation_ids}
        if lengths != {answer}:
            raise SystemExit(f"answers of {answer} tokens were asked for, and had {sorted(lengths)}")
        return took

    prompt = max(1, options.tokens)
    seconds(prompt, 2)  # compiles what it needs
    if options.kind == "prefill":
        rate = prompt / seconds(prompt, 1)
    else:
        first = seconds(prompt, 1)
        rate = options.batch * options.steps / (seconds(prompt, options.steps + 1) - first)
    print(json.dumps({"version": openvino_genai.__version__, "tokens_per_s": rate}))


if __name__ == "__main__":
    main()
