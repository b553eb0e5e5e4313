"""Running the application: the port is bound first, so that clients meet an answer from the first moment
on."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn
import uvloop
from starlette.applications import Starlette

from treadle.config import Config
from treadle.core import TreadleError
from treadle.server.app import create_app
from treadle.server.auth import check_exposure
from treadle.server.service import Load, Service

_FAREWELL = 2  # seconds for the last events of answers that were ended
OnLoaded = Callable[[Service, str, str], Awaitable[None]]
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  (all addresses, and one of them on this machine)


class Server(uvicorn.Server):
    """Ends as asked by SIGINT or SIGTERM and returns, where uvicorn would raise the signal once more; a
    second signal is left to uvicorn. Answers that are not complete within ``patience`` seconds are ended with
    an error, where uvicorn would cut their connections."""

    def __init__(self, config: uvicorn.Config, service: Service, patience: float) -> None:
        config.timeout_graceful_shutdown = math.ceil(patience) + _FAREWELL
        super().__init__(config)
        self._service = service
        self._patience = patience

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running answers, see above."""
        ending = asyncio.get_running_loop().call_later(self._patience, self._service.end_answers)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            super().handle_exit(sig, frame)
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. TreadleError if the address is taken, forbidden or not of this machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        reason = error.strerror or str(error)
        raise TreadleError(
            f"cannot listen on {host} port {port}: {reason}; choose another --port or --host"
        ) from None
    listener.setblocking(False)
    return listener


def urls(listener: socket.socket) -> tuple[str, str]:
    """Where a listening socket is reached from this machine, and from where it listens: with the host's name
    if that is everywhere."""
    name, port = listener.getsockname()[:2]
    local = _ANY.get(name, name)
    public = socket.gethostname() if name in _ANY else name
    return _url(local, port), _url(public, port)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(config: Config, load: Load, version: str, on_loaded: OnLoaded) -> None:
    """Serve until SIGINT or SIGTERM; running answers may finish within ``shutdown_timeout``.

    ``on_loaded(service, *urls)`` is called once the model is ready, see ``urls``. Raises TreadleError if it
    could not be loaded.
    """
    check_exposure(config.host, config.api_key)
    listener = bind(config.host, config.port)
    app = create_app(config, load, version)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, app, listener, on_loaded))


async def _serve(config: Config, app: Starlette, listener: socket.socket, on_loaded: OnLoaded) -> None:
    service: Service = app.state.service
    server = Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
        ),
        service,
        config.shutdown_timeout,
    )

    async def announce() -> None:
        await service.loaded.wait()
        if service.failure is not None:
            server.should_exit = True
        else:
            await on_loaded(service, *urls(listener))

    announcing = asyncio.create_task(announce())
    try:
        await server.serve(sockets=[listener])
    finally:
        announcing.cancel()
        await service.stop()  # also when a second Ctrl-C skipped the lifespan's end
    if service.failure is not None:
        raise TreadleError(service.failure)
