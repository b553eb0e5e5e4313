"""Running the application: the port is bound first, so that clients meet an answer from the first moment
on."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import uvicorn
import uvloop
from starlette.applications import Starlette

from treadle.config import Config
from treadle.core import TreadleError
from treadle.server.app import create_app
from treadle.server.auth import check_exposure
from treadle.server.service import Load, Service

OnLoaded = Callable[[Service, str], Awaitable[None]]


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


def run(config: Config, load: Load, version: str, on_loaded: OnLoaded) -> None:
    """Serve until SIGINT or SIGTERM; running answers may finish within ``shutdown_timeout``.

    ``on_loaded(service, url)`` is called once the model is ready. Raises TreadleError if it could not be
    loaded.
    """
    check_exposure(config.host, config.api_key)
    listener = bind(config.host, config.port)
    name, port = listener.getsockname()[:2]
    shown = f"[{name}]" if ":" in name else name
    app = create_app(config, load, version)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, app, listener, f"http://{shown}:{port}", on_loaded))


async def _serve(
    config: Config, app: Starlette, listener: socket.socket, url: str, on_loaded: OnLoaded
) -> None:
    service: Service = app.state.service
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=round(config.shutdown_timeout),
        )
    )

    async def announce() -> None:
        await service.loaded.wait()
        if service.failure is not None:
            server.should_exit = True
        else:
            await on_loaded(service, url)

    announcing = asyncio.create_task(announce())
    try:
        await server.serve(sockets=[listener])
    finally:
        announcing.cancel()
        await service.stop()  # also when a second Ctrl-C skipped the lifespan's end
    if service.failure is not None:
        raise TreadleError(service.failure)
