"""Engines that use only what other programs leave of the CPUs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from treadle import hub, machine
from treadle.core import Request, SamplingParams
from treadle.engine.client import EngineClient, Stream
from treadle.engine.load import LoadConfig
from treadle.engine.messages import Manners
from treadle.engine.sharing import Spare
from treadle.machine import Usage


def test_one_worker_less_for_every_core_that_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    now, busy = 0.0, 0.0
    monkeypatch.setattr(machine, "usage", lambda: Usage(busy, {1: now}))  # one core's worth is our own
    spare = Spare(4, clock=lambda: now)
    found: list[int] = []
    for others in (0.0, 0.4, 1.0, 2.6, 9.0, 0.0):
        assert spare.workers() == (found[-1] if found else 4)
        now += 1.0
        busy += 1.0 + others
        found.append(spare.workers())
    assert found == [4, 4, 3, 1, 1, 4]
    now += 60.0  # one long step, because the others leave next to nothing
    busy += 60 * 4.0
    assert spare.workers() == 1
    now += 60.0  # idle, and what happened meanwhile says nothing about now
    busy += 60 * 4.0
    spare.restart()
    now += 1.0
    busy += 1.0
    assert spare.workers() == 4


def ticks(pid: int) -> tuple[int, int]:
    """CPU time of the one worker thread of the pool, and of the whole process with it."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        found[task.name, name] = sum(map(int, rest.split()[11:13]))
    (worker,) = (time for (_, name), time in found.items() if name == "treadle-worker")
    return worker, sum(found.values())


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Starts three busy processes that are no children of this one."""
    file = tmp_path / "pid"

    def start() -> None:
        script = (
            f"import os\nopen({str(file)!r}, 'w').write(str(os.getpid()))\nfor _ in range(2): os.fork()\n"
        )
        script += "while True: pass"
        subprocess.run(["setsid", "-f", "timeout", "120", sys.executable, "-c", script], check=True)
        while not (file.exists() and file.read_text()):
            time.sleep(0.02)

    yield start
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.killpg(os.getpgid(int(file.read_text())), signal.SIGKILL)


def test_other_load_gets_the_cores(load: Callable[[], None]) -> None:
    async def test() -> None:
        path = str(hub.resolve(None).path)
        config = LoadConfig(path=path, threads=2, context=8192, pinned=False)
        client = EngineClient("treadle.engine.load:load_engine", config, manners=Manners(spare=True))
        await client.start()
        await client.ready()
        assert client.pid is not None
        params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
        stream = client.submit(Request(id="a", prompt_ids=[1, 2, 3], params=params))
        await anext(stream)
        load()
        await _tokens(stream, seconds=3)  # the engine notices the load
        before = ticks(client.pid)
        assert await _tokens(stream, seconds=1) > 0  # it goes on, with the other worker
        worker, whole = (now - then for now, then in zip(ticks(client.pid), before, strict=True))
        assert worker < 0.2 * whole  # it only wakes up between steps
        await client.close()

    asyncio.run(test())


async def _tokens(stream: Stream, seconds: float) -> int:
    """How many come within ``seconds`` and until there are twenty."""
    tokens, end = 0, time.monotonic() + seconds
    while tokens < 20 or time.monotonic() < end:
        tokens += len((await anext(stream)).token_ids)
    return tokens
