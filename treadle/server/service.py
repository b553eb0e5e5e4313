"""What the routes share: the settings, the metrics and the model that is served, once it is loaded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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


class Engine(Protocol):
    """What the server needs of an engine; ``treadle.engine.client.EngineClient`` is the real one."""

    @property
    def state(self) -> str:
        """``ready`` when requests are being answered; anything else is a state of starting or failing."""
        ...

    @property
    def error(self) -> str | None:
        """Why the engine has failed, or died last."""
        ...

    @property
    def stats(self) -> Mapping[str, float]:
        """Gauges for the metrics."""
        ...

    def submit_all(self, requests: list[Request], /) -> Sequence[AsyncIterator[Output]]:
        """Per request its outputs until ``finish_reason``, which also come while nobody reads them. Raises
        TreadleError if not all are taken, and then takes none."""
        ...

    async def cancel(self, request_id: str, /) -> None:
        """Stop a request; unknown ids are fine."""
        ...

    async def close(self) -> None:
        """Stop the engine process."""
        ...


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model that answers: its names, its text side and its engine."""

    name: str
    text: TextSide
    engine: Engine
    context: int  # tokens
    aliases: tuple[str, ...] = ()
    preset: Preset | None = None  # sampling for requests that name none
    summary: str = ""  # what the engine runs with, for the log
    created: int = field(default_factory=lambda: int(time.time()))

    def card(self) -> dict[str, Any]:
        """The entry of ``GET /v1/models``."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "treadle",
            "max_model_len": self.context,
            "aliases": list(self.aliases),
        }


class Ending(Protocol):
    """An answer that can be ended before it is complete."""

    def end(self, error: ApiError, /) -> None:
        """Stop writing and let the client know."""
        ...


Load = Callable[[], Awaitable[Served]]


class Service:
    """State of the server: loading, then ready or failed."""

    def __init__(self, config: Config, load: Load, version: str) -> None:
        self.config = config
        self.version = version
        self.metrics = Metrics(lambda: self._served.engine.stats if self._served else {})
        self.loaded = asyncio.Event()  # set when loading has ended, well or not
        self.answers: set[Ending] = set()  # being written
        self._load = load
        self._served: Served | None = None
        self._failure: str | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> str:
        """``loading``, ``ready`` or ``failed``; an engine that is being restarted counts as loading."""
        if self._failure is not None:
            return "failed"
        if self._served is None:
            return "loading"
        state = self._served.engine.state
        return state if state in ("ready", "failed") else "loading"

    @property
    def failure(self) -> str | None:
        """Why loading failed, or why the engine was given up."""
        if self._failure is None and self._served is not None and self._served.engine.state == "failed":
            return self._served.engine.error
        return self._failure

    async def start(self) -> None:
        """Load the model; never raises."""
        try:
            self._served = await self._load()
        except TreadleError as error:
            self._failure = str(error)
        except Exception as error:
            log.exception("loading the model failed")
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
        """Release the engine; a second call does nothing."""
        served, self._served = self._served, None
        if served is not None:
            await served.engine.close()  # which ends every request, and so the tasks

    def served(self) -> Served:
        """The model, or an ApiError 503 while there is none."""
        state = self.state
        if state == "loading":
            message = "the model is still loading; try again shortly"
            raise ApiError(503, message, code="model_loading", headers={"Retry-After": "2"})
        if state == "failed" or self._served is None:
            message = "the model is not available; GET /ready and the server's log say why"
            raise ApiError(503, message, code="model_failed", headers={"Retry-After": "60"})
        return self._served

    def find(self, name: str | None, key: Key) -> Served:
        """The served model if ``name`` is one of its names (None: the only one there is) and ``key`` may use
        it, else ApiError 404."""
        served = self.served()
        names = {served.name, *served.aliases}
        allowed = key.may_use(names)
        if allowed and (name is None or name in names):
            return served
        known = ", ".join((served.name, *served.aliases)) if allowed else "none"
        where = "to this key" if key.models else "here"
        message = f"the model {(name or served.name)[:100]!r} is not served {where}; served: {known}"
        raise ApiError(404, message, param="model", code="model_not_found")


def key_of(request: HttpRequest) -> Key:
    """Whose request it is, as ``treadle.server.auth`` found out."""
    key: Key = request.state.key
    return key


def model_for(request: HttpRequest, name: str | None) -> Served:
    """The served model called ``name`` for whoever makes this request, see ``Service.find``; the log and the
    usage of the key name it."""
    served = service_of(request).find(name, key_of(request))
    request.state.model = served.name
    return served


def service_of(request: HttpRequest) -> Service:
    """The service behind a request."""
    service: Service = request.app.state.service
    return service


async def body_of(request: HttpRequest, kind: type[Body]) -> tuple[Body, int]:
    """The body, checked, and its size in bytes; after making sure that a model is there to use it."""
    service = service_of(request)
    service.served()
    raw = await read(request, service.config.max_body)
    return await aside(len(raw), lambda: validate(kind, parse_json(raw))), len(raw)
