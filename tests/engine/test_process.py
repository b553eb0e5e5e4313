"""The engine process and its client: what a server sees when the engine is killed, stopped, full or cannot
load.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from tests.engine.engine_model import LoadConfig, expected, prompt, request
from treadle.core import Output
from treadle.engine.client import EngineClient, EngineUnavailable, Stream
from treadle.engine.interfaces import BadRequest, QueueFull
from treadle.engine.messages import Manners

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 60)

    asyncio.run(limited())


@asynccontextmanager
async def engine(
    wait: bool = True, silence: float = 0.0, manners: Manners | None = None, **config: object
) -> AsyncIterator[EngineClient]:
    loading = LoadConfig(**config)  # type: ignore[arg-type]
    client = EngineClient(
        "tests.engine.engine_model:load", loading, restart_delay=0.05, timeout=silence, manners=manners
    )
    await client.start()
    try:
        if wait:
            await client.ready()
        yield client
    finally:
        await client.close()


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wakeups(pid: int) -> int:
    """How often the threads of a process were woken up so far."""
    statuses = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    lines = [line for status in statuses for line in status.splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def cpu_time(pid: int) -> list[str]:
    """Ticks in user and in system mode so far."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]


async def read(stream: Stream) -> tuple[list[int], Output]:
    tokens: list[int] = []
    async for output in stream:
        tokens += output.token_ids
    return tokens, output


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.01)


def test_answers_many_requests() -> None:
    async def test() -> None:
        async with engine() as client:
            assert (client.state, client.progress, client.error) == ("ready", 1.0, None)
            info = await client.ready()
            assert (info.context, info.max_requests) == (512, 48)
            prompts = [prompt(i, 10 + 3 * i) for i in range(30)]
            streams = [client.submit(request(f"r{i}", ids, 20)) for i, ids in enumerate(prompts)]
            answers = await asyncio.gather(*map(read, streams))
            for ids, (tokens, last) in zip(prompts, answers, strict=True):
                assert tokens == expected(ids, 20)
                assert last.finish_reason == "length" and last.usage is not None and last.timing is not None
                assert last.usage.prompt_tokens == len(ids) and last.timing.ttft >= 0
            await until(lambda: client.stats["requests_total"] == 30 and client.stats["running"] == 0)
            assert client.stats["kv_blocks_held"] == 0 and client.stats["output_tokens_total"] == 600

    run(test)


def test_slow_reader_loses_nothing() -> None:
    async def test() -> None:
        async with engine() as client:
            stream = client.submit(request("a", prompt(1, 10), 100))
            fast = client.submit(request("b", prompt(2, 10), 100))
            assert (await read(fast))[0] == expected(prompt(2, 10), 100)
            assert (await read(stream))[0] == expected(prompt(1, 10), 100)

    run(test)


def test_refuses_at_once_what_cannot_run() -> None:
    async def test() -> None:
        async with engine(step_seconds=0.01) as client:
            for ids, words in (([], "empty"), ([1] * 600, "600 tokens"), ([5000], "5000")):
                with pytest.raises(BadRequest, match=words):
                    client.submit(request("bad", ids))
            bad = client.submit(request("bad", [1], params={"temperature": -1.0}))
            tokens, last = await read(bad)
            assert not tokens and last.finish_reason == "error" and "temperature" in (last.error or "")
            streams = [client.submit(request(f"r{i}", prompt(i, 5), 4)) for i in range(48)]
            with pytest.raises(QueueFull, match="48"):
                client.submit(request("more", [1]))
            for stream in streams:
                assert (await read(stream))[1].finish_reason == "length"
            assert (await read(client.submit(request("more", [1, 2], 3))))[0] == expected([1, 2], 3)

    run(test)


def test_cancel_and_dropped_streams_free_their_place() -> None:
    async def test() -> None:
        async with engine(step_seconds=0.01) as client:
            cancelled = client.submit(request("cancelled", prompt(1, 10), 400))
            closed = client.submit(request("closed", prompt(2, 10), 400))
            other = client.submit(request("other", prompt(3, 10), 40))

            async def leaves() -> None:
                async for _ in client.submit(request("dropped", prompt(4, 10), 400)):
                    pass

            reader = asyncio.create_task(leaves())
            await anext(cancelled)
            await anext(closed)
            await client.cancel("cancelled")
            await client.cancel("unknown")
            await closed.aclose()
            reader.cancel()
            await asyncio.wait([reader])
            del reader  # and with it the last reference to the stream
            assert (await read(cancelled))[1].finish_reason == "cancelled"
            assert (await read(other))[0] == expected(prompt(3, 10), 40)
            await until(lambda: client.stats["running"] == 0)
            assert client.stats["kv_blocks_held"] == 0
            assert client.stats["output_tokens_total"] < 200

    run(test)


