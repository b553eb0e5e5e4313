"""Every setting of Treadle in one place.

A setting has one name and four sources. The first that names it wins:

1. a command-line flag (``--kv-memory 4G``),
2. an environment variable (``TREADLE_KV_MEMORY=4G``),
3. a TOML file (``kv_memory = "4G"``): ``--config FILE``, else ``TREADLE_CONFIG``, else
   ``$XDG_CONFIG_HOME/treadle/config.toml`` if it exists,
4. the default below.

Lists are comma-separated in the environment, arrays in TOML and repeated flags on the command line. Sources
are not merged: a list in the environment replaces the one of the file.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import string
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treadle.core import TreadleError

_PATH_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-._~/")
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}

_TIMES = {"s": 1, "m": 60, "h": 3600}  # seconds


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a non-empty text")
    return value.strip()


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        allowed = f"a whole number from {low} to {high}"
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(allowed)
        try:
            number = int(value)
        except ValueError:
            raise ValueError(allowed) from None
        if not low <= number <= high:
            raise ValueError(allowed)
        return number

    return parse


def _seconds(value: Any) -> float:
    """Seconds, from a number or a text such as ``15m``."""
    allowed = "a time from 0 to 86400 seconds, such as 90, 15m or 2h"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(allowed)
    text = str(value).strip().lower()
    unit = text[-1:] if text[-1:] in _TIMES else ""
    try:
        number = float(text.removesuffix(unit)) * _TIMES.get(unit, 1)
    except ValueError:
        raise ValueError(allowed) from None
    if not 0 <= number <= 86400:
        raise ValueError(allowed)
    return number


def _size(value: Any) -> int:
    """Bytes, from an integer or a text such as ``512M`` or ``4GiB`` (powers of 1024)."""
    allowed = "a size such as 512M or 4G"
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(allowed)
    text = str(value).strip().lower().removesuffix("ib").removesuffix("b")
    unit = text[-1:] if text[-1:] in _UNITS else ""
    try:
        number = float(text.removesuffix(unit)) * _UNITS[unit]
    except ValueError:
        raise ValueError(allowed) from None
    if not 0 < number < 2**63:
        raise ValueError(allowed)
    return int(number)


def _one_of(*choices: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError("one of " + ", ".join(choices))
        return str(value)

    return parse


def _networks(value: Any) -> tuple[str, ...]:
    items = _list(value)
    for item in items:
        try:
            ipaddress.ip_network(item)
        except ValueError:
            raise ValueError("IP addresses or networks such as 10.0.0.0/8") from None
    return items


def _root_path(value: Any) -> str:
    text = _text(value)
    if not text.startswith("/") or text.endswith("/") or not set(text) <= _PATH_CHARACTERS:
        raise ValueError("a path such as /llm, which begins with / and does not end with it")
    return text


def _list(value: Any) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise ValueError("texts separated by commas")
    return tuple(item.strip() for item in items if item.strip())


def setting(default: Any, parse: Callable[[Any], Any], help: str, metavar: str = "TEXT") -> Any:
    """A configuration field: its default, how to check a raw value, and the text of ``--help``."""
    return field(default=default, metadata={"parse": parse, "help": help, "metavar": metavar})


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings. Build it with :meth:`load`, which checks every value."""

    model: tuple[str, ...] = setting(
        (), _list, "Models: .gguf files or names known to `treadle list`; NAME=MODEL names one in the API."
    )
    threads: int | None = setting(
        None, _integer(1, 4096), "Worker threads. Default: the physical cores this process may use.", "N"
    )
    context: int | None = setting(
        None,
        _integer(16, 2**24),
        "Context length in tokens. Default: what the model was trained for, at most 32768.",
        "N",
    )
    cpu_share: str = setting(
        "full",
        _one_of("full", "spare"),
        "full: all cores of --threads; spare: only what other programs leave, at the lowest priority.",
        "full|spare",
    )
    kv_memory: int | None = setting(
        None, _size, "Memory for the KV cache, such as 512M or 4G. Default: planned from free memory.", "SIZE"
    )
    kv_dtype: str = setting(
        "bf16",
        _one_of("bf16", "q8", "q4"),
        "Numbers in the KV cache: bf16, or in about 8 or 4 bits, for longer contexts and faster decoding of "
        "them.",
        "bf16|q8|q4",
    )
    kv_spill: str | None = setting(
        None, _text, "Folder in which the KV of prompts is kept over restarts. Default: none.", "DIR"
    )
    kv_spill_size: int = setting(10 * 2**30, _size, "Most that --kv-spill may take; the oldest goes.", "SIZE")
    pack_cache: str | None = setting(
        None,
        _text,
        "Folder in which packed weights are kept, so that a restart maps them. Default: none.",
        "DIR",
    )
    pack_cache_size: int = setting(
        100 * 2**30, _size, "Most that --pack-cache may take; the models used least recently go.", "SIZE"
    )
    target_itl: float = setting(
        0.1,
        _seconds,
        "Seconds between two tokens of a running answer that reading prompts should not exceed.",
        "SECONDS",
    )
    max_queue: int = setting(
        256, _integer(0, 2**20), "Requests that may wait for others to end; more are refused with 429.", "N"
    )
    speculation: str = setting(
        "on",
        _one_of("on", "off"),
        "on: guess tokens from earlier text where that saves time, with the same answers; off: never.",
        "on|off",
    )
    draft: tuple[str, ...] = setting(
        (),
        _list,
        "Smaller model with the same tokenizer that guesses tokens, with the same answers; NAME= says for "
        "which of several models. Default: none.",
        "[NAME=]MODEL",
    )
    idle_unload: float = setting(
        0.0,
        _seconds,
        "Time without requests, such as 15m, after which a model leaves memory until it is asked for.",
        "TIME",
    )
    load_timeout: float = setting(
        300.0,
        _seconds,
        "Time that requests wait for their model to load; then the answer is 503.",
        "TIME",
    )
    engine_timeout: float = setting(
        60.0,
        _seconds,
        "Silence after which an engine with work is killed and restarted; 0: never.",
        "TIME",
    )
    host: str = setting(
        "127.0.0.1",
        _text,
        "Address to listen on. Beyond loopback an API key is required; the first one is made at start.",
        "ADDR",
    )
    port: int = setting(8000, _integer(0, 65535), "Port to listen on; 0 takes a free one.", "PORT")
    api_key: tuple[str, ...] = setting(
        (), _list, "Key that clients must send as `Authorization: Bearer KEY`. Repeat for several.", "KEY"
    )
    data_dir: str | None = setting(
        None,
        _text,
        "Folder of the key store, with keys, usage and audit log. Default: $XDG_DATA_HOME/treadle or "
        "~/.local/share/treadle.",
        "DIR",
    )
    tls_cert: str | None = setting(
        None, _text, "Certificate chain in PEM format, to serve HTTPS instead of HTTP.", "FILE"
    )
    tls_key: str | None = setting(
        None,
        _text,
        "Private key of the certificate in PEM format. Default: in the file of --tls-cert.",
        "FILE",
    )
    root_path: str | None = setting(
        None,
        _root_path,
        "Path under which a proxy shows this server, such as /llm, whether the proxy removes it or not.",
        "PATH",
    )
    trusted_proxies: tuple[str, ...] = setting(
        (),
        _networks,
        "Address or network of a proxy whose X-Forwarded-For and X-Forwarded-Proto are believed. Repeat for "
        "several.",
        "ADDR",
    )
    cors_origin: tuple[str, ...] = setting(
        (), _list, "Web origin that may call the API from a browser, or *. Repeat for several.", "ORIGIN"
    )
    max_body: int = setting(2**24, _size, "Largest request body.", "SIZE")
    keep_alive: float = setting(
        10.0, _seconds, "Seconds of silence before a stream sends an SSE comment; 0: never.", "SECONDS"
    )
    shutdown_timeout: float = setting(
        30.0, _seconds, "Seconds that running answers may take to finish when the server stops.", "SECONDS"
    )
    reasoning_format: str = setting(
        "auto",
        _one_of("auto", "none"),
        "auto: reasoning goes to `reasoning_content`; none: it stays in `content` with its tags.",
        "auto|none",
    )
    log_format: str = setting(
        "text",
        _one_of("text", "json"),
        "text: lines with name=value pairs; json: a JSON object per line.",
        "text|json",
    )
    log_level: str = setting(
        "info", _one_of("debug", "info", "warning", "error"), "How much to log.", "debug|info|warning|error"
    )

    @classmethod
    def load(
        cls,
        flags: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        file: str | Path | None = None,
    ) -> Config:
        """Combine the sources in the order given at the top of this module.

        ``flags`` maps field names to values; ``None`` and empty tuples mean "not given". Raises TreadleError
        naming the setting, its source, its value and what is allowed.
        """
        environ = os.environ if environ is None else environ
        known = {f.name: f for f in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, raw in _read_file(environ, file).items():
            if name not in known:
                raise TreadleError(
                    f"unknown setting {name!r} in the configuration file; known: {', '.join(known)}"
                )
            values[name] = _check(known[name], raw, f"{name} in the configuration file")
        for name, spec in known.items():
            variable = "TREADLE_" + name.upper()
            if environ.get(variable):
                values[name] = _check(spec, environ[variable], variable)
        for name, raw in (flags or {}).items():
            if raw is not None and raw != ():
                values[name] = _check(known[name], raw, "--" + name.replace("_", "-"))
        return cls(**values)


def _check(spec: dataclasses.Field[Any], raw: Any, source: str) -> Any:
    try:
        return spec.metadata["parse"](raw)
    except ValueError as error:
        shown = "the given value" if spec.name == "api_key" else repr(raw)
        raise TreadleError(f"{source}: {shown} is not allowed; it must be {error}") from None


def _read_file(environ: Mapping[str, str], file: str | Path | None) -> dict[str, Any]:
    named = file or environ.get("TREADLE_CONFIG")
    if named:
        path = Path(named)
    else:
        base = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "~"), ".config")
        path = Path(base).expanduser() / "treadle" / "config.toml"
        if not path.is_file():
            return {}
    try:
        with path.open("rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise TreadleError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TreadleError(f"the configuration file {path} is not valid TOML: {error}") from None
