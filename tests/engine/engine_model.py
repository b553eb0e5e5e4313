"""A tiny model behind the StepRunner protocol, whose every token depends on every KV entry before it.

The KV entry of a position is a hash of its token and of all earlier entries, read through the block table,
and the next token is taken from the entry of the last one. A wrong table, a block given away too early, a
prefix matched wrongly or a token run twice therefore changes the answer. ``expected`` computes the same from
a plain list.

With ``habit`` the model mostly counts on, so that its tokens can be guessed from earlier ones; the KV decides
when it does something else. With a seed its choices depend on the number of earlier ones as well.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from treadle.core import Output, Request, SamplingParams, TreadleError
from treadle.engine.engine import Engine, EngineConfig
from treadle.engine.interfaces import Ids, SampleResult, SamplerState
from treadle.engine.kv.pool import BLOCK

VOCAB = 1000
_PRIME = np.uint64(0x9E3779B97F4A7C15)


def entry(token: int, earlier: NDArray[np.uint64]) -> np.uint64:
    weights = np.arange(1, len(earlier) + 1, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    with np.errstate(over="ignore"):
        mixed = (np.dot(earlier, weights) + np.uint64(token) + np.uint64(len(earlier))) * _PRIME
    return np.uint64(mixed ^ (mixed >> np.uint64(29)))


def token_of(value: np.uint64) -> int:
    return int(value >> np.uint64(7)) % VOCAB


def choice(value: np.uint64, last: int, habit: bool, seed: int | None, chosen: int) -> int:
    """The token after ``last``, as choice number ``chosen``."""
    with np.errstate(over="ignore"):
        value = value if seed is None else (value ^ np.uint64(seed * 1_000_003 + chosen)) * _PRIME
    if habit and int(value >> np.uint64(40)) % 10:
        return (last + 1) % 20
    return token_of(value)


def expected(prompt: list[int], count: int, *, habit: bool = False, seed: int | None = None) -> list[int]:
    """The next ``count`` tokens after ``prompt``."""
    tokens, entries = list(prompt), np.zeros(len(prompt) + count, np.uint64)
    done = 0
    while len(tokens) < len(prompt) + count:
        for i in range(done, len(tokens)):
            entries[i] = entry(tokens[i], entries[:i])
        done = len(tokens)
        tokens.append(choice(entries[done - 1], tokens[-1], habit, seed, done - len(prompt)))
    return tokens[len(prompt) :]


class NothingLeft(ValueError):
    def __init__(self, picks: list[int]) -> None:
        super().__init__("nothing is left to choose from")
        self.picks = picks


class State:
    def __init__(self, request: Request) -> None:
        self.bias = dict(request.params.logit_bias)
        self.logprobs = request.params.logprobs
        self.seed = request.params.seed
        self.accepted: list[int] = []

    def accept(self, token: int) -> None:
        self.accepted.append(token)


class ModelRunner:
    """Its time is a clock of its own that every step moves on by ``cost(decodes, prompt tokens)`` seconds."""

    def __init__(
        self,
        *,
        max_tokens: int = 64,
        max_sequences: int = 8,
        context: int = 512,
        num_blocks: int = 64,
        eos_ids: frozenset[int] = frozenset(),
        habit: bool = False,
        embeds: bool = False,
        cost: Callable[[int, int], float] = lambda decodes, prefill: 0.01 + 0.001 * decodes + 0.001 * prefill,
    ) -> None:
        self.max_tokens = max_tokens
        self.max_sequences = max_sequences
        self.context = context
        self.num_blocks = num_blocks
        self.vocab_size = VOCAB
        self.eos_ids = eos_ids
        self.threads, self.isa, self.weight_bytes = 1, "toy", 0
        self.cache_bytes = 0
        self.embeds = embeds
        self.tables = np.full((max_sequences, -(-context // BLOCK)), -1, np.int32)
        self.steps: list[list[int]] = []  # query lengths of every step
        self.tokens_run = 0
        self.states: list[State] = []  # of all requests
        self.now = 0.0
        self._cost = cost
        self._kv = np.zeros((num_blocks, BLOCK), np.uint64)
        self._habit = habit
        self._logits: list[tuple[np.uint64, int]] = []

    def run(self, tokens: Ids, query_lens: Ids, past_lens: Ids, slots: Ids, logits_rows: Ids) -> None:
        assert 0 < len(tokens) <= self.max_tokens
        assert len(set(slots.tolist())) == len(slots) <= self.max_sequences
        assert query_lens.sum() == len(tokens)
        assert len(logits_rows) <= self.max_sequences
        self.steps.append(query_lens.tolist())
        self.tokens_run += len(tokens)
        values: list[tuple[np.uint64, int]] = []
        at = 0
        for length, past, slot in zip(query_lens.tolist(), past_lens.tolist(), slots.tolist(), strict=True):
            blocks = self.tables[slot, : -(-(past + length) // BLOCK)]
            kv = self._kv[blocks].reshape(-1)
            for i in range(past, past + length):
                kv[i] = self._kv[blocks[i // BLOCK], i % BLOCK] = entry(int(tokens[at]), kv[:i])
                values.append((kv[i], int(tokens[at])))
                at += 1
        self._logits = [values[i] for i in logits_rows]
        ones = sum(length == 1 for length in query_lens.tolist())
        self.now += self._cost(ones, len(tokens) - ones)

    def step_bytes(self, query_lens: Ids, past_lens: Ids, logits_rows: Ids) -> int:
        return 1000 + 100 * len(logits_rows) + int(query_lens.sum() + past_lens.sum())

    def sample(self, rows: Sequence[int], states: Sequence[SamplerState]) -> SampleResult:
        mine = [state for state in states if isinstance(state, State)]
        if bad := [i for i, state in enumerate(mine) if state.bias]:
            raise NothingLeft(bad)
        chosen = [
            choice(*self._logits[row], self._habit, state.seed, len(state.accepted))
            for row, state in zip(rows, mine, strict=True)
        ]
        tokens = np.array(chosen, np.int32)
        logprobs = np.array([-0.5 if state.logprobs is not None else np.nan for state in mine], np.float32)
        tops = [None if s.logprobs is None else [(int(t), -0.5)] for t, s in zip(tokens, mine, strict=True)]
        return tokens, logprobs, tops

    def embed(self, rows: Sequence[int]) -> NDArray[np.float32]:
        return np.array([[float(token_of(self._logits[row][0])), 1.0] for row in rows], np.float32)

    def copy_block(self, source: int, target: int) -> None:
        self._kv[target] = self._kv[source]

    def use_threads(self, count: int) -> None:
        assert 1 <= count <= self.threads

    def new_state(self, request: Request) -> State:
        if request.params.temperature < 0:
            raise ValueError(f"temperature is {request.params.temperature}; it must be at least 0")
        self.states.append(State(request))
        return self.states[-1]


class DraftRunner(ModelRunner):
    """The same model, or one that chooses something else for a share of ``wrong`` of the tokens. It knows the
    first ``rows`` tokens of the vocabulary.
    """

    def __init__(self, *, wrong: float = 0.0, rows: int = VOCAB, **runner: Any) -> None:
        super().__init__(**runner)
        self.rows, self._wrong = rows, wrong
        self.weight_bytes = 100

    def run(self, tokens: Ids, query_lens: Ids, past_lens: Ids, slots: Ids, logits_rows: Ids) -> None:
        assert int(tokens.max()) < self.rows
        super().run(tokens, query_lens, past_lens, slots, logits_rows)

    def sample(self, rows: Sequence[int], states: Sequence[SamplerState]) -> SampleResult:
        tokens, logprobs, tops = super().sample(rows, states)
        for i, row in enumerate(rows):
            if int(self._logits[row][0] >> np.uint64(13)) % 1000 < 1000 * self._wrong:
                tokens[i] = (tokens[i] + 7) % 20
        return np.minimum(tokens, self.rows - 1).astype(np.int32), logprobs, tops

    def fork(self, state: SamplerState) -> State:
        assert isinstance(state, State)
        copy = State.__new__(State)
        copy.bias, copy.logprobs, copy.seed = state.bias, state.logprobs, state.seed
        copy.accepted = state.accepted.copy()
        return copy


def request(id: str, prompt: list[int], max_tokens: int | None = 8, **fields: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **fields.pop("params", {}))
    return Request(id=id, prompt_ids=prompt, params=params, **fields)


def prompt(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, length)]


def make_engine(
    config: EngineConfig | None = None, draft: DraftRunner | None = None, **runner: Any
) -> tuple[Engine, ModelRunner]:
    model = ModelRunner(**runner)
    model.weight_bytes = 1000
    clocks: list[ModelRunner] = [model] if draft is None else [model, draft]
    clock = lambda: sum(runner.now for runner in clocks)  # noqa: E731
    return Engine(model, config or EngineConfig(), clock, draft=draft), model


class LoadConfig(msgspec.Struct, kw_only=True):
    """What a test wants of an engine process."""

    step_seconds: float = 0.0  # of real time
    error: str | None = None  # loading ends with it
    die: bool = False  # while loading
    seconds: float = 0.0  # of loading
    file: str = os.devnull  # loading fails when it is not there
    log: str | None = None  # file to which each step adds a line: when it began and ended


def load(config: LoadConfig, progress: Callable[[float], None]) -> Engine:
    """The loader of the tests' engine processes."""
    progress(0.5)
    time.sleep(config.seconds)
    if config.die:
        os.kill(os.getpid(), signal.SIGKILL)
    if config.error:
        raise TreadleError(config.error)
    if not Path(config.file).exists():
        raise TreadleError(f"no such file: {config.file}")

    def cost(_decodes: int, _prefill: int) -> float:
        began = time.monotonic()
        time.sleep(config.step_seconds)
        if config.log is not None:
            with Path(config.log).open("a") as log:
                log.write(f"{began} {time.monotonic()} {os.getpid()}\n")
        return 0.01

    return make_engine(EngineConfig(max_queue=40), max_sequences=8, cost=cost)[0]