def test_killed_in_mid_stream_again_and_again() -> None:
    async def test() -> None:
        async with engine(step_seconds=0.005) as client:
            for round_ in range(6):
                await client.ready()
                assert client.pid is not None
                streams = [client.submit(request(f"{round_}-{i}", prompt(i, 20), 400)) for i in range(20)]
                first = await anext(streams[0])
                assert first.token_ids
                os.kill(client.pid, signal.SIGKILL)
                killed = time.monotonic()
                for tokens, last in await asyncio.gather(*map(read, streams)):
                    assert last.finish_reason == "error" and "signal 9" in (last.error or "")
                    assert last.token_ids == tokens[len(tokens) - len(last.token_ids) :]
                assert time.monotonic() - killed < 1.0  # the limit that the product promises
                assert client.state == "restarting"
                with pytest.raises(EngineUnavailable, match="restarting"):
                    client.submit(request("now", [1]))
            await client.ready()
            assert client.stats["restarts_total"] == 6
            streams = [client.submit(request(f"r{i}", prompt(i, 20), 10)) for i in range(48)]
            for i, stream in enumerate(streams):
                assert (await read(stream))[0] == expected(prompt(i, 20), 10)
            await until(lambda: client.stats["running"] == 0)
            assert client.stats["kv_blocks_held"] == 0

    run(test)


def test_loading_can_be_watched_and_fail() -> None:
    async def test() -> None:
        async with engine(wait=False, seconds=0.3, error="no such file: x.gguf") as client:
            assert client.state == "loading"
            with pytest.raises(EngineUnavailable, match="loading"):
                client.submit(request("a", [1]))
            await until(lambda: client.progress == 0.5)
            with pytest.raises(EngineUnavailable, match=r"no such file: x\.gguf"):
                await client.ready()
            await until(lambda: client.state == "failed" and client.pid is None)

    run(test)


def test_gives_up_when_every_start_dies() -> None:
    async def test() -> None:
        async with engine(wait=False, die=True) as client:
            with pytest.raises(EngineUnavailable, match=r"5 times in a row.*signal 9"):
                await client.ready()
            assert client.state == "failed"

    run(test)


def test_tells_why_it_cannot_start_again(tmp_path: Path) -> None:
    async def test() -> None:
        file = tmp_path / "model"
        file.touch()
        async with engine(file=str(file)) as client:
            assert client.pid is not None
            file.unlink()
            os.kill(client.pid, signal.SIGKILL)
            await until(lambda: client.state == "failed")
            assert re.search(r"5 times in a row; last: no such file: .*/model", client.error or "")

    run(test)


def test_signals_to_the_whole_service_are_left_to_the_client() -> None:
    async def test() -> None:
        async with engine(step_seconds=0.01) as client:
            assert client.pid is not None
            stream = client.submit(request("a", prompt(1, 10), 50))
            await anext(stream)
            os.kill(client.pid, signal.SIGTERM)
            os.kill(client.pid, signal.SIGINT)
            last = [output async for output in stream][-1]
            assert last.finish_reason == "length"

    run(test)


def test_close_while_loading_ends_the_process() -> None:
    async def test() -> None:
        async with engine(wait=False, seconds=30.0) as client:
            await until(lambda: client.progress >= 0.5)
            pid = client.pid
            assert pid is not None
            await client.close()
            assert not alive(pid)

    run(test)


def test_close_ends_process_and_requests() -> None:
    async def test() -> None:
        async with engine(step_seconds=0.01) as client:
            pid = client.pid
            assert pid is not None and alive(pid)
            stream = client.submit(request("a", prompt(1, 10), 400))
            await anext(stream)
            await client.close()
            assert not alive(pid)
            assert (await read(stream))[1].finish_reason == "error"
            assert client.state == "stopped" and client.stats["restarts_total"] == 0
            with pytest.raises(EngineUnavailable):
                await client.ready()

    run(test)


def test_close_while_loading_does_not_wait_for_it() -> None:
    async def test() -> None:
        async with engine(wait=False, seconds=30.0) as client:
            await until(lambda: client.progress == 0.5)
            started = time.monotonic()
            await client.close()
            assert time.monotonic() - started < 5

    run(test)


def test_interrupt_is_left_to_the_parent() -> None:
    async def test() -> None:
        async with engine() as client:
            assert client.pid is not None
            os.kill(client.pid, signal.SIGINT)
            assert (await read(client.submit(request("a", [1, 2], 5))))[0] == expected([1, 2], 5)
            assert client.stats["restarts_total"] == 0

    run(test)


def test_idle_engine_uses_no_cpu() -> None:
    async def test() -> None:
        async with engine() as client:
            await read(client.submit(request("a", [1, 2], 5)))
            await asyncio.sleep(2.0)  # its self-check is done
            assert client.pid is not None
            before = wakeups(client.pid)
            await asyncio.sleep(1.0)
            assert wakeups(client.pid) <= before + 2

    run(test)


