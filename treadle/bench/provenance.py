"""Where a benchmark's numbers come from: when, on what machine, with which versions, by which command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from treadle import machine
from treadle.bench.machine import cpu_model

_ROOT = Path(__file__).parents[2]


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a benchmark. Paths in ``command`` outside the project are cut to their last part."""

    date: str  # of its end, UTC, ISO 8601
    cpu: str
    cores: int  # physical ones that the process may use
    memory_gib: float
    system: str
    versions: dict[str, str]  # by program
    command: str


def provenance(versions: dict[str, str] | None = None, argv: Sequence[str] | None = None) -> Provenance:
    """Of this process, now. ``versions``: those of the other programs that were measured."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Provenance(
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
        cpu=cpu_model(),
        cores=len(machine.threads()),
        memory_gib=round(memory / 2**30, 1),
        system=f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}",
        versions={"treadle": _own_version(), **(versions or {})},
        command=_command(sys.orig_argv if argv is None else argv, os.environ),
    )


def _command(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """As somebody would type it, with the variables of Treadle that decide how it computes."""
    parts = [_short(part) for part in argv]
    parts[0] = Path(parts[0]).name
    if len(parts) > 1 and Path(parts[1]).name == "treadle":  # its script
        parts[:2] = ["treadle"]
    isa = environ.get("TREADLE_ISA")
    return (f"TREADLE_ISA={shlex.quote(isa)} " if isa else "") + shlex.join(parts)


def _own_version() -> str:
    version = importlib.metadata.version("treadle")
    git = ["git", "-C", str(_ROOT), "rev-parse", "--short=10", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return version  # not a checkout
    return f"{version} ({commit})"


def _short(part: str) -> str:
    path = Path(part)
    if path.is_absolute():
        return str(path.relative_to(_ROOT)) if path.is_relative_to(_ROOT) else path.name
    return part
