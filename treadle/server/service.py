"""What the routes share: the settings, the metrics and the models that are served."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from starlette.requests import Request as HttpRequest

from treadle.config import Config
from treadle.core import Output, Request, TreadleError
from treadle.keys.records import Key
from treadle.server.body import aside, parse_json, read
from treadle.server.errors import ApiError
from treadle.server.metrics import Metrics
from treadle.server.schema import Body, validate
from treadle.server.textside import TextSide
from treadle.text.reasoning import Preset

log = logging.getLogger("treadle.server")


Task = Literal["generate", "embed"]
_ASKED_BY = {"generate": "the routes that generate text", "embed": "POST /v1/embeddings"}


class Engine(Protocol):
    """What the server needs of an engine; ``treadle.engine.client.EngineClient`` is the real one."""

    @property
    def state(self) -> str:
        """``ready``; ``unloaded``, or ``loading`` when a request asked for it: requests wait for it;
        ``restarting`` or ``failed``."""
        ...

    @property
    def error(self) -> str | None:
        """Why the engine has failed, died last, or could not be loaded."""
        ...

    @property
    def summary(self) -> str:
        """What the engine runs with, for the log."""
        ...

    async def ready(self) -> None:
        """Wait until start-up is over: it is in memory, or stays out until it is asked for. Raises
        TreadleError if it could not be loaded."""
        ...

    @property
    def stats(self) -> Mapping[str, float]:
        """Gauges for the metrics."""
        ...

    def submit_all(self, requests: list[Request], /) -> Sequence[AsyncIterator[Output]]:
        """Per request its outputs until ``finish_reason``, which also come while nobody reads them. Raises
        TreadleError if not all are taken, and then takes none. Where they have to wait for the model, the
        outputs may begin with an ApiError."""
        ...

    async def cancel(self, request_id: str, /) -> None:
        """Stop a request; unknown ids are fine."""
        ...

    async def close(self) -> None:
        """Stop the engine process."""
        ...


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model: its names, its text side and its engine."""

    name: str
    text: TextSide
    engine: Engine
    context: int  # tokens
    embedding: int | None = None  # values of the embeddings that it makes; None: it generates text
    aliases: tuple[str, ...] = ()
    preset: Preset | None = None  # sampling for requests that name none
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def task(self) -> Task:
        """What it does."""
        return "generate" if self.embedding is None else "embed"

    @property
    def names(self) -> set[str]:
        """Everything that it is called."""
        return {self.name, *self.aliases}

    def card(self) -> dict[str, Any]:
        """The entry of ``GET /v1/models``."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "treadle",
            "max_model_len": self.context,
            "aliases": list(self.aliases),
            "state": self.engine.state,
            "task": self.task,
        }


class Ending(Protocol):
    """An answer that can be ended before it is complete."""

    def end(self, error: ApiError, /) -> None:
        """Stop writing and let the client know."""
        ...


# Finds the models and begins to load those that fit into memory together. Raises TreadleError.
Load = Callable[[], Awaitable[Sequence[Served]]]
_ANSWERING = {"ready", "loading", "unloaded"}  # states of an engine that takes requests once start-up is over


class Service:
    """State of the server: loading, then ready or failed."""

    def __init__(self, config: Config, load: Load, version: str) -> None:
        self.config = config
        self.version = version
        self.metrics = Metrics(lambda: {served.name: served.engine.stats for served in self.models})
        self.models: Sequence[Served] = ()  # in the order in which they were named
        self.loaded = asyncio.Event()  # set when loading at start has ended, well or not
        self.own_key: str | None = None  # for requests of this process to itself
        self.needs_key = False  # at the start
        self.answers: set[Ending] = set()  # being written
        self._load = load
        self._failure: str | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> str:
        """``loading`` at start, and while no model answers because its engine is being restarted; ``ready``
        when at least one answers, if need be after having been loaded; ``failed``."""
        if self._failure is not None:
            return "failed"
        if not self.loaded.is_set() or not self.models:
            return "loading"
        states = {served.engine.state for served in self.models}
        if states & _ANSWERING:
            return "ready"
        return "failed" if states <= {"failed"} else "loading"

    @property
    def failure(self) -> str | None:
        """Why loading at start failed, or why the engines were given up."""
        if self._failure is None and self.state == "failed":
            return "; ".join(served.engine.error or served.name for served in self.models)
        return self._failure

    async def start(self) -> None:
        """Load the models; never raises."""
        try:
            self.models = await self._load()
            for served in self.models:
                await served.engine.ready()
        except TreadleError as error:
            self._failure = str(error)
        except Exception as error:
            log.exception("loading failed")
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            self.loaded.set()

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what no client waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def end_answers(self) -> None:
        """End what is still being written, with an error that says why: the server stops."""
        for answer in self.answers:
            answer.end(ApiError(503, "the server is stopping; this answer is incomplete", code="stopping"))

    async def stop(self) -> None:
        """Release the engines; a second call does nothing."""
        models, self.models = self.models, ()
        await asyncio.gather(*(served.engine.close() for served in models))  # which ends every request

    def check(self) -> None:
        """Raise ApiError 503 while no model can be asked."""
        if not any(self._refusal(served) is None for served in self.models):
            raise self._unavailable("loading" if self.state == "ready" else self.state)

    def allowed(self, key: Key) -> list[Served]:
        """The models that ``key`` may use. Raises ApiError 503 while no model can be asked."""
        self.check()
        return [served for served in self.models if key.may_use(served.names)]

    def find(self, name: str | None, key: Key) -> Served:
        """The model of this name (None: the only one there is), if ``key`` may use it. Raises ApiError 404 if
        there is none, 503 if it cannot be asked now."""
        allowed = self.allowed(key)
        if name is None and len(allowed) > 1:
            message = f"model is required here; it can be {_names(allowed)}"
            raise ApiError(400, message, param="model", code="invalid_value")
        for served in allowed:
            if name is None or name in served.names:
                refusal = self._refusal(served)
                if refusal is not None:
                    raise refusal
                return served
        where = "to this key" if key.models else "here"
        what = "no model" if name is None else f"the model {name[:100]!r}"
        verb = "is" if name is None else "is not"
        message = f"{what} {verb} served {where}; served: {_names(allowed) or 'none'}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def _refusal(self, served: Served) -> ApiError | None:
        state = served.engine.state
        if state == "ready" or (state in _ANSWERING and self.loaded.is_set()):
            return None
        return self._unavailable(state)

    @staticmethod
    def _unavailable(state: str) -> ApiError:
        if state == "failed":
            message = "the model is not available; GET /ready and the server's log say why"
            return ApiError(503, message, code="model_failed", headers={"Retry-After": "60"})
        message = "the model is still loading; try again shortly"
        return ApiError(503, message, code="model_loading", headers={"Retry-After": "2"})


def _names(models: Sequence[Served]) -> str:
    return ", ".join(name for served in models for name in (served.name, *served.aliases))


def key_of(request: HttpRequest) -> Key:
    """Whose request it is, as ``treadle.server.auth`` found out."""
    key: Key = request.state.key
    return key


def model_for(request: HttpRequest, name: str | None, task: Task | None = "generate") -> Served:
    """The served model called ``name`` for whoever makes this request, see ``Service.find``; the log and the
    usage of the key name it. Raises ApiError 400 unless it does the ``task`` (None: any)."""
    served = service_of(request).find(name, key_of(request))
    if task is not None and served.task != task:
        does = "makes embeddings" if served.task == "embed" else "generates text"
        message = f"the model {served.name} {does}; it is asked by {_ASKED_BY[served.task]}"
        raise ApiError(400, message, param="model", code="unsupported_model")
    request.state.model = served.name
    return served


def service_of(request: HttpRequest) -> Service:
    """The service behind a request."""
    service: Service = request.app.state.service
    return service


async def body_of(request: HttpRequest, kind: type[Body]) -> tuple[Body, int]:
    """The body, checked, and its size in bytes; after making sure that a model is there to use it."""
    service = service_of(request)
    service.check()
    raw = await read(request, service.config.max_body)
    return await aside(len(raw), lambda: validate(kind, parse_json(raw))), len(raw)
