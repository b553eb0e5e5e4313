"""The log: a line for each event, as text with ``name=value`` pairs or as JSON."""

from __future__ import annotations

import logging
import time
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.types import Scope

from treadle.server.metering import counts_of

log = logging.getLogger("treadle.request")

_PROBES = ("/health", "/ready", "/metrics")  # asked for all the time; logged on the level debug
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:/@+%[]")


def configure(level: str, format: str) -> None:
    """Log to standard error. level: ``debug`` … ``error``; format: ``text`` or ``json``."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("uvicorn").setLevel("WARNING" if level == "info" else level.upper())


def log_request(scope: Scope, status: int, began: float) -> None:
    """One line for a finished request that began at ``began``, on the clock of ``time.perf_counter``. Names
    the key, never shows it."""
    level = logging.DEBUG if scope["path"] in _PROBES else logging.INFO
    if not log.isEnabledFor(level):
        return
    state = scope["state"]
    fields: dict[str, Any] = {
        "method": scope["method"],
        "path": quote(scope["path"]),  # it may hold line breaks
        "status": status,
        "duration": round(time.perf_counter() - began, 4),
    }
    if scope.get("client"):
        fields["client"] = scope["client"][0]
    if "key" in state:
        fields["key"] = state["key"].name
    if "model" in state:
        fields["model"] = state["model"]
    if "work" in state:
        counts = counts_of(state, status)
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
            fields[name] = getattr(counts, name)
        first = state["work"].first_token
        if first is not None:
            fields["ttft"] = round(first - began, 4)
    log.log(level, "request", extra={"fields": {**fields, "request_id": state["request_id"]}})


class TextFormatter(logging.Formatter):
    """``TIME LEVEL LOGGER: message name=value …``; a value with other than plain characters is in quotes."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The message, followed by the fields."""
        fields: dict[str, Any] = getattr(record, "fields", {})
        return " ".join(
            [super().formatMessage(record), *(f"{name}={_plain(value)}" for name, value in fields.items())]
        )


def _plain(value: Any) -> str:
    text = str(value)
    return text if text and _PLAIN.issuperset(text) else msgspec.json.encode(text).decode()


class JsonFormatter(logging.Formatter):
    """A JSON object per line: time, level, logger, message, the fields, the traceback as ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {
            "time": f"{seconds}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()
