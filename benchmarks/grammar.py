"""What a grammar costs per token: the same engine with and without one, in turns, in one process.

    python -m benchmarks.grammar [MODEL.gguf] [--rounds N] [--tokens N]

Answers have equal length whatever is in them, because their forms cannot end sooner; guessing of tokens is
off. For each form and batch size, prints the median step of both, what the grammar adds to it, and what it
adds to the mean of all steps but the slowest twentieth.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from treadle import hub
from treadle.core import Request, SamplingParams
from treadle.engine.engine import Engine, EngineConfig
from treadle.engine.load import LoadConfig, load_runner
from treadle.server.grammar import schema_grammar
from treadle.text.chat import ChatTemplate
from treadle.text.tokenizer import Tokenizer
from treadle.weights.gguf import open_gguf

_RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "kind": {"enum": ["river", "mountain", "city"]},
        "height": {"type": "number"},
        "near": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    "required": ["name", "kind", "height", "near"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "texts": {"type": "array", "items": {"type": "string"}, "minItems": 200},
    "records": {"type": "array", "items": _RECORD, "minItems": 200},
}
_QUESTION = [{"role": "user", "content": "Tell me about the mountains and rivers of Europe."}]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default=None)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=30)
    options = parser.parse_args()
    path = Path(hub.resolve(options.model))
    runner = load_runner(LoadConfig(path=str(path)))
    engine = Engine(runner, EngineConfig(speculation=False))
    prompt = ChatTemplate(Tokenizer.from_gguf(open_gguf(path).metadata)).render(_QUESTION).ids
    print(f"{path.name}, {runner.threads} threads, {options.rounds} rounds of {options.tokens} tokens")
    print("| form | sequences | ms per step | with the grammar | added | to the mean |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, schema in FORMS.items():
        for batch in (1, 8):
            steps: tuple[list[float], list[float]] = ([], [])  # without, with
            for round_ in range(options.rounds + 1):
                for guided in (0, 1) if round_ % 2 else (1, 0):
                    grammar = schema_grammar(schema) if guided else None
                    found = _steps(engine, prompt, grammar, batch, options.tokens, round_)
                    steps[guided].extend(found if round_ > 0 else ())  # the first one warms up
            (free, most), (own, all_) = ((median(part), _usual(part)) for part in steps)
            print(
                f"| {name} | {batch} | {free * 1e3:.2f} | {own * 1e3:.2f} | {own / free - 1:+.1%} "
                f"| {all_ / most - 1:+.1%} |",
                flush=True,
            )


def _usual(seconds: list[float]) -> float:
    """The mean without the slowest twentieth, which others have disturbed."""
    return mean(sorted(seconds)[: len(seconds) * 19 // 20])


def _steps(
    engine: Engine, prompt: list[int], grammar: str | None, batch: int, tokens: int, seed: int
) -> list[float]:
    """Seconds of every step in which all sequences gained a token, but for the first."""
    for number in range(batch):
        params = SamplingParams(
            max_tokens=tokens,
            temperature=0.7,
            seed=1000 * seed + number,
            grammar=grammar,
            ignore_eos=grammar is None,
        )
        engine.add(Request(id=str(number), prompt_ids=prompt, params=params))
    steps, done = [], []
    while engine.has_work:
        start = time.perf_counter()
        outputs = engine.step()
        if len(outputs) == batch:
            steps.append(time.perf_counter() - start)
        done += [output for output in outputs if output.finish_reason is not None]
    assert all(output.finish_reason == "length" for output in done), done
    return steps[1:]


if __name__ == "__main__":
    main()
