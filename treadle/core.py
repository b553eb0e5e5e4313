"""The few types that every part of Treadle shares. This module imports nothing of ours."""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "cancelled", "error"]


class TreadleError(Exception):
    """An error whose text is meant for the user: what is wrong, what is allowed, what to do."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen. Every default is a no-op except ``max_tokens`` and ``temperature``.

    Filled by the caller (HTTP route, CLI, Python API); read by the scheduler and the native sampler.
    """

    max_tokens: int | None = 256  # None: until the context is full
    min_tokens: int = 0  # end-of-text and stop ids are suppressed before this many output tokens
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output (CTRL, arXiv 1909.05858)
    presence_penalty: float = 0.0  # over output only (OpenAI API)
    frequency_penalty: float = 0.0  # over output only (OpenAI API)
    logit_bias: dict[int, float] = {}
    seed: int | None = None  # None: drawn from the system once per request
    stop: str | tuple[str, ...] = ()  # matched on text, by treadle.text
    stop_token_ids: tuple[int, ...] = ()  # matched on ids, by the engine
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: chosen token and the k most likely ones
    grammar: str | None = None  # what the answer must follow, as treadle.engine.grammar takes it
    # where the grammar begins: at once, after the think block that the prompt opened, or the model may open
    reasoning: Literal["none", "open", "may_open"] = "none"
    reasoning_budget: int | None = None  # tokens after which the think block is closed; None: any number


class Request(msgspec.Struct, kw_only=True):
    """One sequence to continue. Created by the caller, owned by the scheduler until it is finished."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0  # lower runs first (as in vLLM)
    cache_salt: str = ""  # prefix-cache blocks are shared only between equal salts
    user: str = ""  # fairness group, usually the API key's id


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities (natural log) of one output token, before penalties and truncation."""

    logprob: float
    top: list[tuple[int, float]]  # (token id, logprob), most likely first


class Usage(msgspec.Struct, kw_only=True):
    """Token counts of one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache


class Timing(msgspec.Struct, kw_only=True):
    """Wall-clock seconds of one request, measured by the engine."""

    ttft: float = 0.0  # arrival to first token
    prefill_s: float = 0.0  # first scheduled to first token
    decode_s: float = 0.0  # first to last token


class Output(msgspec.Struct, kw_only=True):
    """What one engine step adds to one request. ``finish_reason`` is set exactly once, on the last one."""

    id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the id that ended the request; never part of ``token_ids``
    embedding: bytes | None = None  # float32 values, little endian, of length 1; only of embedding models
    usage: Usage | None = None  # on the last one
    timing: Timing | None = None  # on the last one
    error: str | None = None  # with finish_reason "error"
