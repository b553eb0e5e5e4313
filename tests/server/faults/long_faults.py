"""The faults of test_faults.py as often as promised. Not found by pytest on its own, since it takes minutes:

pytest tests/server/faults/long_faults.py
"""

from __future__ import annotations

import asyncio

import pytest

from tests.server.faults import scenarios
from tests.server.faults.scenarios import Faulty

pytestmark = pytest.mark.timeout(1800)


def test_engine_killed_in_mid_stream_20_times(faulty: Faulty) -> None:
    asyncio.run(scenarios.killed(faulty, times=20))


def test_500_requests_at_once_with_longer_answers(faulty: Faulty) -> None:
    asyncio.run(scenarios.many_at_once(faulty, 500, tokens=64))


@pytest.mark.parametrize("seed", range(5))
def test_clients_that_vanish(faulty: Faulty, seed: int) -> None:
    asyncio.run(scenarios.vanishing(faulty, 150, seed))


def test_slow_readers(faulty: Faulty) -> None:
    asyncio.run(scenarios.slow_readers(faulty, 8, tokens=400))
