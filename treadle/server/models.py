"""Which models are in memory: loading on demand, unloading of the least recently used, and of idle ones.

Every model has an engine process of its own, or none while it is unloaded. Requests for such a model wait
until it is loaded; a stream sends its comments meanwhile. Models are loaded one at a time. One that does not
fit beside the others takes the place of the least recently used: that one takes no new requests, finishes
those that it has, and ends. Nothing is unloaded for a model that would not fit even then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treadle import machine
from treadle.core import Output, Request, TreadleError, Usage
from treadle.engine.client import EngineClient, EngineUnavailable
from treadle.engine.engine import EngineInfo
from treadle.engine.interfaces import Admission
from treadle.server.errors import ApiError

log = logging.getLogger("treadle.server")


class NoRoom(EngineUnavailable):
    """The model does not fit into memory."""


class Wanted(AsyncIterator[Output]):
    """Outputs of a request that may have to wait for its model."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._settled = asyncio.Event()
        self._outputs: AsyncIterator[Output] | None = None
        self._error: ApiError | None = None

    def begin(self, outputs: AsyncIterator[Output]) -> None:
        """The model is there, and these are its outputs."""
        self._outputs = outputs
        self._settled.set()

    def refuse(self, error: ApiError) -> None:
        """Raise this once instead of any output."""
        self._error = error
        self._settled.set()

    @property
    def waits(self) -> bool:
        """Whether neither has happened yet."""
        return not self._settled.is_set()

    async def __anext__(self) -> Output:
        await self._settled.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._outputs is None:
            raise StopAsyncIteration
        return await anext(self._outputs)


