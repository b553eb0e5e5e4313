"""The caller's end of an engine process: starts it, watches it, restarts it, and streams what it answers.

Every incarnation of the process gets a socket of its own, so that nothing meant for a dead one reaches the
next.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal

import msgspec
import zmq
import zmq.asyncio

from treadle.core import Output, Request, TreadleError
from treadle.engine.engine import EngineInfo, EngineStats
from treadle.engine.interfaces import Admission, BadRequest, check_request
from treadle.engine.messages import (
    Cancel,
    Configure,
    Failed,
    FromEngine,
    Hello,
    Manners,
    Outputs,
    Progress,
    Ready,
    Shutdown,
    Stats,
    Submit,
    ToEngine,
    Waiting,
)
from treadle.engine.sequence import join_outputs

log = logging.getLogger("treadle.engine")

State = Literal["stopped", "loading", "ready", "restarting", "failed"]

_MAX_FAILURES = 5  # deaths in a row, without a token or a quiet minute in between, after which we give up
_QUIET = 60.0  # seconds that an engine must have been ready for its death not to count with earlier ones
_MAX_DELAY = 30.0  # seconds between a death and the next start
_GRACE = 2.0  # seconds an engine has to exit after Shutdown


class EngineUnavailable(TreadleError):
    """The engine is not ready; the caller should answer 503."""


class Stream(AsyncIterator[Output]):
    """Outputs of one request. What piles up while the reader is busy arrives as one output.

    Dropping or closing it before its end cancels the request.
    """

    def __init__(self, client: EngineClient, request: Request) -> None:
        self._client = client
        self._entry = _Entry(request.user)
        self._id = request.id

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Output:
        return await self._entry.get()

    async def aclose(self) -> None:
        """Cancel the request unless it has ended."""
        if not self._entry.ended:
            await self._client.cancel(self._id)

    def __del__(self) -> None:
        if not self._entry.ended:
            self._client.send_cancel(self._id)


class _Entry:
    """What a request in flight has got and its reader has not yet taken."""

    def __init__(self, user: str) -> None:
        self.user = user
        self.ended = False
        self._pending: Output | None = None
        self._exhausted = False
        self._arrived: asyncio.Future[None] | None = None

    def put(self, output: Output) -> None:
        self._pending = join_outputs(self._pending, output)
        self.ended = output.finish_reason is not None
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def get(self) -> Output:
        if self._exhausted:
            raise StopAsyncIteration
        while self._pending is None:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        output, self._pending = self._pending, None
        self._exhausted = output.finish_reason is not None
        return output


class EngineClient:
    """One engine process. Belongs to one event loop."""

    def __init__(
        self,
        loader: str,
        config: Any,
        *,
        manners: Manners | None = None,
        restart_delay: float = 0.25,
        timeout: float = 0.0,
    ) -> None:
        """``loader``: ``module:function``, see treadle.engine.process.Loader. ``config``: its first
        argument, anything that msgspec can encode. ``manners``: how the process shares the machine.
        ``restart_delay``: seconds before the first restart; doubles each time the engine dies before it has
        answered anything. ``timeout``: seconds of silence after which a process with work counts as hung, and
        is killed and started again; 0: never.
        """
        self._loader = loader
        self._configure = Configure(config, manners or Manners())
        self._restart_delay = restart_delay
        self._timeout = timeout
        self._state: State = "stopped"
        self._progress = 0.0
        self._error: str | None = None
        self._cause: str | None = None  # what the present process says of its failure
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._admission = Admission(0)
        self._entries: dict[str, _Entry] = {}
        self._settled = asyncio.Event()  # set while ready, and for ever once failed
        self._supervisor: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._closing = asyncio.Event()
        self._failures = 0
        self._restarts = 0
        self._ready_since = math.inf
        self._idle_since = math.inf
        self._idle = asyncio.Event()  # set while no request is in flight
        self._idle.set()
        self._heard = 0.0  # loop time of the last message
        self._checked = 0.0  # loop time of the last look for a hung process
        self._checking = False
        self._waiting = False  # for its turn
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    # ------------------------------------------------------------------ state

    @property
    def state(self) -> State:
        """``loading`` the first time, ``restarting`` after a death, ``ready``, ``failed`` for good,
        ``stopped``.
        """
        return self._state

    @property
    def progress(self) -> float:
        """How much is loaded, 0 to 1."""
        return self._progress

    @property
    def error(self) -> str | None:
        """Why the engine has failed, or died last."""
        return self._error

    @property
    def pid(self) -> int | None:
        """Process id of the engine, if it runs."""
        return self._process.pid if self._process is not None else None

    @property
    def info(self) -> EngineInfo | None:
        """What the engine runs with, or ran with last; None before it was ready once."""
        return self._info

    @property
    def idle_since(self) -> float:
        """Loop time since which it has been ready and without requests; infinite while it is not."""
        return self._idle_since if self._state == "ready" and not self._entries else math.inf

    async def idle(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    @property
    def stats(self) -> Mapping[str, float]:
        """The newest EngineStats by name, at most about a quarter of a second old, and ``restarts_total``."""
        return msgspec.structs.asdict(self._stats) | {"restarts_total": self._restarts}

    async def start(self) -> None:
        """Start the process and return; it loads in the background."""
        if self._supervisor is not None:
            raise TreadleError("this engine client was started already")
        self._state = "loading"
        self._supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")

    async def ready(self) -> EngineInfo:
        """Wait until requests can be answered. Raises EngineUnavailable when loading has failed."""
        await self._settled.wait()
        if self._state != "ready" or self._info is None:
            raise EngineUnavailable(self._error or "the engine is stopped")
        return self._info

    # ------------------------------------------------------------------ requests

    def submit(self, request: Request) -> Stream:
        """Send a request. Raises at once EngineUnavailable, BadRequest or QueueFull; every later failure
        is an output with finish_reason "error".
        """
        return self.submit_all([request])[0]

    def submit_all(self, requests: list[Request]) -> list[Stream]:
        """As ``submit``, for requests of one user of which all are taken or none; also raises TooMany when
        they are more than are ever taken at once.
        """
        if self._state != "ready" or self._info is None:
            raise EngineUnavailable(f"the engine is not ready: {self._state}")
        for request in requests:
            if request.id in self._entries:
                raise BadRequest(f"a request with id {request.id!r} is already running; ids must be unique")
            check_request(request, self._info.context, self._info.vocab_size, self._info.embeds)
        self._admission.enter(requests[0].user, len(requests))
        streams = []
        for request in requests:
            stream = Stream(self, request)
            if not self._entries:
                self._idle.clear()
                self._watch()
            self._entries[request.id] = stream._entry
            self._send(Submit(request))
            streams.append(stream)
        return streams

    async def cancel(self, request_id: str) -> None:
        """Stop a request, which then ends with "cancelled"; unknown ids are ignored."""
        self.send_cancel(request_id)

    def send_cancel(self, request_id: str) -> None:
        """As ``cancel``, for callers that cannot wait."""
        if request_id in self._entries:
            self._send(Cancel(request_id))

    def _send(self, message: ToEngine) -> None:
        if self._socket is None:
            return  # the process has died, and with it the request
        # Never waits: the socket has no limit, and lacks a peer only when the process has just died, which
        # ends the request anyway.
        sent = asyncio.ensure_future(self._socket.send(self._encoder.encode(message), zmq.DONTWAIT))
        sent.add_done_callback(_ignore_no_peer)

    async def close(self) -> None:
        """Stop the process; requests in flight end with an error."""
        self._closing.set()
        process = self._process
        if process is not None:
            if self._state == "ready":
                self._send(Shutdown())
                await self._wait_for_exit(process)
            if process.returncode is None:
                process.kill()  # it is loading, or hangs; it has nothing that must be undone
        if self._supervisor is not None:
            await self._supervisor
        self._state = "stopped"
        self._settled.set()

    @staticmethod
    async def _wait_for_exit(process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _GRACE)

    # ------------------------------------------------------------------ hung processes

    def _watch(self) -> None:
        """Look for signs of life from now on, as long as there is work."""
        self._heard = self._checked = asyncio.get_running_loop().time()
        if self._timeout and not self._checking:
            self._checking = True
            self._check_later()

    def _check_later(self) -> None:
        asyncio.get_running_loop().call_later(self._timeout / 4, self._check)

    def _check(self) -> None:
        if not self._entries:
            self._checking = False
            return
        now = asyncio.get_running_loop().time()
        if now - self._checked > self._timeout / 2:
            self._heard = now  # this process stood still itself, and what came meanwhile is yet to be read
        self._checked = now
        # Another engine's step may have to end first: if it is that one which hangs, it is killed first.
        patience = 2 * self._timeout if self._waiting else self._timeout
        process = self._process
        if process is not None and process.returncode is None and now - self._heard > patience:
            self._cause = f"the engine process had work but was silent for {patience:.3g} s and was killed"
            process.kill()
        self._check_later()

    # ------------------------------------------------------------------ the process

    async def _supervise(self) -> None:
        directory = tempfile.mkdtemp(prefix="treadle-")  # readable for this user only
        context = zmq.asyncio.Context()
        try:
            while not self._closing.is_set():
                await self._run_once(context, f"ipc://{directory}/{self._restarts}")
                if self._closing.is_set() or self._state == "failed":
                    break
                self._restarts += 1
                if asyncio.get_running_loop().time() - self._ready_since > _QUIET:
                    self._failures = 0
                self._failures += 1
                if self._failures >= _MAX_FAILURES:
                    self._fail(f"the engine died {self._failures} times in a row; last: {self._error}")
                    break
                delay = min(_MAX_DELAY, self._restart_delay * 2 ** (self._failures - 1))
                log.error("%s; starting it again in %.2g s", self._error, delay)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), delay)
        except Exception as error:
            log.exception("the engine cannot be watched any more")
            self._fail(f"the engine could not be started: {error}")
        finally:
            context.destroy(linger=0)
            shutil.rmtree(directory, ignore_errors=True)

    def _fail(self, error: str) -> None:
        if self._info is not None:  # else `ready` raises it
            log.error("%s", error)
        self._state, self._error = "failed", error
        self._settled.set()

    async def _run_once(self, context: zmq.asyncio.Context, address: str) -> None:
        """Start the process and stay until it has ended and its requests have been told."""
        self._progress, self._ready_since, self._cause = 0.0, math.inf, None
        socket = context.socket(zmq.DEALER)
        socket.set_hwm(0)
        socket.bind(address)
        search_path = os.pathsep.join(path or os.curdir for path in sys.path)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "treadle.engine.process", address, self._loader),
            stdin=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": search_path},
        )
        self._process, self._socket = process, socket
        if self._closing.is_set():
            process.kill()
        receiver = asyncio.create_task(self._receive(socket), name="engine receiver")
        try:
            code = await process.wait()
            while await socket.poll(20):  # the receiver takes what it said before it died
                continue
        finally:
            receiver.cancel()
            self._process = self._socket = None
            socket.close(linger=0)
        if self._state != "failed":
            self._settled.clear()
            self._state = "restarting"
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            died = self._cause or f"the engine process {how}"
            self._error = "the engine was stopped" if self._closing.is_set() else died
        for request_id in list(self._entries):
            message = f"{self._error}; this answer is incomplete, please try again"
            self._deliver(Output(id=request_id, token_ids=[], finish_reason="error", error=message))
        for name in ("running", "queued", "kv_blocks_held", "kv_blocks_cached"):
            setattr(self._stats, name, 0)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            message = self._decoder.decode(await socket.recv())
            self._heard = asyncio.get_running_loop().time()
            self._waiting = isinstance(message, Waiting)
            match message:
                case Outputs(outputs):
                    for output in outputs:
                        self._deliver(output)
                case Stats(stats):
                    self._stats = stats
                case Hello():
                    self._send(self._configure)
                case Progress(fraction):
                    self._progress = fraction
                case Ready(info):
                    self._info = info
                    self._admission = Admission(info.max_requests)
                    self._progress = 1.0
                    self._state, self._error = "ready", None
                    self._ready_since = self._idle_since = self._heard
                    self._settled.set()
                case Failed(error):
                    if self._restarts:
                        self._cause = error  # what worked before may work again
                    else:
                        self._fail(error)

    def _deliver(self, output: Output) -> None:
        entry = self._entries.get(output.id)
        if entry is None:
            return
        entry.put(output)
        if output.token_ids:
            self._failures = 0
        if entry.ended:
            del self._entries[output.id]
            self._admission.leave(entry.user)
            if not self._entries:
                self._idle_since = asyncio.get_running_loop().time()
                self._idle.set()


def _ignore_no_peer(sent: asyncio.Future[Any]) -> None:
    if not sent.cancelled():
        error = sent.exception()
        if error is not None and not isinstance(error, zmq.Again):
            log.error("a message could not be sent to the engine: %s", error)
