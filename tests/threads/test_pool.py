"""Worker threads: idle, shared, refused and left behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from treadle import _native


def worker_ticks() -> dict[int, int]:
    """CPU time of every worker thread of this process, in clock ticks."""
    ticks = {}
    for task in Path("/proc/self/task").iterdir():
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        fields = rest.split()
        if name == "treadle-worker":
            ticks[int(task.name)] = int(fields[11]) + int(fields[12])
    return ticks


def product(pool: _native.Pool, rows: int = 64) -> np.ndarray:
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(256, 256)).astype(np.float32)
    matrix = _native.pack(pool, "F32", weights.view(np.uint8).reshape(-1), 256, 256)
    return _native.linear(pool, _native.isa(), matrix, rng.normal(size=(rows, 256)).astype(np.float32))


def two_cpus() -> list[int]:
    """Also where only one CPU is allowed: a worker that cannot be pinned works all the same."""
    allowed = sorted(os.sched_getaffinity(0))
    return [allowed[0], allowed[1] if len(allowed) > 1 else allowed[0] + 1]


def test_idle_workers_use_no_cpu_and_end_with_their_pool() -> None:
    before = set(worker_ticks())
    pool = _native.Pool(2, two_cpus())
    product(pool)
    time.sleep(0.1)  # the end of spinning
    first = worker_ticks()
    time.sleep(0.5)
    assert worker_ticks() == first
    assert len(set(first) - before) == 1
    del pool
    deadline = time.monotonic() + 10  # a thread stays in /proc for a moment after it has been joined
    while not set(worker_ticks()) <= before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_caller_gets_its_affinity_back() -> None:
    before = os.sched_getaffinity(0)
    product(_native.Pool(2, two_cpus()))
    assert os.sched_getaffinity(0) == before


def test_two_threads_share_a_pool() -> None:
    pool = _native.Pool(2, two_cpus())
    expected = product(pool)
    with ThreadPoolExecutor(4) as threads:
        for result in threads.map(lambda _: product(pool), range(40)):
            np.testing.assert_array_equal(result, expected)


def test_many_pools_at_once() -> None:
    pools = [_native.Pool(2, two_cpus()) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(product, pools))
    for result in results:
        np.testing.assert_array_equal(result, results[0])


def test_cpus_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="at least 1 thread, not 0"):
        _native.Pool(0)
    with pytest.raises(ValueError, match="CPU 0 is out of range or named twice"):
        _native.Pool(2, [0, 0])
    with pytest.raises(ValueError, match="CPU -1 is out of range"):
        _native.Pool(1, [-1])
    with pytest.raises(ValueError, match="2 threads need as many CPUs, but 1 were named"):
        _native.Pool(2, [0])
    with pytest.raises(ValueError, match="this process may use"):
        _native.Pool(1000)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_system_that_gives_no_more_threads() -> None:
    done = run_python(
        """
import resource
from pathlib import Path
from treadle import _native
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (200 << 20),) * 2)
try:
    _native.Pool(256, list(range(256)))
except RuntimeError as error:
    print(error)
_native.Pool(2, [0, 1])
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "of 256 worker threads" in done.stdout


def test_a_forked_process_cannot_use_the_pool_but_exits_cleanly() -> None:
    done = run_python(
        """
import os, sys
import numpy as np
from treadle import _native
pool = _native.Pool(4, list(range(4)))
matrix = _native.pack(pool, "F32", np.ones(64, np.uint8), 1, 16)
x = np.ones((1, 16), np.float32)
_native.linear(pool, "ref", matrix, x)
child = os.fork()
if child == 0:
    try:
        _native.linear(pool, "ref", matrix, x)
    except RuntimeError as error:
        print(error, flush=True)
    own = _native.Pool(2, [0, 1])
    del pool, matrix
    _native.linear(own, "ref", _native.pack(own, "F32", np.ones(64, np.uint8), 1, 16), x)
    sys.exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
_native.linear(pool, "ref", matrix, x)
print("child ended with", status)
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "load the model in the process that uses it" in done.stdout
    assert done.stdout.endswith("child ended with 0\n")


def test_fewer_workers_give_the_same_and_the_rest_sleep() -> None:
    pool = _native.Pool(2, two_cpus(), pinned=False)
    expected = product(pool)
    pool.active = 1
    np.testing.assert_array_equal(product(pool), expected)
    time.sleep(0.1)
    before = worker_ticks()
    for _ in range(20):
        np.testing.assert_array_equal(product(pool, 256), product(pool, 256))
    assert sum(worker_ticks().values()) <= sum(before.values()) + 2
    for active in (2, 1, 2, 2, 1, 1, 2):
        pool.active = active
        assert pool.active == active
        np.testing.assert_array_equal(product(pool), expected)
    for wrong in (0, 3):
        with pytest.raises(ValueError, match=f"2 workers cannot work with {wrong}"):
            pool.active = wrong
    assert pool.threads == 2


def test_unpinned_workers_may_run_on_every_cpu_of_the_pool() -> None:
    def masks() -> dict[str, set[int]]:
        found = {}
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # an earlier test's thread ends
                if (task / "comm").read_text().strip() == "treadle-worker":
                    found[task.name] = os.sched_getaffinity(int(task.name))
        return found

    before = masks()
    pool = _native.Pool(2, two_cpus(), pinned=False)
    product(pool)
    (mask,) = [cpus for id, cpus in masks().items() if id not in before]
    assert mask == set(two_cpus()) & os.sched_getaffinity(0)