def test_idle_engine_takes_no_cpu_time() -> None:
    async def test() -> None:
        async with engine(silence=0.2) as client:
            await read(client.submit(request("a", [1, 2], 5)))
            await asyncio.sleep(1.5)
            assert client.pid is not None
            before = cpu_time(client.pid)
            await asyncio.sleep(1.5)
            assert cpu_time(client.pid) == before

    run(test)


def test_hung_engine_is_killed_and_started_again() -> None:
    async def test() -> None:
        async with engine(silence=0.6, step_seconds=0.01) as client:
            assert client.pid is not None
            streams = [client.submit(request(f"r{i}", prompt(i, 20), 400)) for i in range(3)]
            await anext(streams[0])
            os.kill(client.pid, signal.SIGSTOP)
            for _, last in await asyncio.gather(*map(read, streams)):
                assert last.finish_reason == "error" and "silent for 0.6 s" in (last.error or "")
            await client.ready()
            assert client.stats["restarts_total"] == 1
            assert (await read(client.submit(request("a", [1, 2], 5))))[0] == expected([1, 2], 5)

    run(test)


def test_engine_that_hangs_while_idle_is_found_by_the_next_request() -> None:
    async def test() -> None:
        async with engine(silence=0.4) as client:
            assert client.pid is not None
            await read(client.submit(request("a", [1, 2], 5)))
            os.kill(client.pid, signal.SIGSTOP)
            await asyncio.sleep(1.0)
            assert client.state == "ready"
            _, last = await read(client.submit(request("b", [1, 2], 5)))
            assert last.finish_reason == "error" and "silent" in (last.error or "")
            await client.ready()

    run(test)


def test_slow_steps_are_no_hang() -> None:
    async def test() -> None:
        async with engine(silence=1.0, step_seconds=0.5) as client:
            tokens, last = await read(client.submit(request("a", [1, 2], 5)))
            assert last.finish_reason == "length" and tokens == expected([1, 2], 5)
            assert client.stats["restarts_total"] == 0

    run(test)


def test_engines_of_a_server_take_turns(tmp_path: Path) -> None:
    async def test() -> None:
        log = str(tmp_path / "steps")
        manners = Manners(turns=str(tmp_path / "turn"))
        async with (
            engine(manners=manners, step_seconds=0.01, log=log) as one,
            engine(manners=manners, step_seconds=0.01, log=log) as two,
        ):
            streams = [client.submit(request("a", [1, 2], 40)) for client in (one, two)]
            for stream in streams:
                assert (await read(stream))[0] == expected([1, 2], 40)
        steps = sorted(map(str.split, Path(log).read_text().splitlines()), key=lambda s: float(s[0]))  # noqa: ASYNC240
        assert len(steps) == 80 and len({pid for *_, pid in steps}) == 2
        assert all(float(before[1]) <= float(after[0]) for before, after in pairwise(steps))
        both = [pid for *_, pid in steps[5:60]]
        assert sum(a != b for a, b in pairwise(both)) > 40  # neither overtakes the other

    run(test)


def test_engine_that_hangs_in_its_turn_stops_the_others_no_longer_than_needed(tmp_path: Path) -> None:
    async def test() -> None:
        manners = Manners(turns=str(tmp_path / "turn"))
        async with (
            engine(manners=manners, step_seconds=0.2, silence=1.0) as hangs,
            engine(manners=manners, step_seconds=0.01, silence=1.0) as other,
        ):
            assert hangs.pid is not None
            lost = hangs.submit(request("a", [1, 2], 400))
            await anext(lost)
            os.kill(hangs.pid, signal.SIGSTOP)  # nearly all of its time is spent in steps
            tokens, last = await read(other.submit(request("b", [1, 2], 5)))
            assert last.finish_reason == "length" and tokens == expected([1, 2], 5)
            assert other.stats["restarts_total"] == 0
            assert (await read(lost))[1].finish_reason == "error"

    run(test)


def test_spare_engines_have_the_least_priority() -> None:
    async def test() -> None:
        async with engine(manners=Manners(spare=True)) as client:
            assert client.pid is not None
            assert os.getpriority(os.PRIO_PROCESS, client.pid) == 19
            assert (await read(client.submit(request("a", [1, 2], 5))))[0] == expected([1, 2], 5)

    run(test)


def test_dies_with_its_parent() -> None:
    code = (
        "import asyncio, os\n"
        "from treadle.engine.client import EngineClient\n"
        "async def main():\n"
        "    client = EngineClient('tests.engine.engine_model:load', {})\n"
        "    await client.start()\n"
        "    await client.ready()\n"
        "    print(client.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    pid = int(parent.stdout)
    end = time.monotonic() + 5
    while alive(pid):
        assert time.monotonic() < end, "the engine outlives its parent"
        time.sleep(0.02)
