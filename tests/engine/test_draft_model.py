"""Draft models of real weights: answers are those of the model alone, word for word and as a distribution."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.models import tiny
from treadle import LLM, SamplingParams, hub
from treadle.core import Request, TokenLogprobs, TreadleError
from treadle.engine.engine import Engine, EngineConfig, EngineStats
from treadle.engine.load import LoadConfig, load_models, outline
from treadle.engine.runner import Runner
from treadle.engine.spec.runner import NativeDraftRunner, check_vocabularies
from treadle.text.tokenizer import Tokenizer
from treadle.weights.gguf import open_gguf

TEXTS = ["The capital of France is", "Once upon a time, there was", "def fibonacci(n):"]


class Pair:
    """A model and a draft model whose passes seem to take no time, so that its guesses are always wanted."""

    def __init__(self, runner: Runner, draft: NativeDraftRunner) -> None:
        self.runner, self.draft = runner, draft
        draft.weight_bytes = 1
        self.steps = 0
        run = runner.run

        def counted(*arrays: Any) -> None:
            run(*arrays)
            self.steps += 1

        runner.run = counted  # type: ignore[method-assign]

    def answer(
        self, requests: list[Request], *, drafted: bool, together: int = 4
    ) -> tuple[dict[str, list[int]], dict[str, list[TokenLogprobs]], EngineStats]:
        """Tokens and log-probabilities by request."""
        draft = self.draft if drafted else None
        engine = Engine(
            self.runner, EngineConfig(speculation=drafted), lambda: float(self.steps), draft=draft
        )
        tokens: dict[str, list[int]] = {request.id: [] for request in requests}
        logprobs: dict[str, list[TokenLogprobs]] = {request.id: [] for request in requests}
        waiting, inside = list(reversed(requests)), 0
        while waiting or engine.has_work:
            while waiting and inside < together:
                engine.add(waiting.pop())
                inside += 1
            for output in engine.step():
                assert output.error is None
                tokens[output.id] += output.token_ids
                logprobs[output.id] += output.logprobs or []
                inside -= output.finish_reason is not None
        engine.check()
        return tokens, logprobs, engine.stats()


@pytest.fixture(scope="module")
def smol() -> Pair:
    path = str(Path(hub.resolve(None)))
    runner, draft = load_models(LoadConfig(path=path, draft=path, context=1024, kv_memory=64 << 20))
    assert draft is not None
    return Pair(runner, draft)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(open_gguf(Path(hub.resolve(None))).metadata)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 1.2, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.2, "min_tokens": 40},
        {"temperature": 0.9, "seed": 4, "presence_penalty": 1.0, "logit_bias": {50: 5.0}, "min_p": 0.05},
    ],
)
def test_a_model_as_its_own_draft_is_nearly_always_right(
    smol: Pair, tokenizer: Tokenizer, params: dict[str, Any]
) -> None:
    requests = [
        Request(
            id=text,
            prompt_ids=tokenizer.encode(text),
            params=SamplingParams(max_tokens=48, ignore_eos=True, **params),
        )
        for text in TEXTS
    ]
    alone, logprobs, _ = smol.answer(requests, drafted=False)
    together, same, stats = smol.answer(requests, drafted=True)
    assert together == alone and same == logprobs
    assert stats.model_accepted_tokens_total > 0.97 * stats.model_drafted_tokens_total > 90
    assert stats.steps_total < 25


def test_grammars_hold_for_what_is_guessed(smol: Pair, tokenizer: Tokenizer) -> None:
    grammar = r"start: /[a-z ]{40,60}(, [a-z]+)*\./"
    requests = [
        Request(
            id=text,
            prompt_ids=tokenizer.encode(text),
            params=SamplingParams(max_tokens=60, temperature=1, seed=3, grammar=grammar),
        )
        for text in TEXTS
    ]
    alone, _, _ = smol.answer(requests, drafted=False)
    together, _, stats = smol.answer(requests, drafted=True)
    assert together == alone
    assert stats.model_accepted_tokens_total > 5


# --- Sampling, against transformers -------------------------------------------------------------------------

TEMPERATURE, TOP_K, ANSWERS = 0.15, 4, 1200
PROMPT = tiny.byte_ids("A tiny model")


def chances(model: PreTrainedModel, ids: list[int]) -> dict[int, float]:
    """What the next token is drawn from."""
    logits = tiny.logits(model, ids)[-1].astype(np.float64) / TEMPERATURE
    best = np.argsort(-logits)[:TOP_K]
    weights = np.exp(logits[best] - logits[best].max())
    return dict(zip(best.tolist(), (weights / weights.sum()).tolist(), strict=True))


def joint(model: PreTrainedModel) -> dict[tuple[int, ...], float]:
    """Of the first three tokens."""
    found: dict[tuple[int, ...], float] = {}
    for a, p in chances(model, PROMPT).items():
        for b, q in chances(model, [*PROMPT, a]).items():
            for c, r in chances(model, [*PROMPT, a, b]).items():
                found[a, b, c] = p * q * r
    return found


@pytest.fixture(scope="module")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Pair]:
    """A model, and one with other weights that thinks a little like it."""
    folder = tmp_path_factory.mktemp("pair")
    model, other = tiny.make("qwen2"), tiny.make("qwen2")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.15 * parameter.std() * torch.randn_like(parameter))
    tiny.write(folder / "model.gguf", model, "qwen2", tokenizer=True)
    tiny.write(folder / "draft.gguf", other, "qwen2", tokenizer=True)
    config = LoadConfig(path=str(folder / "model.gguf"), draft=str(folder / "draft.gguf"), context=256)
    runner, draft = load_models(config)
    assert draft is not None
    return model, Pair(runner, draft)


def test_answers_follow_the_distribution_of_the_model(tiny_pair: tuple[PreTrainedModel, Pair]) -> None:
    """Chi-square of the first three tokens, whose probabilities transformers tells."""
    model, pair = tiny_pair
    params = [
        SamplingParams(max_tokens=5, temperature=TEMPERATURE, top_k=TOP_K, seed=i) for i in range(ANSWERS)
    ]
    requests = [Request(id=str(p.seed), prompt_ids=PROMPT, params=p) for p in params]
    tokens, _, stats = pair.answer(requests, drafted=True)
    checked, right = stats.model_drafted_tokens_total, stats.model_accepted_tokens_total
    assert checked > ANSWERS and 0.2 < right / checked < 0.95, "guesses must often be wrong, and often right"
    wanted = joint(model)
    counts = Counter(tuple(answer[:3]) for answer in tokens.values())
    assert counts.keys() <= wanted.keys()
    likely = [key for key, p in wanted.items() if ANSWERS * p > 5]
    cells = [(counts[key], ANSWERS * wanted[key]) for key in likely]
    cells.append((ANSWERS - sum(n for n, _ in cells), ANSWERS - sum(p for _, p in cells)))  # all others
    square = sum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = len(cells) - 1
    # Wilson and Hilferty's approximation of the quantile at 3.3 standard deviations: 1 in 2000
    limit = freedom * (1 - 2 / (9 * freedom) + 3.3 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert freedom > 20 and square < limit


# --- Vocabularies -------------------------------------------------------------------------------------------


def words(path: str, tokens: list[str], kinds: list[int] | None = None) -> Any:
    metadata: dict[str, Any] = {"tokenizer.ggml.tokens": tokens}
    if kinds is not None:
        metadata["tokenizer.ggml.token_type"] = np.array(kinds, np.int32)
    return SimpleNamespace(path=path, metadata=metadata)


def test_padding_may_differ() -> None:
    """As in the distillations of DeepSeek-R1: 151936 rows in the one for 1.5B, 152064 in that for 7B."""
    data = Path(__file__).parents[1] / "data" / "deepseek-r1-distill-qwen-7b.tokenizer.json.gz"
    metadata = json.loads(gzip.decompress(data.read_bytes()))
    tokens, kinds = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    large, small = words("7b", tokens, kinds), words("1.5b", tokens[:151936], kinds[:151936])
    check_vocabularies(large, small)
    check_vocabularies(small, large)
    check_vocabularies(words("1b", ["a", "b"]), words("7b", ["a", "b", "c"], [1, 1, 5]))
    check_vocabularies(words("a", ["a", "x"], [1, 5]), words("b", ["a", "y"], [1, 5]))


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["a", "c"], "token 1 is 'c' there, and 'b' here"),
        (["a"], "token 1 is missing there, and 'b' here"),
        (["a", "b", "c"], "token 2 is 'c' there, and missing here"),
    ],
)
def test_other_vocabularies_are_refused(tokens: list[str], said: str) -> None:
    with pytest.raises(TreadleError, match=re.escape(f"the draft model small does not fit large: {said}")):
        check_vocabularies(words("large", ["a", "b"]), words("small", tokens))


@pytest.mark.parametrize(("rows", "draft_rows"), [(tiny.VOCAB, 384), (384, tiny.VOCAB)])
def test_tables_of_different_length(tmp_path: Path, rows: int, draft_rows: int) -> None:
    """Ids beyond the tokens can be chosen by a random model, but not be read by the shorter one."""
    for name, size in (("model", rows), ("draft", draft_rows)):
        model = tiny.make("qwen2", vocab_size=size)
        tiny.write(tmp_path / f"{name}.gguf", model, "qwen2", tokenizer=True)
    config = LoadConfig(path=str(tmp_path / "model.gguf"), draft=str(tmp_path / "draft.gguf"), context=256)
    runner, draft = load_models(config)
    assert draft is not None
    pair = Pair(runner, draft)
    params = [SamplingParams(max_tokens=30, temperature=1.0, seed=i) for i in range(20)]
    requests = [Request(id=str(p.seed), prompt_ids=PROMPT, params=p) for p in params]
    alone, _, _ = pair.answer(requests, drafted=False)
    together, _, stats = pair.answer(requests, drafted=True)
    assert together == alone
    assert stats.model_drafted_tokens_total > 20


# --- Loading ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    tiny.write(folder / "tiny.gguf", tiny.make("qwen2"), "qwen2", tokenizer=True)
    return folder


def test_memory_counts_both(files: Path) -> None:
    smol, path = str(Path(hub.resolve(None))), str(files / "tiny.gguf")
    one = outline(LoadConfig(path=path, context=256)).memory
    assert outline(LoadConfig(path=path, draft=path, context=256)).memory == 2 * one
    both = LoadConfig(path=smol, draft=smol, context=8192)
    least = outline(both).memory
    assert least == 2 * outline(LoadConfig(path=smol, context=8192)).memory
    with pytest.raises(
        TreadleError, match=r"needs .* for weights and .*, and its draft model 27\d\.\d MiB, but"
    ):
        load_models(msgspec.structs.replace(both, memory=least - 1))


def test_a_draft_of_another_family_is_refused_at_once(files: Path) -> None:
    with pytest.raises(TreadleError, match=r"draft model .*tiny\.gguf does not fit .*SmolLM2.*: token 0 is"):
        LLM(draft=files / "tiny.gguf")
    with pytest.raises(TreadleError, match="draft is 3; it must be a name"):
        LLM(draft=3)  # type: ignore[arg-type]


def test_a_draft_without_speculation_is_refused(files: Path) -> None:
    path = str(files / "tiny.gguf")
    with pytest.raises(TreadleError, match="speculation off"):
        outline(LoadConfig(path=path, draft=path, speculation=False))


def test_python_interface(files: Path) -> None:
    path = files / "tiny.gguf"
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=1)
    with LLM(path, context=256) as alone, LLM(path, context=256, draft=path) as drafted:
        assert (
            alone.generate(["Hello"], params)[0].token_ids == drafted.generate(["Hello"], params)[0].token_ids
        )
