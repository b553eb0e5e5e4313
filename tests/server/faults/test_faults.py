"""Faults, as often as there is time for in every run; long_faults.py has more of them."""

from __future__ import annotations

import asyncio

from tests.server.faults import scenarios
from tests.server.faults.scenarios import Faulty


def test_engine_killed_in_mid_stream(faulty: Faulty) -> None:
    asyncio.run(scenarios.killed(faulty, times=2))


def test_500_requests_at_once(faulty: Faulty) -> None:
    asyncio.run(scenarios.many_at_once(faulty, 500, tokens=3))


def test_clients_that_vanish(faulty: Faulty) -> None:
    asyncio.run(scenarios.vanishing(faulty, 40))


def test_bodies_cut_in_the_middle(faulty: Faulty) -> None:
    asyncio.run(scenarios.cut_bodies(faulty))


def test_slow_readers(faulty: Faulty) -> None:
    asyncio.run(scenarios.slow_readers(faulty, 2, tokens=60))
