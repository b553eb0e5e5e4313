"""How an engine process shares the CPUs: with the other engines of its server, and with everything else."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from treadle import machine

_MEASURE_EVERY = 1.0  # seconds
_NICE = 19  # the least priority


class Turns:
    """Lets the engines of one server run one step after the other, each on all cores.

    Otherwise two workers would be pinned to each core, and every chunk of a step might have to wait until
    the other engine's worker gives the core away. A step waits at the gate until the one before it runs, so
    nobody is overtaken. The locks are those of flock(2): an engine that dies gives them back.
    """

    def __init__(self, path: str) -> None:
        """``path``: where the lock files are, the same for all engines."""
        self._gate = os.open(path + ".gate", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._step = os.open(path + ".step", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @contextmanager
    def turn(self, waits: Callable[[], None]) -> Iterator[None]:
        """Hold the machine for a step. ``waits`` is called when another engine has to finish first."""
        if not (_try(self._gate) and _try(self._step)):
            waits()
            fcntl.flock(self._gate, fcntl.LOCK_EX)
            fcntl.flock(self._step, fcntl.LOCK_EX)
        fcntl.flock(self._gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._step, fcntl.LOCK_UN)


def _try(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def step_back() -> None:
    """Give this thread, and those that it will make, the least priority."""
    os.setpriority(os.PRIO_PROCESS, 0, _NICE)


class Spare:
    """Leaves cores to the processes outside of this server: one worker less for each core's worth of CPU time
    that they take.
    """

    def __init__(self, threads: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._threads = threads
        self._clock = clock
        self._workers = threads
        self.restart()

    def workers(self) -> int:
        """How many may run now; measured about once per second while this is asked."""
        seconds = self._clock() - self._measured
        if seconds >= _MEASURE_EVERY:
            others = machine.usage().others_since(self._usage) / seconds
            self._workers = min(max(self._threads - int(others + 0.5), 1), self._threads)
            self.restart()
        return self._workers

    def restart(self) -> None:
        """Forget what was measured so far: the engine was idle, and it would be about old times."""
        self._measured, self._usage = self._clock(), machine.usage()
