"""The native sampler against independent NumPy (float64, full sorts) versions of everything it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from treadle._native import NoTokenLeft, Pool, Sampler, SamplerState

Floats = npt.NDArray[np.floating[Any]]

SIZES = [1, 7, 63, 64, 65, 1023, 1024, 1025, 5003, 152064]
REAL_VOCAB = 152064


# --- Oracles ------------------------------------------------------------------------------------------------


def philox4x32(key: int, position: int) -> list[int]:
    """Philox4x32-10 as published (Salmon et al., SC 2011), checked below against its known answers."""
    word = 0xFFFFFFFF
    c = [position & word, position >> 32 & word, 0, 0]
    k = [key & word, key >> 32 & word]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & word, (p0 >> 32) ^ c[3] ^ k[1], p0 & word]
        k = [(k[0] + 0x9E3779B9) & word, (k[1] + 0xBB67AE85) & word]
    return c


def uniform(seed: int, position: int) -> float:
    words = philox4x32(seed, position)
    return float((words[1] << 32 | words[0]) >> 11) / 2.0**53


def distribution(
    logits: Floats, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> npt.NDArray[np.float64]:
    """Probabilities after temperature, top-k, top-p and min-p, by sorting the whole row."""
    x = logits.astype(np.float64) / temperature
    order = np.lexsort((np.arange(x.size), -x))
    p = np.exp(x[order] - x.max())
    if 0 < top_k < x.size:
        p[top_k:] = 0
    p /= p.sum()
    if top_p < 1:
        reached = np.flatnonzero(np.cumsum(p) >= top_p - 1e-12)  # the running sum's own rounding
        p[(reached[0] if reached.size else p.size) + 1 :] = 0
    p[p < min_p * p[0]] = 0
    result = np.zeros(p.size, np.float64)
    result[order] = p / p.sum()
    return result


def log_softmax(row: Floats) -> npt.NDArray[np.float64]:
    x = row.astype(np.float64)
    result: npt.NDArray[np.float64] = x - x.max() - np.log(np.exp(x - x.max()).sum())
    return result


def penalised(
    row: Floats,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    bias: dict[int, float] | None = None,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> npt.NDArray[np.float64]:
    x = row.astype(np.float64)
    for token, value in (bias or {}).items():
        x[token] += value
    for token in set(prompt) | set(output):
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token, count in Counter(output).items():
        x[token] -= frequency * count + presence
    return x


# --- Helpers ------------------------------------------------------------------------------------------------


def one(row: Floats, state: SamplerState) -> int:
    tokens, _, _ = Sampler(row.size).sample(row[None], [0], [state])
    return int(tokens[0])


def draws(row: Floats, count: int, **params: Any) -> npt.NDArray[np.int32]:
    """Draws of states that differ in the seed only."""
    states = [SamplerState(row.size, seed=seed, **params) for seed in range(count)]
    return Sampler(row.size).sample(row[None], [0] * count, states)[0]


def kept(row: Floats, **params: Any) -> set[int]:
    """Ids that can be drawn, for rows whose kept tokens all have a fair share."""
    return {int(token) for token in draws(row, 400, **params)}


def assert_drawn_from(p: npt.NDArray[np.float64], token: int, u: float, slack: float = 3e-6) -> None:
    """`token` is where the cumulative distribution in id order passes u, up to float32 rounding."""
    above = float(p[: token + 1].sum())
    assert above - p[token] - slack <= u <= above + slack, (token, u, above, p[token])


def float_row(values: Sequence[float]) -> npt.NDArray[np.float32]:
    return np.array(values, np.float32)


def log_row(probabilities: Sequence[float]) -> npt.NDArray[np.float32]:
    return np.log(float_row(probabilities))


# --- Greedy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_greedy_takes_the_lowest_of_the_largest(size: int) -> None:
    rng = np.random.default_rng(size)
    rows = np.stack([rng.normal(0, 3, size), rng.integers(0, 4, size), np.full(size, -7.0)]).astype(
        np.float32
    )
    rows = np.concatenate([rows, rows[:1]])
    rows[3, [size - 1, size // 2]] = 50  # a tie of the last logit, in the tail of every vector loop
    states = [SamplerState(size, temperature=0) for _ in rows]
    tokens, _, _ = Sampler(size).sample(rows, list(range(len(rows))), states)
    assert tokens.tolist() == rows.argmax(axis=1).tolist()
    assert tokens.dtype == np.int32


@pytest.mark.parametrize("position", [0, 5, 64, 1999])
def test_nan_counts_as_minus_infinity_and_infinity_as_the_largest(position: int) -> None:
    row = np.random.default_rng(1).normal(0, 1, 2000).astype(np.float32)
    row[100:1500] = np.nan
    row[[3, 1998]] = -np.inf
    clean = np.where(np.isnan(row), -np.inf, row)
    greedy = SamplerState(2000, temperature=0)
    assert one(row, greedy) == clean.argmax()
    assert {int(t) for t in draws(row, 500)} <= set(np.flatnonzero(np.isfinite(clean)).tolist())
    for seed in range(50):
        state = SamplerState(2000, seed=seed, top_p=0.9, logprobs=0)
        assert_drawn_from(distribution(clean, top_p=0.9), one(row, state), uniform(seed, 0))
    row[position] = np.inf
    assert one(row, greedy) == position
    for params in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"logit_bias": {position: -5.0}}):
        assert set(draws(row, 20, **params).tolist()) == {position}


def test_two_infinities_share_the_probability() -> None:
    row = float_row([1, np.inf, 2, np.inf])
    counts = Counter(draws(row, 400).tolist())
    assert set(counts) == {1, 3} and min(counts.values()) > 140
    _, logprobs, _ = Sampler(4).sample(row[None], [0], [SamplerState(4, logprobs=0)])
    assert logprobs[0] == pytest.approx(np.log(0.5), abs=1e-6)


# --- Random numbers -----------------------------------------------------------------------------------------


def test_the_oracle_is_philox() -> None:
    assert philox4x32(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("seed", [0, 1, 42, 2**40 + 7, 2**64 - 1, -1, -(2**63)])
def test_a_draw_depends_on_seed_and_position_only(seed: int) -> None:
    size = 4096
    row = np.zeros(size, np.float32)
    state = SamplerState(size, seed=seed)
    for position in range(40):
        assert state.output_tokens == position
        token = one(row, state)
        assert token == one(row, state)  # asking again changes nothing
        assert token == int(uniform(seed % 2**64, position) * size)
        state.accept((token + position) % size)  # which token was accepted does not matter


def test_without_seed_requests_differ() -> None:
    row = np.zeros(50000, np.float32)
    tokens = {one(row, SamplerState(row.size)) for _ in range(10)}
    assert len(tokens) > 5


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.5},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    count = 20000
    row = np.random.default_rng(5).normal(0, 1.5, 60).astype(np.float32)
    p = distribution(row, **params)
    by_seed = np.bincount(draws(row, count, **params), minlength=row.size)
    state = SamplerState(row.size, seed=99, **params)
    sampler, by_position = Sampler(row.size), np.zeros(row.size)
    for _ in range(count):
        token = int(sampler.sample(row[None], [0], [state])[0][0])
        by_position[token] += 1
        state.accept(token)
    for observed in (by_seed, by_position):
        assert observed[p == 0].sum() == 0
        expected = count * p[p > 0]
        chi2 = float(((observed[p > 0] - expected) ** 2 / expected).sum())
        freedom = int((p > 0).sum()) - 1
        assert chi2 < freedom + 5 * np.sqrt(2 * freedom)  # 5 standard deviations


# --- Truncation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [5, 64, 1000, 20011, REAL_VOCAB])
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 3.0, 12.0])
def test_every_combination_draws_what_a_full_sort_draws(size: int, spread: float) -> None:
    rng = np.random.default_rng(size)
    row = rng.normal(0, spread, size).astype(np.float32)
    for i, (temperature, top_k, top_p, min_p) in enumerate(
        [
            (1.0, 0, 1.0, 0.0),
            (0.6, 0, 0.95, 0.0),
            (1.0, 0, 0.999, 0.0),
            (1.5, 0, 0.3, 0.0),
            (0.7, 20, 0.8, 0.0),
            (1.0, 50, 1.0, 0.0),
            (1.0, 3000, 0.9, 0.0),
            (1.0, 0, 1.0, 0.05),
            (2.0, 0, 0.9, 0.02),
            (1.3, 40, 0.95, 0.1),
        ]
    ):
        params: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        p = distribution(row, temperature, top_k, top_p, min_p)
        for seed in range(3):
            token = one(row, SamplerState(size, seed=100 * i + seed, **params))
            assert_drawn_from(p, token, uniform(100 * i + seed, 0))


def test_top_p_keeps_the_shortest_run_that_reaches_it() -> None:
    row = log_row([1 / 8, 1 / 2, 1 / 8, 1 / 4])
    assert kept(row, top_p=1.0) == {0, 1, 2, 3}
    assert kept(row, top_p=0.80) == {0, 1, 3}  # of the two equal ones the lower id
    assert kept(row, top_p=0.74) == {1, 3}
    assert kept(row, top_p=0.49) == {1}
    assert kept(row, top_p=1e-12) == {1}
    assert kept(row, top_p=0.0) == {1}


def test_top_p_of_a_flat_row_keeps_its_share() -> None:
    row = np.zeros(1000, np.float32)
    assert max(draws(row, 3000, top_p=0.25).tolist()) in (248, 249, 250)
    assert max(draws(row, 100, top_p=0.0).tolist()) == 0


def test_top_k_breaks_ties_by_id_and_zero_means_all() -> None:
    row = float_row([1, 2, 1, 2, 1, 2])
    assert kept(row, top_k=1) == {1}
    assert kept(row, top_k=2) == {1, 3}
    assert kept(row, top_k=4) == {0, 1, 3, 5}
    assert kept(row, top_k=0) == kept(row, top_k=6) == kept(row, top_k=1000) == set(range(6))


def test_top_p_renormalises_after_top_k() -> None:
    row = log_row([0.3, 0.25, 0.25, 0.2])
    assert kept(row, top_p=0.5) == {0, 1}
    assert kept(row, top_p=0.5, top_k=2) == {0}  # 0.3 of 0.55


def test_min_p_is_relative_to_the_most_likely() -> None:
    row = log_row([0.5, 0.3, 0.15, 0.05])
    assert kept(row, min_p=0.09) == {0, 1, 2, 3}
    assert kept(row, min_p=0.29) == {0, 1, 2}
    assert kept(row, min_p=0.31) == {0, 1}
    assert kept(row, min_p=1.0) == {0}
    assert kept(row, min_p=0.31, temperature=4.0) == {0, 1, 2, 3}  # after temperature


@pytest.mark.parametrize("temperature", [1e-320, 1e-40, 1e-6])
def test_a_tiny_temperature_is_greedy_up_to_ties(temperature: float) -> None:
    row = float_row([1, 3, 2, 3, -np.inf])
    assert kept(row, temperature=temperature) == {1, 3}
    assert kept(row, temperature=temperature, top_p=0.9, min_p=0.1) == {1, 3}


def test_a_huge_temperature_is_uniform_over_possible_tokens() -> None:
    row = float_row([100, -100, -np.inf, 0])
    assert kept(row, temperature=1e300) == kept(row, temperature=1e300, top_k=4, min_p=0.5) == {0, 1, 3}


# --- Changes of logits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("seed", range(6))
def test_penalties_and_bias_as_defined(temperature: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = 300
    row = rng.normal(0, 2, size).astype(np.float32)
    prompt = rng.integers(0, size, 80).tolist()
    bias = {int(t): float(rng.normal(0, 3)) for t in rng.integers(0, size, 10)}
    penalties = [(1.3, 0, 0), (0.8, 0, 0), (1, 0.7, 0), (1, 0, 0.4), (1.2, 0.5, -0.3), (1, 0, 0)]
    repetition, presence, frequency = penalties[seed]
    state = SamplerState(
        size,
        prompt_ids=prompt,
        temperature=temperature,
        logit_bias=bias,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        seed=seed,
    )
    output: list[int] = []
    for position in range(30):
        x = penalised(row, prompt, output, bias, repetition, presence, frequency)
        token = one(row, state)
        if temperature == 0:
            assert token == x.argmax()
        else:
            assert_drawn_from(distribution(x, temperature), token, uniform(seed, position))
        output.append(token)
        state.accept(token)


def test_repetition_penalty_counts_prompt_others_only_output() -> None:
    row = float_row([2.0, 1.9, -1.0])
    assert one(row, SamplerState(3, temperature=0, prompt_ids=[0], repetition_penalty=1.1)) == 1
    assert (
        one(row, SamplerState(3, temperature=0, prompt_ids=[0], presence_penalty=1.0, frequency_penalty=1.0))
        == 0
    )
    state = SamplerState(3, temperature=0, prompt_ids=[0], presence_penalty=0.05, frequency_penalty=0.03)
    assert one(row, state) == 0
    state.accept(0)
    assert one(row, state) == 0  # 2 - 0.08
    state.accept(0)
    assert one(row, state) == 1  # 2 - 0.11


def test_stop_ids_wait_for_min_tokens() -> None:
    row = float_row([5, 4, 3, 2])
    state = SamplerState(4, temperature=0, min_tokens=2, stop_ids=[0, 1])
    chosen = []
    for _ in range(4):
        chosen.append(one(row, state))
        state.accept(chosen[-1])
    assert chosen == [2, 2, 0, 0]
    biased = SamplerState(4, min_tokens=1, stop_ids=[0, 1, 2], logit_bias={0: 1000.0})
    assert one(row, biased) == 3  # no bias lifts a suppressed token


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100, 5003, REAL_VOCAB])
@pytest.mark.parametrize("dtype", [np.uint32, np.int32])
def test_a_mask_allows_exactly_its_bits(size: int, dtype: type[np.generic]) -> None:
    rng = np.random.default_rng(size)
    row = rng.normal(0, 1, size).astype(np.float32)
    allowed = rng.random(size) < 0.3
    allowed[size - 1] = True
    bits = np.ones(-(-size // 32) * 32, np.uint8)  # bits beyond the vocabulary mean nothing
    bits[:size] = allowed
    words = np.packbits(bits, bitorder="little").view(dtype)
    masked = np.where(allowed, row, -np.inf)
    state = SamplerState(size, temperature=0, logit_bias={0: 0.5})
    biased = penalised(row, bias={0: 0.5})
    state.set_mask(words)
    words[:] = 0  # it was copied
    assert one(row, state) == np.where(allowed, biased, -np.inf).argmax()
    state.clear_mask()
    assert one(row, state) == biased.argmax()
    drawn = SamplerState(size, seed=4, top_p=0.9)
    drawn.set_mask(np.packbits(bits, bitorder="little").view(dtype))
    assert_drawn_from(distribution(masked, top_p=0.9), one(row, drawn), uniform(4, 0))


def test_a_mask_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    state = SamplerState(100, temperature=0)
    state.set_mask(np.array([4, 0, 0, 0], np.uint32))
    for words in (np.zeros(3, np.uint32), np.zeros(5, np.uint32), np.zeros(0, np.uint32)):
        with pytest.raises(
            ValueError, match=f"the mask has {words.size} words of 32 bits, but 100 tokens need 4"
        ):
            state.set_mask(words)
    with pytest.raises(TypeError):
        state.set_mask(np.zeros(4, np.float32))  # type: ignore[arg-type]
    assert one(np.arange(100, dtype=np.float32), state) == 2


# --- Log-probabilities --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
def test_logprobs_are_the_log_softmax_of_the_raw_row(size: int, scale: float) -> None:
    row = (np.random.default_rng(size).normal(0, 1, size) * scale + 30).astype(np.float32)
    count = min(20, size)
    state = SamplerState(
        size, seed=1, temperature=0.7, top_p=0.9, logit_bias={0: 3.0}, frequency_penalty=1.0, logprobs=count
    )
    state.accept(int(row.argmax()))
    tokens, logprobs, tops = Sampler(size).sample(row[None], [0], [state])
    expected = log_softmax(row)
    order = np.lexsort((np.arange(size), -row))[:count]
    assert logprobs[0] == pytest.approx(expected[tokens[0]], rel=1e-6, abs=2e-6)
    top = tops[0]
    assert top is not None
    assert [token for token, _ in top] == order.tolist()
    np.testing.assert_allclose([value for _, value in top], expected[order], rtol=1e-6, atol=2e-6)


def test_logprobs_only_where_asked_for() -> None:
    rows = np.zeros((1, 10), np.float32)
    states = [SamplerState(10, logprobs=None), SamplerState(10, logprobs=0), SamplerState(10, logprobs=3)]
    _, logprobs, tops = Sampler(10).sample(rows, [0, 0, 0], states)
    assert np.isnan(logprobs[0]) and logprobs[1] == logprobs[2] == pytest.approx(-np.log(10))
    assert tops[0] is None and tops[1] == []
    assert tops[2] is not None and [token for token, _ in tops[2]] == [0, 1, 2]


# --- Batches ------------------------------------------------------------------------------------------------


def mixed_states(size: int) -> list[SamplerState]:
    params: list[dict[str, Any]] = [
        {"temperature": 0},
        {},
        {"top_p": 0.9, "temperature": 0.6},
        {"top_k": 20, "logprobs": 5},
        {"min_p": 0.1, "logit_bias": {3: 2.0}},
        {"repetition_penalty": 1.3, "prompt_ids": list(range(100)), "temperature": 0},
    ]
    return [SamplerState(size, seed=i, **params[i % len(params)]) for i in range(20)]


def test_results_depend_on_neither_neighbours_nor_threads() -> None:
    size = 30011
    logits = np.random.default_rng(2).normal(0, 2.5, (7, size)).astype(np.float32)
    before = logits.copy()
    logits.flags.writeable = False
    rows = [i % 7 for i in range(20)]
    sampler = Sampler(size)
    alone = [
        sampler.sample(logits, [row], [state]) for row, state in zip(rows, mixed_states(size), strict=True)
    ]
    for pool in (None, Pool(1), Pool(2)):
        for order in (range(20), reversed(range(20))):
            picks, states = list(order), mixed_states(size)
            tokens, logprobs, tops = sampler.sample(
                logits, [rows[i] for i in picks], [states[i] for i in picks], pool
            )
            for at, i in enumerate(picks):
                assert tokens[at] == alone[i][0][0]
                np.testing.assert_array_equal(logprobs[at], alone[i][1][0])
                assert tops[at] == alone[i][2][0]
    np.testing.assert_array_equal(logits, before)


def test_logits_may_come_over_dlpack() -> None:
    row = np.random.default_rng(3).normal(0, 1, (2, 500)).astype(np.float32)

    class Tensor:
        def __dlpack__(self, **options: Any) -> Any:
            return row.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return row.__dlpack_device__()

    tokens, _, _ = Sampler(500).sample(Tensor(), [1], [SamplerState(500, temperature=0)])  # type: ignore[arg-type]
    assert tokens[0] == row[1].argmax()


def test_an_empty_batch_is_empty() -> None:
    tokens, logprobs, tops = Sampler(10).sample(np.zeros((0, 10), np.float32), [], [], Pool(2))
    assert tokens.shape == logprobs.shape == (0,) and tops == []


# --- Errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_left_names_its_picks_and_spares_the_others(temperature: float) -> None:
    size = 200
    logits = np.random.default_rng(7).normal(0, 1, (4, size)).astype(np.float32)
    logits[1] = -np.inf
    logits[2, ::2], logits[2, 1::2] = np.nan, -np.inf
    states = [SamplerState(size, temperature=temperature, seed=i) for i in range(4)]
    states[3].set_mask(np.zeros(7, np.uint32))
    sampler = Sampler(size)
    with pytest.raises(NoTokenLeft, match="no token can be chosen at position 1, 2, 3 of the batch") as error:
        sampler.sample(logits, [0, 1, 2, 3], states, Pool(2))
    assert error.value.picks == [1, 2, 3]
    assert isinstance(error.value, ValueError)
    assert sampler.sample(logits, [0], states[:1])[0][0] == one(logits[0], states[0])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, but must be 0 .greedy. or positive"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1, but must be 0 .all tokens. or positive"),
        ({"top_p": 1.5}, "top_p is 1.5, but must be between 0 and 1"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"min_p": -0.5}, "min_p is -0.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0, but must be positive"),
        ({"presence_penalty": float("inf")}, "presence_penalty is inf"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"logit_bias": {100: 1.0}}, r"logit_bias: token id 100 is outside the vocabulary \(0 to 99\)"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias is nan"),
        ({"stop_ids": [-1]}, "stop_ids: token id -1"),
        ({"prompt_ids": [100]}, "prompt_ids: token id 100"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logprobs": 101}, "logprobs is 101"),
        ({"seed": 2**64}, "seed must be between"),
        ({"seed": -(2**63) - 1}, "seed must be between"),
    ],
    ids=str,
)
def test_a_parameter_out_of_range_is_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplerState(100, **params)


def test_what_does_not_fit_together_is_refused() -> None:
    sampler, state, logits = Sampler(100), SamplerState(100), np.zeros((2, 100), np.float32)
    with pytest.raises(ValueError, match="vocab_size is 0"):
        Sampler(0)
    with pytest.raises(ValueError, match="accept: token id 100"):
        state.accept(100)
    with pytest.raises(ValueError, match="logits have 99 columns, but the vocabulary has 100 tokens"):
        sampler.sample(np.zeros((1, 99), np.float32), [0], [state])
    with pytest.raises(ValueError, match="row 2 was asked for, but logits have 2 rows"):
        sampler.sample(logits, [2], [state])
    with pytest.raises(ValueError, match="1 rows and 2 states"):
        sampler.sample(logits, [0], [state, state])
    with pytest.raises(ValueError, match="a state for 50 tokens cannot sample from logits of 100"):
        sampler.sample(logits, [0], [SamplerState(50)])
    with pytest.raises(TypeError):
        sampler.sample(logits.astype(np.float64), [0], [state])
    with pytest.raises(TypeError):
        sampler.sample(logits[:, ::2], [0], [state])


def test_a_copy_chooses_alike_and_goes_its_own_way() -> None:
    row = np.random.default_rng(3).normal(size=100).astype(np.float32)
    state = SamplerState(100, prompt_ids=[1], repetition_penalty=1.3, presence_penalty=0.5)
    for token in (7, 9):
        state.accept(token)
    state.set_mask(np.array([0xFFFF, 0xFFFF, 0xFFFF, 0], np.uint32))
    copy = SamplerState(state)
    for token in (4, 4, 70):
        copy.accept(token)
    copy.clear_mask()
    twin = SamplerState(state)
    for _ in range(20):
        token = one(row, state)
        assert one(row, twin) == token and token % 32 < 16
        state.accept(token)
        twin.accept(token)
    assert (copy.output_tokens, state.output_tokens) == (5, 22)