class Last:
    """The last output of a request, which has a usage."""

    def __init__(self, output: Output) -> None:
        assert output.usage is not None
        self.usage = output.usage
        self.finish_reason = output.finish_reason
        self.stop_token = output.stop_token
        self.error = output.error


class Results:
    """Steps an engine and collects what each request got."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, Last] = {}
        self.order: list[str] = []  # of ids, by last output

    def step(self) -> list[str]:
        """One step; returns the ids that got tokens."""
        got = []
        for output in self.engine.step():
            assert output.id not in self.last, "an output after the last one"
            self.tokens.setdefault(output.id, []).extend(output.token_ids)
            if output.token_ids:
                got.append(output.id)
            if output.finish_reason:
                self.last[output.id] = Last(output)
                self.order.append(output.id)
        return got

    def run(self) -> Results:
        steps = 0
        while self.engine.has_work:
            self.step()
            steps += 1
            assert steps < 100_000, "the engine makes no progress"
        self.engine.check()
        return self


def run_mixed(engine: Engine, rng: random.Random, *, habit: bool) -> Results:
    """25 requests that come, wait and are cancelled at random, some with common beginnings: each gets what
    the model says.
    """
    begins = [prompt(100 + i, rng.randrange(20, 150)) for i in range(3)]
    wanted: dict[str, tuple[list[int], int, int | None]] = {}
    results = Results(engine)
    for i in range(25):
        ids = rng.choice([[], *begins]) + prompt(i, rng.randrange(1, 100))
        count, draws = rng.choice([1, 5, 40, 120]), rng.choice([None, rng.randrange(1000)])
        wanted[f"r{i}"] = (ids, count, draws)
        params: dict[str, Any] = {"seed": draws}
        engine.add(request(f"r{i}", ids, count, params=params, priority=rng.choice([0, 0, 1])))
        for _ in range(rng.choice([0, 10, 60])):
            results.step()
        engine.check()
        if rng.random() < 0.2:
            engine.cancel(f"r{rng.randrange(i + 1)}")
    results.run()
    for id, (ids, count, draws) in wanted.items():
        if results.last[id].finish_reason == "cancelled":
            count = len(results.tokens.get(id, []))
        assert results.tokens.get(id, []) == expected(ids, count, habit=habit, seed=draws), id
    assert engine.stats().kv_blocks_held == 0
    return results
