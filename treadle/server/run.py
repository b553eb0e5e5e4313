"""Running the application: the port is bound first, so that clients meet an answer from the first moment
on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import uvicorn
import uvloop
from starlette.applications import Starlette

from treadle import machine
from treadle.config import Config
from treadle.core import TreadleError
from treadle.keys.actor import server_actor
from treadle.keys.ring import Keyring
from treadle.keys.store import NoStore, Store, data_dir
from treadle.server.app import create_app
from treadle.server.auth import is_loopback
from treadle.server.connection import IDLE_SECONDS, Connection
from treadle.server.service import Load, Service
from treadle.server.tls import Tls

log = logging.getLogger("treadle.server")

# For large bodies and grammars. Few, because each takes a core from the engine, and keeps the memory that its
# largest work needed.
_THREADS = 2
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


def urls(listener: socket.socket, tls: bool) -> tuple[str, str]:
    """Where a listening socket is reached from this machine, and from where it listens: with the host's name
    if that is everywhere."""
    scheme = "https" if tls else "http"
    name, port = listener.getsockname()[:2]
    local = _ANY.get(name, name)
    public = socket.gethostname() if name in _ANY else name
    return _url(scheme, local, port), _url(scheme, public, port)


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def run(config: Config, load: Load, version: str, on_loaded: OnLoaded) -> None:
    """Serve until SIGINT or SIGTERM; running answers may finish within ``shutdown_timeout``.

    ``on_loaded(service, *urls)`` is called once the model is ready, see ``urls``. Raises TreadleError if it
    could not be loaded, or if the settings, the key store or the certificate cannot be used.
    """
    tls = Tls(config.tls_cert, config.tls_key) if config.tls_cert is not None else None
    if tls is None and config.tls_key is not None:
        raise TreadleError("--tls-key needs the certificate, too: give it with --tls-cert")
    machine.give_back_freed_memory()
    with bind(config.host, config.port) as listener, contextlib.closing(open_keyring(config)) as keyring:
        app = create_app(config, load, version, keyring)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, app, listener, tls, on_loaded))


def open_keyring(config: Config) -> Keyring:
    """The keys of the settings and of the key store. Where other machines can reach the server and there is
    no key, the first one is made, and written to a file that only its owner can read."""
    folder = data_dir(config.data_dir)
    exposed = not is_loopback(config.host)

    def open_store() -> Store:
        return Store(folder, actor=server_actor(), durable=False)

    try:
        with contextlib.closing(Store(folder, actor=server_actor())) as store:
            file = folder / "first-key"
            if exposed and not config.api_key and store.first_key(file) is not None:
                log.warning("there was no API key; the first one is in %s, see `treadle key --help`", file)
    except NoStore as error:
        if exposed and not config.api_key:
            raise TreadleError(
                f"{error}; --host {config.host} is reachable from other machines, so an API key is required: "
                "the first one is kept there, or give one with --api-key or TREADLE_API_KEY"
            ) from None
        log.warning("%s; until then the usage of the server is not kept", error)
        return Keyring(config.api_key, may_be_open=not exposed)
    return Keyring(config.api_key, open_store, may_be_open=not exposed)


async def _serve(
    config: Config, app: Starlette, listener: socket.socket, tls: Tls | None, on_loaded: OnLoaded
) -> None:
    service: Service = app.state.service
    keyring: Keyring = app.state.keyring
    service.own_key, service.needs_key = keyring.own_secret(), not keyring.open
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(_THREADS, "treadle-body"))
    if tls is not None:
        loop.add_signal_handler(signal.SIGHUP, tls.renew)
    server = Server(
        uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            proxy_headers=bool(config.trusted_proxies),
            forwarded_allow_ips=list(config.trusted_proxies),
            ssl_context_factory=(lambda *_: tls.context) if tls is not None else None,
        ),
        service,
        config.shutdown_timeout,
    )

    async def announce() -> None:
        await service.loaded.wait()
        if service.failure is not None:
            server.should_exit = True
        else:
            await on_loaded(service, *urls(listener, tls is not None))

    announcing = asyncio.create_task(announce())
    try:
        await server.serve(sockets=[listener])
    finally:
        announcing.cancel()
        await service.stop()  # also when a second Ctrl-C skipped the lifespan's end
    if service.failure is not None:
        raise TreadleError(service.failure)
