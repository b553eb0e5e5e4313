"""What a client and an engine process say to each other: msgspec structs in MessagePack over ZeroMQ.

Requests are named by id and nothing is shared, so that an engine may as well run on another machine. The
engine connects and says Hello, the client answers with Configure; then Progress until Ready or Failed; then
requests.
"""

from __future__ import annotations

from typing import Any

import msgspec

from treadle.core import Output, Request
from treadle.engine.engine import EngineInfo, EngineStats


class Manners(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine process shares the machine with others."""

    turns: str | None = None  # a file on this machine; engines with the same one run their steps in turn
    spare: bool = False  # use only what processes outside of this server leave of the CPUs


class Configure(msgspec.Struct, tag=True):
    """First message of the client: the argument of the loader, and manners."""

    config: Any
    manners: Manners = Manners()


class Submit(msgspec.Struct, tag=True):
    """Run this request."""

    request: Request


class Cancel(msgspec.Struct, tag=True):
    """Stop a request; unknown ids are ignored."""

    id: str


class Shutdown(msgspec.Struct, tag=True):
    """Exit now."""


class Hello(msgspec.Struct, tag=True):
    """First message of the engine."""


class Progress(msgspec.Struct, tag=True):
    """How much is loaded, 0 to 1."""

    fraction: float


class Ready(msgspec.Struct, tag=True):
    """Requests are welcome."""

    info: EngineInfo


class Failed(msgspec.Struct, tag=True):
    """Loading has failed, for a reason meant for the user; the engine exits."""

    error: str


class Outputs(msgspec.Struct, tag=True):
    """All outputs of one step."""

    outputs: list[Output]


class Stats(msgspec.Struct, tag=True):
    """Sent a few times per second while working, and when work ends."""

    stats: EngineStats


class Waiting(msgspec.Struct, tag=True):
    """The engine has work and waits for another one's step to end."""


ToEngine = Configure | Submit | Cancel | Shutdown
FromEngine = Hello | Progress | Ready | Failed | Outputs | Stats | Waiting
