"""When a waiter asks next: by table, and that no pause goes beyond the end of the holder's lease."""

from __future__ import annotations

import asyncio
import math
from random import random

import pytest

from asynclock._options import QUORUM_TIMEOUT
from asynclock.protocol.planner import Pace, Plan, after_notice_to_another, after_split, next_question, waking_time
from tests.support.probes import stop_renewals
from tests.support.still_clock import Still, idle, turns

SECOND = 1_000.0
"""A moment."""


@pytest.mark.parametrize(
    ("rank", "left", "ours", "soonest", "latest", "probe"),
    [
        (0, 3.001, True, 3.001, 3.001, False),  # its lease may end without a notice
        (2, 3.001, True, 3.001, 3.001, False),
        (3, 3.001, True, 3.003, 3.003, False),  # those before it go first
        (9, 3.001, True, 3.015, 3.015, False),
        (0, 0.001, True, 0.001, 0.001, False),
        (0, 11.001, True, 8.0, 10.0, True),  # the ticket is renewed before
        (0, 600.001, True, 8.0, 10.0, True),
        (0, None, True, 8.0, 10.0, True),  # it is free: the waiter before this one was notified
        (9, math.inf, True, 8.0, 10.0, True),  # held for ever, and others look
        (0, math.inf, True, 0.05, 0.25, False),
        (0, 3.001, False, 0.05, 0.25, False),  # another program notifies nobody
        (2, 3.001, False, 0.05, 0.25, False),
        (3, 3.001, False, 3.003, 3.003, False),
    ],
)
def test_next_question(rank: int, left: float | None, ours: bool, soonest: float, latest: float, probe: bool) -> None:
    """Of a ticket that lives for 30 s and was sent now."""
    for _ in range(20):
        at, probes = next_question(random, SECOND, SECOND, 30.0, rank, left, ours)
        assert soonest - 1e-9 <= at - SECOND <= latest + 1e-9
        assert probes is probe


@pytest.mark.parametrize(
    ("rtt", "rank", "splits", "most"),
    [
        (0.001, 0, 1, 0.001),
        (0.001, 0, 2, 0.002),
        (0.001, 0, 5, 0.016),
        (0.001, 3, 1, 0.004),  # the first in the queue goes first
        (0.001, 100, 1, 0.009),
        (0.0, 0, 1, 0.0005),  # a clock that stands still is no reason to spin
        (0.001, 0, 9, 0.25),
        (0.01, 0, 9, 0.25),
        (0.05, 8, 20, 0.25),
        (0.001, 0, 5_000, 0.25),
        (5.0, 0, 1, QUORUM_TIMEOUT),
    ],
)
def test_after_split(rtt: float, rank: int, splits: int, most: float) -> None:
    """From about a round trip up to a quarter of a second, however many votes were split before."""
    for _ in range(20):
        at, probe = after_split(random, SECOND, rtt, rank, splits)
        assert most / 2 - 1e-9 <= at - SECOND <= most + 1e-9
        assert not probe


def test_after_notice_to_another() -> None:
    """The other waiter has a moment to enter. Then this one tries."""
    assert all(
        0.01 - 1e-9 <= after_notice_to_another(random, SECOND, 0.001).at - SECOND <= 0.02 + 1e-9 for _ in range(20)
    )
    assert all(
        0.04 - 1e-9 <= after_notice_to_another(random, SECOND, 0.02).at - SECOND <= 0.08 + 1e-9 for _ in range(20)
    )


def test_pauses_after_refusals_grow_up_to_a_bound() -> None:
    """And none is longer than the holder's lease lasts."""
    pace = Pace(random, 5.0)
    pauses = [pace.after_refusal(SECOND).at - SECOND for _ in range(20)]
    assert pauses[0] <= 0.002
    assert all(0.125 - 1e-9 <= pause <= 0.25 + 1e-9 for pause in pauses[8:])
    assert pace.after_refusal(SECOND, 0.01) == Plan(SECOND + 0.01)


@pytest.mark.parametrize(("patience", "within", "left"), [(5.0, 0.0, QUORUM_TIMEOUT), (5.0, 1.0, 1.0), (1.0, 3.0, 0.5)])
def test_f17_the_last_try_in_an_outage_leaves_time_for_its_reply(patience: float, within: float, left: float) -> None:
    """As long as the nodes need, but at most half of the patience. After it the waiter sleeps until the end."""
    pace, now, tries = Pace(random, patience, within), SECOND, list[float]()
    while (plan := pace.after_outage(now, math.inf, began=SECOND)) is not None:
        tries.append(now := plan.at)
    assert tries[-2:] == [SECOND + patience - left, SECOND + patience]


def test_a_crowd_pauses_longer_in_an_outage() -> None:
    """So that all tasks of a client together do not ask more often than a loop can bear; a few ask as soon as one."""
    for crowd, least in ((1, 0.01), (20, 0.01), (10_000, 2.5)):
        pauses = [Pace(random, 60.0).after_outage(SECOND, math.inf, crowd) for _ in range(20)]
        assert all(plan is not None and least <= plan.at - SECOND <= 2 * least + 1e-9 for plan in pauses)


def test_a_crowd_is_woken_at_a_rate_that_a_loop_can_bear() -> None:
    """A few at once."""
    assert waking_time(1) == waking_time(200) == 0.05
    assert waking_time(10_000) == pytest.approx(2.0)


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("many", [1, 3])
async def test_the_end_of_a_dead_holder_is_not_slept_through(name: str, nodes: int, many: int) -> None:
    """It notifies nobody, and no ticket is due for renewal before another 13 s. The waiters, of as many clients, are
    granted one after the other, the first of them as soon as the lease has ended."""
    still = Still(nodes, name)
    async with (
        still.held(lease=3.0) as (holder, _),
        still.client(lease=60.0) as first,
        still.client(lease=60.0) as second,
        still.client(lease=60.0) as third,
    ):
        stop_renewals(holder)
        clients = (first, second, third)[:many]
        ends = still.clock.now() + 3.0
        served: list[float] = []

        async def tenure(client: object) -> None:
            async with client(name):  # type: ignore[operator]
                served.append(still.clock.now())

        waiting = [asyncio.create_task(tenure(client)) for client in clients]
        while not all(map(idle, clients)):
            still.clock.advance(0.001)
            await turns(1)
        while not all(task.done() for task in waiting):
            still.clock.advance(0.001)
            await turns()
            assert still.clock.now() < ends + 1.0
        assert len(served) == many
        assert ends <= served[0] <= ends + 0.02
