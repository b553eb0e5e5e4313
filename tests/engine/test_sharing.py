"""Engines that use only what other programs leave of the CPUs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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
    now += 60.0  # idle, and what happened meanwhile says nothing about now
    busy += 60 * 4.0
    assert spare.workers() == 4


def workers(pid: int) -> dict[str, int]:
    """CPU time of the threads of a pool, in ticks."""
    ticks = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        if name == "treadle-worker":
            ticks[task.name] = sum(map(int, rest.split()[11:13]))
    return ticks


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[None]:
    """Three busy processes that are no children of this one."""
    file = tmp_path / "pid"
    load = f"import os\nopen({str(file)!r}, 'w').write(str(os.getpid()))\nfor _ in range(2): os.fork()\n"
    load += "while True: pass"
    subprocess.run(["setsid", "-f", "timeout", "120", sys.executable, "-c", load], check=True)
    while not (file.exists() and file.read_text()):
        time.sleep(0.02)
    yield
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpgid(int(file.read_text())), signal.SIGKILL)


@pytest.mark.usefixtures("busy")
def test_other_load_gets_the_cores() -> None:
    async def test() -> None:
        path = str(hub.resolve(None).path)
        config = LoadConfig(path=path, threads=2, context=2048, pinned=False)
        client = EngineClient("treadle.engine.load:load_engine", config, manners=Manners(spare=True))
        await client.start()
        await client.ready()
        assert client.pid is not None
        params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
        stream = client.submit(Request(id="a", prompt_ids=[1, 2, 3], params=params))
        reader = asyncio.create_task(_drain(stream))
        await asyncio.sleep(3.5)
        before, tokens = workers(client.pid), client.stats["output_tokens_total"]
        await asyncio.sleep(1.5)
        assert len(before) == 1
        used = sum(workers(client.pid).values()) - sum(before.values())
        assert used / os.sysconf("SC_CLK_TCK") < 0.15  # it only wakes up between steps
        assert client.stats["output_tokens_total"] > tokens  # it goes on, with the other worker
        await client.close()
        await reader

    asyncio.run(asyncio.wait_for(test(), 60))


async def _drain(stream: Stream) -> None:
    async for _ in stream:
        pass
