"""Workers on CPUs that other processes keep busy are left out of steps with many barriers."""

from __future__ import annotations

from treadle import _native

MS = 1_000_000


def observe(crowding: _native.Crowding, start: int, delays: dict[int, float], count: int = 3) -> int:
    """``count`` jobs of 40 ms in which each place waits that share of the time; returns when they end."""
    for _ in range(count):
        start += 40 * MS
        crowding.observe(start, 40 * MS, list(delays), [int(share * 40 * MS) for share in delays.values()])
    return start


def test_nobody_is_left_out_of_a_quiet_machine() -> None:
    crowding = _native.Crowding(2)
    now = observe(crowding, 0, {0: 0.0, 1: 0.05}, 100)
    assert crowding.uncrowded(now, 2) == [0, 1]


def test_one_interruption_is_no_crowd() -> None:
    crowding = _native.Crowding(2)
    now = observe(crowding, 0, {0: 0.0, 1: 0.0}, 10)
    crowding.observe(now + 40 * MS, 40 * MS, [0, 1], [0, 8 * MS])
    now = observe(crowding, now + 40 * MS, {0: 0.0, 1: 0.0}, 1)
    assert crowding.uncrowded(now, 2) == [0, 1]


def test_a_busy_cpu_is_avoided_and_tried_again_ever_more_rarely() -> None:
    crowding = _native.Crowding(2)
    now, pauses = 0, []
    for _ in range(6):
        while crowding.uncrowded(now, 2) == [0, 1]:
            now = observe(crowding, now, {0: 0.6, 1: 0.0}, 1)
        start = now
        while crowding.uncrowded(now, 2) == [1]:
            now = observe(crowding, now, {1: 0.0}, 1)
        pauses.append((now - start) / 1e9)
    assert all(
        abs(pause - expected) < 0.1 for pause, expected in zip(pauses, [1, 2, 4, 4, 4, 4], strict=True)
    )


def test_a_cpu_that_is_free_again_works_again_and_is_forgiven() -> None:
    crowding = _native.Crowding(2)
    now = observe(crowding, 0, {0: 0.0, 1: 0.6}, 2)
    assert crowding.uncrowded(now, 2) == [0]
    now = observe(crowding, now + 1100 * MS, {0: 0.0, 1: 0.0}, 2)
    assert crowding.uncrowded(now, 2) == [0, 1]
    now = observe(crowding, now, {0: 0.0, 1: 0.6}, 2)
    assert crowding.uncrowded(now + 1100 * MS, 2) == [0, 1]  # the first pause again


def test_at_least_half_go_on_and_the_busiest_are_left_out_first() -> None:
    crowding = _native.Crowding(4)
    now = observe(crowding, 0, {0: 0.9, 1: 0.5, 2: 0.6, 3: 0.7}, 2)
    assert crowding.uncrowded(now, 4) == [1, 2]
    assert crowding.uncrowded(now, 1) == [0]


def test_among_many_a_little_delay_is_too_much() -> None:
    crowding = _native.Crowding(64)
    now = observe(crowding, 0, {place: 0.02 if place == 7 else 0.001 for place in range(64)}, 2)
    assert crowding.uncrowded(now, 64) == [place for place in range(64) if place != 7]
