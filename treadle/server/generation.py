"""From a validated body to engine requests, and from engine outputs to text. Shared by both completion
calls."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest

from treadle.core import Output, Request, SamplingParams, TokenLogprobs, TreadleError
from treadle.engine.interfaces import BadRequest, QueueFull, TooMany
from treadle.server.errors import ApiError
from treadle.server.schema import Sampling
from treadle.server.service import Served, Service, key_of
from treadle.server.textside import AnswerText, Reasoning, TextSide
from treadle.text.tools import ToolDelta, ToolParser

Number = TypeVar("Number", int, float)


def sampling_params(
    body: Sampling, served: Served, prompt_tokens: int, limit: int | None, param: str, logprobs: int | None
) -> SamplingParams:
    """The engine's parameters. Raises ApiError 400 when prompt and ``limit`` do not fit into the context."""
    room = served.context - prompt_tokens
    if room < 1:
        raise ApiError(
            400,
            f"{param}: the prompt has {prompt_tokens} tokens, but the context is {served.context} tokens "
            "and at least one is needed for the answer; shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )
    if limit is not None and limit > room:
        name = "max_completion_tokens" if getattr(body, "max_completion_tokens", None) else "max_tokens"
        raise ApiError(
            400,
            f"{name}: the prompt has {prompt_tokens} tokens and {limit} were asked for, together "
            f"{prompt_tokens + limit}, but the context is {served.context} tokens; ask for at most {room} "
            "or leave the limit out",
            param=name,
            code="context_length_exceeded",
        )
    limit = limit or room
    if body.min_tokens and body.min_tokens > limit:
        message = f"min_tokens: {body.min_tokens} is more than the {limit} tokens that the answer may have"
        raise ApiError(400, message, param="min_tokens", code="invalid_value")
    preset = served.preset
    return SamplingParams(
        max_tokens=limit,
        min_tokens=body.min_tokens or 0,
        temperature=_or(body.temperature, preset.temperature if preset else 1.0),
        top_k=max(_or(body.top_k, preset.top_k if preset else 0), 0),
        top_p=_or(body.top_p, preset.top_p if preset else 1.0),
        min_p=_or(body.min_p, preset.min_p if preset else 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=_logit_bias(body.logit_bias or {}, served.text.vocab_size),
        seed=body.seed,
        stop_token_ids=_token_ids(body.stop_token_ids or [], served.text.vocab_size, "stop_token_ids"),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
    )


def check_stream_options(body: Sampling) -> None:
    """``stream_options`` means nothing without ``stream``."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options", code="invalid_value")


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value


def _logit_bias(raw: dict[str, float], vocabulary: int) -> dict[int, float]:
    allowed = f"logit_bias: keys must be token ids from 0 to {vocabulary - 1}"
    if len(raw) > vocabulary:
        raise ApiError(400, f"{allowed}; got {len(raw)} keys", param="logit_bias", code="invalid_value")
    bias = {}
    for key, value in raw.items():
        canonical = key.isascii() and key.isdigit() and (key[0] != "0" or key == "0")
        if not canonical or len(key) > 10 or int(key) >= vocabulary:
            raise ApiError(
                400,
                f"{allowed}, without leading zeros; got {key[:20]!r}",
                param="logit_bias",
                code="invalid_value",
            )
        bias[int(key)] = value
    return bias


def _token_ids(ids: list[int], vocabulary: int, param: str) -> tuple[int, ...]:
    for token in ids:
        if token >= vocabulary:
            message = f"{param}: token ids go from 0 to {vocabulary - 1}; got {token}"
            raise ApiError(400, message, param=param, code="invalid_value")
    return tuple(ids)


@dataclass
class TokenText:
    """One output token with its logprobs, ready for both response shapes. ``data`` is the token's own bytes,
    ``offset`` the number of characters before it."""

    data: bytes
    offset: int
    logprob: float
    top: list[tuple[bytes, float]]

    def chat(self) -> dict[str, Any]:
        """The shape of ``choices[].logprobs.content[]``."""
        return {
            **_token_entry(self.data, self.logprob),
            "top_logprobs": [_token_entry(data, logprob) for data, logprob in self.top],
        }


def token_text(data: bytes) -> str:
    """A token as text; half characters become U+FFFD."""
    return data.decode("utf-8", "replace")


def _token_entry(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token_text(data), "logprob": logprob, "bytes": list(data)}


class TextDelta(NamedTuple):
    """Text that comes to a field of the message: ``content`` or ``reasoning_content``."""

    field: bytes
    text: str


@dataclass
class Piece:
    """What one engine output adds to a choice: texts and pieces of tool calls, in the order in which the
    model wrote them, and logprobs of its tokens."""

    parts: list[TextDelta | ToolDelta]
    tokens: list[TokenText] | None
    finish: str | None  # finish_reason of the API

    @property
    def text(self) -> str:
        """What there is of an answer that is nothing but text."""
        return "".join(part.text for part in self.parts if isinstance(part, TextDelta))


class Choice:
    """One answer being written: turns outputs into text, watches for stop strings, splits off reasoning and
    tool calls."""

    def __init__(
        self,
        request: Request,
        side: TextSide,
        text: AnswerText,
        splitter: Reasoning | None,
        tools: ToolParser | None,
    ) -> None:
        self.request = request
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.ended = False  # the engine has sent the last output
        self._side = side
        self._text = text
        self._splitter = splitter
        self._tools = tools

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the answer."""
        return self._text.stopped

    @property
    def in_call(self) -> bool:
        """Whether the answer ends, as far as it is, inside a tool call."""
        return self._tools is not None and self._tools.in_call

    @property
    def reasoning_tokens(self) -> int:
        """How many of the tokens are reasoning."""
        return bisect_left(self._text.offsets, self._splitter.length) if self._splitter else 0

    def feed(self, output: Output) -> Piece:
        """Raises ApiError when the engine failed."""
        before = len(self._text.offsets)
        if output.finish_reason in ("error", "cancelled"):
            raise ApiError(500, output.error or "the engine stopped this request", code="engine_error")
        self.completion_tokens += len(output.token_ids)
        text = self._text.push(output.token_ids)
        finish: str | None = "stop" if self._text.stopped is not None else output.finish_reason
        if finish is not None:
            text += self._text.finish()
        last = finish is not None
        reasoning, content = self._split(text, last)
        parts: list[TextDelta | ToolDelta] = []
        if reasoning:
            parts.append(TextDelta(b"reasoning_content", reasoning))
        if self._tools is not None:
            parts += self._read(self._tools, content, last)
            if self._tools.done or (finish == "stop" and self._tools.count and not self._tools.in_call):
                finish = "tool_calls"
        elif content:
            parts.append(TextDelta(b"content", content))
        return Piece(parts, self._tokens(output, self._text.offsets[before:]), finish)

    def note(self, output: Output) -> None:
        """Keep what the last output tells, also of a choice that is not read to its end."""
        self.ended = output.finish_reason is not None
        if output.usage is not None:
            self.cached_tokens = output.usage.cached_tokens

    def _split(self, text: str, last: bool) -> tuple[str, str]:
        """(reasoning, content)"""
        if self._splitter is None:
            return "", text
        parts = [self._splitter.push(text)]
        if last:
            parts.append(self._splitter.finish())
        return "".join(part[0] for part in parts), "".join(part[1] for part in parts)

    @staticmethod
    def _read(parser: ToolParser, text: str, last: bool) -> Iterator[TextDelta | ToolDelta]:
        """Content and calls in ``text``, and what was held back if it is the last."""
        for part in parser.push(text) + (parser.finish() if last else []):
            yield TextDelta(b"content", part) if isinstance(part, str) else part

    def _tokens(self, output: Output, offsets: Sequence[int]) -> list[TokenText] | None:
        if self.request.params.logprobs is None:
            return None
        data = self._side.token_bytes
        found: list[TokenLogprobs] = output.logprobs or []
        return [
            TokenText(
                data(token), offset, entry.logprob, [(data(other), value) for other, value in entry.top]
            )
            for token, offset, entry in zip(output.token_ids, offsets, found, strict=True)
        ]


def make_choices(
    http: HttpRequest,
    body: Sampling,
    served: Served,
    ids: list[int],
    params: SamplingParams,
    *,
    thinking: bool | None,
    tools: Callable[[], ToolParser | None] = lambda: None,
) -> list[Choice]:
    """``n`` choices for one prompt. Seeds count up from the given.

    thinking: None leaves reasoning in the content. tools: makes the reader of tool calls of each choice.
    """
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    choices = []
    for number in range(body.n or 1):
        own = (
            params
            if params.seed is None
            else msgspec.structs.replace(params, seed=_wrapped(params.seed + number))
        )
        request = Request(
            id=secrets.token_hex(12),
            prompt_ids=ids,
            params=own,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            user=key_of(http).id,
        )
        parser = tools()
        text = served.text.answer(
            stop=stop,
            include_stop=bool(body.include_stop_str_in_output),
            skip_special=body.skip_special_tokens is not False,
            calls=parser is not None,
        )
        splitter = None if thinking is None else served.text.reasoning(thinking=thinking)
        choices.append(Choice(request, served.text, text, splitter, parser))
    return choices


def _wrapped(seed: int) -> int:
    """``seed`` as the 64-bit signed number that it stands for."""
    return (seed + 2**63) % 2**64 - 2**63


@dataclass(eq=False)
class Job:
    """All choices of one HTTP request, running on the engine: ``n`` for each prompt, prompt by prompt."""

    service: Service
    served: Served
    choices: list[Choice]
    prompt_tokens: int  # counted once, however many choices
    n: int
    first_token: float | None = None  # when it came, on the clock of time.perf_counter
    _running: set[str] = field(default_factory=set)
    _streams: Sequence[AsyncIterator[Output]] = ()
    _ending: ApiError | None = None

    async def start(self) -> None:
        """Hand all choices to the engine. Raises ApiError, with nothing running, if it does not take them."""
        requests = [choice.request for choice in self.choices]
        try:
            self._streams = self.served.engine.submit_all(requests)
        except QueueFull as error:
            raise ApiError(429, str(error), code="queue_full", headers={"Retry-After": "5"}) from None
        except TooMany as error:
            name = "n" if self.n > 1 else "prompt"
            raise ApiError(400, f"{name}: {error}", param=name, code="invalid_value") from None
        except BadRequest as error:
            raise ApiError(400, str(error), code="invalid_value") from None
        except TreadleError as error:
            raise ApiError(503, str(error), code="engine_error", headers={"Retry-After": "2"}) from None
        self._running = {request.id for request in requests}

    async def stop(self) -> None:
        """Cancel what still runs."""
        running, self._running = self._running, set()
        for id in running:
            await self.served.engine.cancel(id)

    def end(self, error: ApiError) -> None:
        """Cancel what still runs; ``pieces`` then raises ``error``."""
        if self._running:
            self._ending = error
            self.service.background(self.stop())

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """(index of the choice, what it gained), until every choice has finished. Closing it cancels the
        rest."""
        metrics = self.service.metrics
        metrics.prompt_tokens.inc(self.prompt_tokens)
        self.service.answers.add(self)
        try:
            with metrics.clock() as clock:
                async with contextlib.aclosing(self._outputs()) as outputs:
                    async for index, output in outputs:
                        if self._ending is not None:
                            raise self._ending
                        choice = self.choices[index]
                        if choice.request.id not in self._running:
                            continue  # came after the stop string was found; the last one has the counts
                        piece = choice.feed(output)
                        clock.tokens(index)
                        if self.first_token is None:
                            self.first_token = time.perf_counter()
                        if piece.finish is not None:
                            await self._finish(choice, output)
                        yield index, piece
            if self._running:
                message = "the engine stopped before the answer was finished"
                raise ApiError(500, message, code="engine_error")
        finally:
            self.service.answers.discard(self)
            metrics.completion_tokens.inc(sum(choice.completion_tokens for choice in self.choices))
            await self.stop()
            if all(choice.ended for choice in self.choices):
                metrics.cached_tokens.inc(self._cached())
            else:
                self.service.background(self._count_later())

    def usage(self) -> dict[str, Any]:
        """The ``usage`` object."""
        completion = sum(choice.completion_tokens for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached()},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.reasoning_tokens for choice in self.choices)
            },
        }

    def _cached(self) -> int:
        """Prompt tokens that nobody had to compute. The choices of a prompt find what the first of them has
        computed; what that one has found itself is the least."""
        cached = [choice.cached_tokens for choice in self.choices]
        return sum(min(cached[i : i + self.n]) for i in range(0, len(cached), self.n))

    async def _count_later(self) -> None:
        """Read the last outputs of cancelled choices, which have the counts."""
        for choice, stream in zip(self.choices, self._streams, strict=True):
            async for output in stream:
                choice.note(output)
        self.service.metrics.cached_tokens.inc(self._cached())

    async def _finish(self, choice: Choice, output: Output) -> None:
        self._running.discard(choice.request.id)
        if output.finish_reason is None:
            await self.served.engine.cancel(choice.request.id)

    async def _outputs(self) -> AsyncGenerator[tuple[int, Output], None]:
        """(index of the choice, output) of all choices as they come."""
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                self.choices[0].note(output)
                yield 0, output
            return
        queue: asyncio.Queue[tuple[int, Output | BaseException | None]] = asyncio.Queue()

        async def pump(index: int, stream: AsyncIterator[Output]) -> None:
            try:
                async for output in stream:
                    self.choices[index].note(output)
                    queue.put_nowait((index, output))
                queue.put_nowait((index, None))
            except Exception as error:
                queue.put_nowait((index, error))

        tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(self._streams)]
        try:
            open_streams = len(tasks)
            while open_streams:
                index, item = await queue.get()
                if item is None:
                    open_streams -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield index, item
        finally:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)
