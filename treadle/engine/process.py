"""The engine process: ``python -m treadle.engine.process ADDRESS module:loader``.

Connects to the client's socket, loads the engine, then alternates between messages and steps. Without work it
blocks in poll and uses no CPU. It ends with its parent (standard input is a pipe that the parent holds open
and that closes when it dies) and on Shutdown. SIGINT and SIGTERM are left to the parent: service managers
send them to every process of a service, and running answers are to be finished first.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, get_type_hints

import msgspec
import zmq

from treadle import machine
from treadle.core import Output, TreadleError
from treadle.engine.engine import Engine
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
from treadle.engine.sharing import Spare, Turns, step_back

log = logging.getLogger("treadle.engine")

# Gets the client's configuration, converted to the type of its first parameter, and a function that takes
# how much is loaded (0 to 1), to be called from the loader's own thread. Its TreadleErrors are for the user.
Loader = Callable[[Any, Callable[[float], None]], Engine]

_STATS_EVERY = 0.25  # seconds, while working
_IDLE_MS = 1000  # without work for this long, the engine checks its own counts


class Connection:
    """The engine's end of the socket."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.set_hwm(
            0
        )  # what may be under way is bounded by the requests, so nothing is ever dropped
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: FromEngine) -> None:
        """Queue a message; does not block."""
        self._socket.send(self._encoder.encode(message))

    def receive(self, wait: bool) -> ToEngine | None:
        """The next message; None if there is none and ``wait`` is false."""
        try:
            return self._decoder.decode(self._socket.recv(0 if wait else zmq.DONTWAIT))
        except zmq.Again:
            return None

    def arrives(self, milliseconds: int) -> bool:
        """Whether a message is there within that time."""
        return bool(self._socket.poll(milliseconds))

    def close(self) -> None:
        """Send what is queued, for at most a second, and close."""
        self._socket.close()
        zmq.Context.instance().term()


def load(name: str, config: Any, progress: Callable[[float], None]) -> Engine:
    """Call the loader named ``module:function``. Its module may import the native one."""
    machine.require_isa()
    module, _, function = name.partition(":")
    loader: Loader = getattr(importlib.import_module(module), function)
    wanted = next((type_ for key, type_ in get_type_hints(loader).items() if key != "return"), Any)
    return loader(msgspec.convert(config, wanted), progress)


def serve(connection: Connection, engine: Engine, manners: Manners) -> None:
    """Answer requests until Shutdown."""
    turns = Turns(manners.turns) if manners.turns is not None else None
    spare = Spare(engine.info.threads) if manners.spare else None
    sent = time.monotonic()
    while True:
        if not engine.has_work:
            connection.send(Stats(engine.stats()))
            if not connection.arrives(_IDLE_MS):
                engine.check()
        idle = not engine.has_work
        while message := connection.receive(wait=not engine.has_work):
            match message:
                case Submit(request):
                    try:
                        engine.add(request)
                    except TreadleError as refusal:
                        last = Output(id=request.id, token_ids=[], finish_reason="error", error=str(refusal))
                        connection.send(Outputs([last]))
                case Cancel(id):
                    engine.cancel(id)
                case Shutdown():
                    return
                case Configure():
                    log.warning("the engine is configured already; a second configuration is ignored")
        if spare is not None:
            if idle:
                spare.restart()
            engine.use_threads(spare.workers())
        with turns.turn(lambda: connection.send(Waiting())) if turns else nullcontext():
            outputs = engine.step()
        if outputs:
            connection.send(Outputs(outputs))
        if time.monotonic() - sent >= _STATS_EVERY:
            connection.send(Stats(engine.stats()))
            sent = time.monotonic()


def _exit_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def main(address: str, loader: str) -> int:
    """Run until told to exit. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, name="parent", daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    connection = Connection(address)
    try:
        connection.send(Hello())
        message = connection.receive(wait=True)
        if not isinstance(message, Configure):
            raise RuntimeError(f"the first message must be Configure, not {type(message).__name__}")
        if message.manners.spare:
            step_back()
        try:
            engine = load(loader, message.config, lambda fraction: connection.send(Progress(fraction)))
        except TreadleError as error:
            connection.send(Failed(str(error)))
            return 1
        except Exception as error:
            log.exception("the model could not be loaded")
            connection.send(Failed(f"{type(error).__name__}: {error}"))
            return 1
        connection.send(Ready(engine.info))
        serve(connection, engine, message.manners)
        engine.close()
        return 0
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
