"""When a waiter asks next: by table, and that no pause goes beyond the end of the holder's lease."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from random import random

import pytest

from asynclock._errors import QuorumUnavailable
from asynclock._options import QUORUM_TIMEOUT
from asynclock.protocol.planner import (
    Pace,
    Plan,
    after_doubt,
    after_notice_to_another,
    after_split,
    answer_from,
    next_question,
    notifies,
    waking_time,
)
from asynclock.rules.model import DONE, RESTING
from tests.support.probes import stop_renewals
from tests.support.still_clock import Still, idle, turns

SECOND = 1_000.0
"""A moment."""

RANDOM = "5b0c" * 8
"""The random part of an id."""


def most() -> float:
    """The greatest random number."""
    return 1.0


def after(plan: Plan | None) -> float:
    """The seconds until then."""
    assert plan is not None
    return plan.at - SECOND


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
        (0.0005, 0, 5_000, 0.128),  # at most 256 round trips
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


Spread = Callable[[Callable[[], float]], Plan | None]
"""A plan that is made with a source of random numbers."""

SPREADS: list[tuple[Spread, float, float]] = [
    (lambda draw: next_question(draw, SECOND, SECOND, 30.0, 0, None, True), 8.0, 10.0),
    (lambda draw: next_question(draw, SECOND, SECOND, 30.0, 2, math.inf, True), 0.05, 0.25),
    (lambda draw: after_notice_to_another(draw, SECOND, 0.0), 0.01, 0.02),
    (lambda draw: after_notice_to_another(draw, SECOND, 0.02), 0.04, 0.08),
    (lambda draw: after_split(draw, SECOND, 0.001, 0, 3), 0.002, 0.004),
    (lambda draw: after_doubt(draw, SECOND, SECOND, 30.0, SECOND + 1.0, 0.1, 0), 1.1, 1.12),
    (lambda draw: after_doubt(draw, SECOND + 1.0, SECOND, 30.0, SECOND, 12.0, 0), 8.0, 10.0),
    (lambda draw: Pace(draw, 5.0).after_refusal(SECOND), 0.001, 0.002),
    (lambda draw: Pace(draw, 5.0).after_outage(SECOND, math.inf), 0.01, 0.02),
    (lambda draw: Pace(draw, 60.0).after_outage(SECOND, math.inf, 10_000), 2.5, 5.0),
]


@pytest.mark.parametrize(("plan", "least", "longest"), SPREADS)
def test_clients_that_were_refused_at_one_moment_ask_at_different_moments(
    plan: Spread, least: float, longest: float
) -> None:
    """Their pauses are spread over this range."""
    assert after(plan(lambda: 0.0)) == pytest.approx(least)
    assert after(plan(most)) == pytest.approx(longest)


@pytest.mark.parametrize(
    ("doubts", "pause"), [(0, 0.1), (1, 0.5), (2, 1.0), (3, 2.0), (17, 32_768.0), (18, 32_768.0), (5_000, 32_768.0)]
)
def test_probes_pause_longer_the_more_often_the_holders_change(doubts: int, pause: float) -> None:
    """From the first change on by the life of an attempt, doubled with each further change, but not without limit. Here
    the ids are known for 0.4 s."""
    plan = after_doubt(lambda: 0.0, SECOND, SECOND, 1e9, SECOND - 0.4, 0.5, doubts)
    assert after(plan) == pytest.approx(pause)
    assert plan.probe


@pytest.mark.parametrize(
    ("timeout", "within", "rtt", "seconds"),
    [
        (None, 3.0, 0.0, 3.0),  # as long as the nodes have for an answer
        (60.0, 3.0, 0.0, 3.0),
        (3.0, 3.0, 0.0, 1.0),  # a third of a short timeout
        (0.06, 3.0, 0.0, 0.1),
        (0.06, 0.05, 0.0, 0.05),
        (0.06, 3.0, 0.4, 0.8),  # two round trips to far nodes
        (0.06, 0.5, 0.4, 0.5),
    ],
)
def test_how_old_the_last_answer_may_be(timeout: float | None, within: float, rtt: float, seconds: float) -> None:
    """So many seconds before the end of the time."""
    assert answer_from(SECOND, timeout, within, rtt) == pytest.approx(SECOND - seconds)


@pytest.mark.parametrize(
    ("holder", "relies"),
    [
        (f"{RANDOM}|1|2|host|", True),
        (f"{RANDOM}|", True),
        (f"{RANDOM}!1|2|host|", False),  # its client gets no notices, so its release serves nobody
        ("a key of another program", False),
        ("", False),
        (RESTING, True),
        (DONE, True),
    ],
)
def test_a_waiter_relies_on_the_end_of_holds_that_notify(holder: str, relies: bool) -> None:
    """A release by asynclock serves the queue, and a name that rests is free at a known time. Other programs notify
    nobody."""
    assert notifies(holder) is relies


def test_pauses_between_tries_double() -> None:
    """From 2 ms to 250 ms after refusals, from 20 ms to 500 ms in an outage."""
    pace = Pace(most, 60.0)
    refused = [after(pace.after_refusal(SECOND)) for _ in range(9)]
    assert refused == pytest.approx([0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.25, 0.25])
    outage = [after(pace.after_outage(SECOND, math.inf)) for _ in range(7)]
    assert outage == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5])


def test_the_second_outage_is_like_the_first() -> None:
    """A majority answered between the two: the pauses are short again, the patience is full, and the errors of the
    first outage are no reason of the second."""
    pace, error = Pace(most, 5.0), QuorumUnavailable("out of reach")
    assert pace.ends == math.inf
    pace.begin_outage(error)
    pace.reasons[0] = error
    for _ in range(5):
        pace.after_outage(SECOND, math.inf)
    assert pace.outage is error
    assert pace.ends == SECOND + 5.0
    pace.reached()
    assert pace.ends == math.inf
    assert pace.outage is None
    assert pace.reasons == {}
    assert after(pace.after_outage(SECOND + 90.0, math.inf)) == pytest.approx(90.02)
    assert pace.ends == SECOND + 95.0


@pytest.mark.parametrize(("began", "ends"), [(None, SECOND + 5.0), (SECOND - 2.0, SECOND + 3.0)])
def test_the_patience_counts_from_the_question_that_was_not_answered(began: float | None, ends: float) -> None:
    """If that is not known, from now. Later questions do not move its end."""
    pace = Pace(most, 5.0)
    pace.after_outage(SECOND, math.inf, began=began)
    pace.after_outage(SECOND + 1.0, math.inf, began=SECOND + 0.5)
    assert pace.ends == ends
    assert pace.outage_limit(SECOND + 1.0, math.inf) == ends
    assert pace.after_outage(ends, math.inf) is None


def test_an_outage_ends_an_acquire_with_its_timeout_or_its_patience() -> None:
    """Whichever ends first."""
    assert Pace(most, 5.0).outage_limit(SECOND, SECOND + 3.0) == SECOND + 3.0
    assert Pace(most, 5.0).outage_limit(SECOND, SECOND + 7.0) == SECOND + 5.0


def test_the_next_task_has_no_more_patience_for_an_outage_that_it_joins() -> None:
    """The end of the patience comes with the outage."""
    pace, error = Pace(most, 5.0), QuorumUnavailable("out of reach")
    pace.join(error, SECOND + 2.0)
    assert pace.outage is error
    assert pace.ends == SECOND + 2.0
    pace.after_outage(SECOND + 1.0, math.inf, began=SECOND + 1.0)
    assert pace.ends == SECOND + 2.0


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