async def _cancelled(request: Request) -> AsyncIterator[Output]:
    usage = Usage(prompt_tokens=len(request.prompt_ids))
    yield Output(id=request.id, token_ids=[], finish_reason="cancelled", usage=usage)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model is loaded. ``start`` gets the bytes that it may use and makes a client, not yet started."""

    start: Callable[[int], EngineClient]
    least: int  # bytes that it cannot do without
    places: int  # requests that may wait for it
    patience: float  # seconds that each of them waits


class ModelEngine:
    """Implements treadle.server.service.Engine with a process that comes and goes."""

    def __init__(self, name: str, plan: Plan, residents: Residents) -> None:
        self.name = name
        self.plan = plan
        self.used = 0.0  # loop time of the last request
        self._residents = residents
        self._client: EngineClient | None = None
        self._leaving = False
        self._loading: asyncio.Task[None] | None = None
        self._error: str | None = None
        self._waiting: list[list[Wanted]] = []  # requests that came together
        self._admission = Admission(plan.places)
        self._totals: dict[str, float] = {}  # of earlier processes
        residents.add(self)

    # ------------------------------------------------------------------ as the routes see it

    @property
    def state(self) -> str:
        """See Engine.state."""
        if self._client is not None and not self._leaving:
            return self._client.state
        loading = self._loading is not None or not self._residents.settled.is_set()
        return "loading" if loading else "unloaded"

    @property
    def error(self) -> str | None:
        """See Engine.error."""
        return self._error or (self._client.error if self._client is not None else None)

    @property
    def stats(self) -> Mapping[str, float]:
        """See Engine.stats. Counts go on where those of the last process ended."""
        now = self._client.stats if self._client is not None else {}
        totals = {name: value + now.get(name, 0) for name, value in self._totals.items()}
        return {**now, **totals, "loaded": float(self.state == "ready")}

    @property
    def info(self) -> EngineInfo | None:
        """What it runs with; None while it is not in memory."""
        return self._client.info if self._client is not None else None

    @property
    def summary(self) -> str:
        """See Engine.summary."""
        if (info := self.info) is None:
            return "not in memory"
        threads = "1 thread" if info.threads == 1 else f"{info.threads} threads"
        return f"{threads}, ISA {info.isa}, {info.weight_bytes / 2**20:.0f} MiB of weights"

    async def ready(self) -> None:
        """See Engine.ready."""
        await self._residents.settled.wait()
        if self._error is not None:
            raise EngineUnavailable(self._error)

    def submit_all(self, requests: list[Request]) -> Sequence[AsyncIterator[Output]]:
        """See Engine.submit_all. Raises EngineUnavailable while the process is being restarted, or when it
        was given up."""
        self.used = asyncio.get_running_loop().time()
        if self._client is not None and not self._leaving and self._client.state != "loading":
            return self._client.submit_all(requests)
        self._admission.enter(requests[0].user, len(requests))
        group = [Wanted(request) for request in requests]
        self._waiting.append(group)
        asyncio.get_running_loop().call_later(self.plan.patience, self._give_up, group)
        if self._loading is None:
            self._loading = asyncio.create_task(self._load(), name=f"load {self.name}")
        return group

    async def cancel(self, request_id: str) -> None:
        """See Engine.cancel."""
        for group in self._waiting:
            for wanted in group:
                if wanted.request.id == request_id and wanted.waits:
                    wanted.begin(_cancelled(wanted.request))
                    self._admission.leave(wanted.request.user)
        self._waiting = [group for group in self._waiting if any(wanted.waits for wanted in group)]
        if self._client is not None:
            await self._client.cancel(request_id)

    async def close(self) -> None:
        """See Engine.close."""
        self._residents.stop()
        if self._loading is not None:
            self._loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loading
        self._refuse(ApiError(503, "the server is stopping", code="stopping"))
        if self._client is not None:
            await self._client.close()

    # ------------------------------------------------------------------ waiting for it

    @property
    def wanted(self) -> bool:
        """Whether a request waits for it."""
        return bool(self._waiting)

    async def _load(self) -> None:
        try:
            await self._residents.load(self)
        except NoRoom as error:
            log.error("%s", error)
            self._refuse(ApiError(503, str(error), code="no_memory", headers={"Retry-After": "60"}))
        except TreadleError as error:
            log.error("%s could not be loaded: %s", self.name, error)
            message = f"the model {self.name} could not be loaded; GET /ready and the server's log say why"
            self._refuse(ApiError(503, message, code="model_failed", headers={"Retry-After": "60"}))
        finally:
            self._loading = None
        if self._waiting:  # they came while the last ones were refused
            self._loading = asyncio.create_task(self._load(), name=f"load {self.name}")

    def _give_up(self, group: list[Wanted]) -> None:
        if any(group is other for other in self._waiting):
            message = f"the model {self.name} was not loaded within {self.plan.patience:g} s; try again"
            self._refuse(ApiError(503, message, code="model_loading", headers={"Retry-After": "10"}), group)

    def _refuse(self, error: ApiError, only: list[Wanted] | None = None) -> None:
        """Refuse what waits, or that group of it."""
        for group in self._take(only):
            for wanted in group:
                wanted.refuse(error)

    def _take(self, only: list[Wanted] | None = None) -> list[list[Wanted]]:
        """What waits, and waits no longer."""
        taken = [group for group in self._waiting if only is None or group is only]
        self._waiting = [group for group in self._waiting if only is not None and group is not only]
        groups = [[wanted for wanted in group if wanted.waits] for group in taken]
        for wanted in (wanted for group in groups for wanted in group):
            self._admission.leave(wanted.request.user)
        return groups

    # ------------------------------------------------------------------ in and out of memory, by Residents

    @property
    def resident(self) -> bool:
        """Whether it holds memory."""
        return self._client is not None

    @property
    def taken(self) -> int:
        """Bytes of memory that it has filled."""
        pid = self._client.pid if self._client is not None else None
        return machine.resident_memory(pid) if pid is not None else 0

    @property
    def untaken(self) -> int:
        """Bytes that it may still fill: the KV cache is taken from the system as it is used."""
        info = self.info
        return max(0, info.weight_bytes + info.cache_bytes - self.taken) if info is not None else 0

    @property
    def idle_since(self) -> float:
        """Loop time since which it is in memory without requests; infinite if it is not."""
        return self._client.idle_since if self._client is not None else math.inf

    def note(self, error: str) -> None:
        """Why it could not be loaded."""
        self._error = error

    async def enter(self, room: int) -> None:
        """Load it into ``room`` bytes and answer what waits. Raises TreadleError."""
        self._client = self.plan.start(room)
        try:
            await self._client.start()
            await self._client.ready()
        except BaseException:
            await self._drop()
            raise
        self._error = None
        self._go_on()

    def _go_on(self) -> None:
        assert self._client is not None
        self._leaving = False
        for group in self._take():
            try:
                streams = self._client.submit_all([wanted.request for wanted in group])
            except TreadleError as error:
                refusal = ApiError(503, str(error), code="engine_error", headers={"Retry-After": "2"})
                for wanted in group:
                    wanted.refuse(refusal)
                continue
            for wanted, stream in zip(group, streams, strict=True):
                wanted.begin(stream)

    async def leave(self, still: Callable[[], bool] = lambda: True) -> None:
        """End it once its requests have ended, if ``still`` holds then; new ones wait."""
        assert self._client is not None
        self._leaving = True
        await self._client.idle()
        if still():
            await self._drop()
        elif self._client.state == "ready":
            self._go_on()
        self._leaving = False

    async def _drop(self) -> None:
        assert self._client is not None
        stats = self._client.stats
        await self._client.close()
        for name, value in stats.items():
            if name.endswith("_total"):
                self._totals[name] = self._totals.get(name, 0) + value
        self._client = None


class Residents:
    """The models that share the memory of a machine."""

    def __init__(self, idle_unload: float, available: Callable[[], int] = machine.available_memory) -> None:
        """``idle_unload``: seconds without requests after which a model is unloaded; 0: never.
        ``available``: bytes that processes may still fill."""
        self.settled = asyncio.Event()  # set when the models that are loaded at start are there
        self._engines: list[ModelEngine] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._idle_unload = idle_unload
        self._available = available
        self._one_at_a_time = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    def add(self, engine: ModelEngine) -> None:
        """Let a model use this memory."""
        self._engines.append(engine)

    @property
    def turns(self) -> str:
        """The file by which their engines take turns, see treadle.engine.messages.Manners."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="treadle-")  # readable for this user only
        return str(Path(self._folder.name, "turn"))

    def start(self) -> None:
        """Begin to load the models in order, as far as they fit beside each other."""
        self._tasks.append(asyncio.create_task(self._run(), name="models in memory"))

    def stop(self) -> None:
        """Load and unload nothing any more."""
        for task in self._tasks:
            task.cancel()
        if self._folder is not None:
            self._folder.cleanup()

    async def _run(self) -> None:
        try:
            for engine in self._engines:
                with contextlib.suppress(TreadleError):
                    await self.load(engine, at_start=True)
        finally:
            self.settled.set()
        if self._idle_unload:
            await self._unload_idle()

    async def load(self, engine: ModelEngine, *, at_start: bool = False) -> None:
        """Load a model, unless nobody waits for it any more; at start, unless others would have to go. Raises
        NoRoom, or TreadleError when loading fails."""
        async with self._one_at_a_time:
            try:
                while engine.wanted or at_start:
                    victim = self._in_the_way(engine)
                    if victim is None:
                        await engine.enter(self._room(engine))
                        return
                    if at_start:
                        log.info(
                            "%s stays unloaded until it is asked for: no room beside others", engine.name
                        )
                        return
                    log.info("unloading %s to make room for %s", victim.name, engine.name)
                    await victim.leave(lambda: engine.wanted)
            except TreadleError as error:
                engine.note(str(error))
                raise

    def _others(self, engine: ModelEngine) -> list[ModelEngine]:
        return [other for other in self._engines if other is not engine and other.resident]

    def _room(self, engine: ModelEngine) -> int:
        """Bytes for a model beside those in memory, which may still grow."""
        return self._available() - sum(other.untaken for other in self._others(engine))

    def _in_the_way(self, engine: ModelEngine) -> ModelEngine | None:
        """The model to unload first for this one to fit; None if it fits. Raises NoRoom if it never would."""
        if engine.plan.least <= self._room(engine):
            return None
        others = self._others(engine)
        most = self._available() + sum(other.taken for other in others)
        if engine.plan.least > most:
            raise NoRoom(f"{engine.name} {_numbers(engine.plan.least, most)}")
        return min(others, key=lambda other: (other.idle_since == math.inf, other.used))

    async def _unload_idle(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            due = min((engine.idle_since for engine in self._engines), default=math.inf) + self._idle_unload
            await asyncio.sleep(min(max(due - now(), 0.01), self._idle_unload))
            for engine in list(self._engines):
                async with self._one_at_a_time:
                    if now() - engine.idle_since >= self._idle_unload:
                        log.info("unloading %s after %g s without requests", engine.name, self._idle_unload)
                        await engine.leave()


def _numbers(need: int, room: int) -> str:
    return (
        f"needs at least {need / 2**30:.2f} GiB for weights and the KV cache of one context, but "
        f"{room / 2**30:.2f} GiB are available for it; free memory, use a smaller model or quantisation, or "
        "a smaller context"
    )
