"""The Python interface: a model in this process, without a server."""

from __future__ import annotations

import itertools
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from treadle import hub, inputs, machine
from treadle.core import (
    FinishReason,
    Output,
    Request,
    SamplingParams,
    Timing,
    TokenLogprobs,
    TreadleError,
    Usage,
)
from treadle.engine.engine import Engine, EngineConfig
from treadle.engine.interfaces import check_request
from treadle.text.chat import ChatTemplate
from treadle.text.detokenizer import Detokenizer
from treadle.text.reasoning import preset_for
from treadle.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from treadle.engine.runner import Runner

Message = Mapping[str, Any]
T = TypeVar("T")

_CLOSED = "this LLM is closed; create another one"


@dataclass(kw_only=True)
class Completion:
    """The continuation of one prompt."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)


class _Job:
    """One request under way. The engine's thread adds to ``outputs``, the caller's turns them into text."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self.request = request
        self.result = Completion(logprobs=None if request.params.logprobs is None else [])
        self.outputs: deque[Output] = deque()
        self.last = False  # the last output is among ``outputs``, or was
        self.cancelled = False  # the rest is not wanted
        stop = request.params.stop
        self._text = Detokenizer(tokenizer, (stop,) if isinstance(stop, str) else stop)

    def texts(self) -> Iterator[str]:
        """The text of each output that has come. Raises TreadleError when the engine failed."""
        while self.outputs:
            yield self._take(self.outputs.popleft())

    def _take(self, output: Output) -> str:
        result = self.result
        usage = output.usage or result.usage
        result.timing = output.timing or result.timing
        if self._text.stopped is not None:  # what came after the stop string counts for nothing
            result.usage = msgspec.structs.replace(usage, completion_tokens=len(result.token_ids))
            return ""
        result.usage = usage
        result.token_ids += output.token_ids
        if result.logprobs is not None and output.logprobs:
            result.logprobs += output.logprobs
        text = self._text.push(output.token_ids)
        reason = output.finish_reason
        if reason == "error":
            raise TreadleError(output.error or "the engine failed")
        if reason is not None:
            text += self._text.finish()
        result.finish_reason = "stop" if self._text.stopped is not None else reason
        result.text += text
        return text


class LLM:
    """A model that generates in this process. Use it as a context manager, or call ``close``.

    model: a .gguf file or a name that `treadle list` shows; None: the built-in SmolLM2-135M-Instruct.
    threads: worker threads; None: one per physical core that this process may use.
    context: tokens of prompt and answer together; None: what the model was trained for, at most 32768.
    kv_dtype: numbers in the KV cache: "bf16", or "q8" or "q4", for longer contexts in the same memory.
    draft: a smaller model with the same tokenizer, which guesses tokens where that saves time; answers stay
        the same.
    pack_cache: folder in which packed weights are kept, so that the next LLM with that model maps them;
    pack_cache_size: most bytes that it may take, of all models; the models used least recently go.
    progress: called while the weights are packed with the share that is done, 0 to 1.

    Threads may share it: what they ask for advances together. Everything that touches the engine runs on one
    thread of its own, so that Ctrl-C, too, comes between two steps and never into one.

    Raises TreadleError when the model cannot be found, read or held in memory; here and below when an
    argument is wrong; and after ``close``.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        threads: int | None = None,
        context: int | None = None,
        *,
        kv_dtype: str = "bf16",
        draft: str | os.PathLike[str] | None = None,
        pack_cache: str | os.PathLike[str] | None = None,
        pack_cache_size: int = 100 * 2**30,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        if not isinstance(model, str | os.PathLike | None):
            raise TreadleError(
                f"model is {model!r}; it must be a name, a path, or None for the built-in model"
            )
        if not isinstance(draft, str | os.PathLike | None):
            raise TreadleError(f"draft is {draft!r}; it must be a name, a path, or None for no draft model")
        if threads is not None:
            threads = inputs.whole_number("threads", threads, 1)
        if context is not None:
            context = inputs.whole_number("context", context, 2)
        if kv_dtype not in ("bf16", "q8", "q4"):
            raise TreadleError(f"kv_dtype is {kv_dtype!r}; it must be 'bf16', 'q8' or 'q4'")
        if not isinstance(pack_cache, str | os.PathLike | None):
            raise TreadleError(f"pack_cache is {pack_cache!r}; it must be a path, or None")
        machine.require_isa()
        from treadle.engine.load import LoadConfig, load_models  # not above: the native module needs that CPU
        from treadle.weights.gguf import open_gguf

        path = os.fspath(hub.resolve(model))
        self._tokenizer = Tokenizer.from_gguf(open_gguf(path).metadata)
        self._preset = preset_for(self._tokenizer.name) or preset_for(Path(path).stem)
        config = LoadConfig(
            path=path,
            draft=None if draft is None else os.fspath(hub.resolve(draft)),
            threads=threads,
            context=context,
            kv_dtype=kv_dtype,
            pack_cache=None if pack_cache is None else os.fsdecode(pack_cache),
            pack_cache_size=inputs.whole_number("pack_cache_size", pack_cache_size, 1),
        )
        runner, small = load_models(config, progress)
        if runner.embeds:
            raise TreadleError(f"{path} makes embeddings; serve it with `treadle serve`, /v1/embeddings")
        self._runner: Runner | None = runner
        self._engine: Engine | None = Engine(runner, EngineConfig(max_queue=sys.maxsize), draft=small)
        self._process = os.getpid()
        self._thread = ThreadPoolExecutor(1, "treadle-engine")
        self._next_step: Future[None] | None = None  # the one that was asked for last
        self._jobs: dict[str, _Job] = {}  # under way, by id of the request
        self._cancelled: deque[str] = deque()  # ids of requests whose rest nobody wants
        self._template: ChatTemplate | None = None
        self._ids = itertools.count()

    @property
    def recommended(self) -> SamplingParams:
        """Sampling that the model's makers recommend for chat, else temperature 0.7 and top-p 0.95."""
        if self._preset is None:
            return SamplingParams(max_tokens=None, temperature=0.7, top_p=0.95)
        p = self._preset
        return SamplingParams(
            max_tokens=None, temperature=p.temperature, top_p=p.top_p, top_k=p.top_k, min_p=p.min_p
        )

    def generate(
        self, prompts: str | Sequence[str] | Sequence[Sequence[int]], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Continue each prompt, a text or a list of token ids, all as one continuous batch.

        Texts are encoded without control tokens and start with the model's beginning-of-text token where it
        has one.
        """
        self._open()
        params = inputs.sampling(SamplingParams() if params is None else params)
        ids = [
            self._tokenizer.encode(prompt, add_bos=True) if isinstance(prompt, str) else prompt
            for prompt in inputs.prompts(prompts)
        ]
        jobs = [_Job(self._tokenizer, self._request(prompt, params)) for prompt in ids]
        for _ in self._run(jobs):
            pass
        return [job.result for job in jobs]

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
    ) -> Completion: ...
    @overload
    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, stream: Literal[True]
    ) -> Iterator[str]: ...
    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, stream: bool = False
    ) -> Completion | Iterator[str]:
        """Answer a conversation of ``{"role": …, "content": …}`` messages, by the model's own chat template.

        Without ``params`` they are `recommended`, and the answer is as long as the context allows. With
        ``stream`` the answer comes in pieces of text; closing the iterator stops the model. Several such
        iterators may be open at once: their answers advance together.
        """
        self._open()
        params = inputs.sampling(self.recommended if params is None else params)
        messages = inputs.messages(messages)
        if self._template is None:
            self._template = ChatTemplate(self._tokenizer)
        job = _Job(self._tokenizer, self._request(self._template.render(messages).ids, params))
        if stream:
            return (piece for piece in self._run([job]) if piece)
        for _ in self._run([job]):
            pass
        return job.result

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits after every token, float32 [tokens, vocab]; for evaluation, while no answer is streamed."""
        _, runner = self._open()
        ids = inputs.token_ids("token_ids", token_ids)
        if len(ids) > runner.context:
            raise TreadleError(
                f"token_ids has {len(ids)} tokens, but the context holds {runner.context}; give fewer, or "
                "create the LLM with a larger context"
            )
        request = Request(id="", prompt_ids=ids, params=SamplingParams())
        check_request(request, runner.context + 1, runner.vocab_size)
        unwanted = Event()
        try:
            return self._submit(partial(self._evaluate, np.asarray(ids, np.int32), unwanted)).result()
        except KeyboardInterrupt:
            unwanted.set()
            raise

    def close(self) -> None:
        """Free the memory. The object cannot be used afterwards."""
        self._engine = self._runner = None
        self._thread.shutdown()

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> tuple[Engine, Runner]:
        if self._engine is None or self._runner is None:
            raise TreadleError(_CLOSED)
        if os.getpid() != self._process:
            raise TreadleError(
                "this LLM was created before the process forked, and its threads stayed behind; create it in "
                "the process that uses it"
            )
        return self._engine, self._runner

    def _request(self, ids: list[int], params: SamplingParams) -> Request:
        return Request(id=str(next(self._ids)), prompt_ids=ids, params=params)

    def _run(self, jobs: Sequence[_Job]) -> Iterator[str]:
        """Steps the engine until the jobs are done; yields their text, made while the next step runs."""
        try:
            self._submit(partial(self._add, jobs)).result()
            last = False
            while not last:
                last = all(job.last for job in jobs)
                step = None if last else self._advance()
                for job in jobs:
                    yield from job.texts()
                    if job.result.finish_reason is not None:
                        self._cancel(job)  # a stop string; the last output brings the counts
                if step is not None:
                    step.result()
        finally:
            for job in jobs:
                self._cancel(job)

    def _cancel(self, job: _Job) -> None:
        if not (job.last or job.cancelled):
            job.cancelled = True
            self._cancelled.append(job.request.id)

    def _advance(self) -> Future[None]:
        """A step that has not begun, for all callers."""
        step = self._next_step
        if step is None or step.running() or step.done():
            self._next_step = step = self._submit(self._step)
        return step

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        """Have the engine's thread do it, after what it was given before."""
        self._open()
        try:
            return self._thread.submit(work)
        except RuntimeError:  # another thread has closed it just now
            raise TreadleError(_CLOSED) from None

    # ------------------------------------------------------------------ on the engine's thread

    def _add(self, jobs: Sequence[_Job]) -> None:
        engine, _ = self._open()
        for job in jobs:
            engine.add(job.request)
            self._jobs[job.request.id] = job

    def _step(self) -> None:
        """One step of the engine, for the jobs of all callers."""
        engine, _ = self._open()
        while self._cancelled:
            engine.cancel(self._cancelled.popleft())
        for output in engine.step():
            job = self._jobs[output.id]
            job.outputs.append(output)
            if output.finish_reason is not None:
                del self._jobs[output.id]
                job.last = True

    def _evaluate(self, ids: NDArray[np.int32], unwanted: Event) -> NDArray[np.float32]:
        engine, runner = self._open()
        self._step()  # so that answers whose iterators were closed have left the engine
        out = np.empty((len(ids), runner.vocab_size), np.float32)
        with engine.lend(len(ids)) as slot:
            for past in range(0, len(ids), runner.max_sequences):  # as many wanted rows as a step may have
                if unwanted.is_set():
                    break
                part = ids[past : past + runner.max_sequences]
                rows = np.arange(len(part), dtype=np.int32)
                length, before, table = (np.array([n], np.int32) for n in (len(part), past, slot))
                runner.run(part, length, before, table, rows)
                out[past : past + len(part)] = runner.logits
        return out
