"""The meaning of an event for an acquisition: each row of the two tables."""

from __future__ import annotations

from typing import Any

import pytest

from asynclock.protocol.planner import Next, Refusal, after_notice, after_refusal

ALONE: list[tuple[dict[str, Any], Next]] = [
    ({"has_ticket": True}, Next.WAIT_FOR_HOLDER),
    ({"has_ticket": True, "notices": False}, Next.POLL),  # the node grants it, and cannot say so
    ({"denied": False}, Next.POLL_WITH_NEW_ID),  # undone, or granted too late
    ({"plain": True}, Next.TRY_WITH_NEW_ID),
    ({"plain": True, "notices": False}, Next.TRY_WITH_NEW_ID),
    ({}, Next.POLL),
    ({"has_ticket": True, "time_up": True}, Next.STOP),
    ({"one_try": True}, Next.STOP),
    ({"denied": False, "one_try": True}, Next.STOP),
]

MANY: list[tuple[dict[str, Any], Next]] = [
    ({}, Next.TRY),  # the next round leaves a ticket
    ({"notices": False}, Next.POLL),
    ({"has_ticket": True, "one_holder": True}, Next.WAIT_FOR_HOLDER),
    ({"has_ticket": True, "several_holders": True}, Next.WAIT_FOR_HOLDERS),
    ({"has_ticket": True, "several_holders": True, "one_holder": True}, Next.WAIT_FOR_HOLDERS),
    ({"has_ticket": True, "one_holder": True, "probe": True}, Next.WAIT_FOR_HOLDER),
    ({"has_ticket": True}, Next.BACK_OFF_AFTER_SPLIT),
    ({"has_ticket": True, "free": True}, Next.BACK_OFF_AFTER_SPLIT),
    ({"has_ticket": True, "free": True, "probe": True}, Next.TRY),
    ({"has_ticket": True, "free": True, "probe": True, "rank": 2}, Next.LET_EARLIER_TRY),
    ({"has_ticket": True, "free": True, "turns": 1, "rank": 1}, Next.WAIT_FOR_TURN),
    ({"has_ticket": True, "free": True, "turns": 3, "rank": 2}, Next.BACK_OFF_AFTER_SPLIT),
    ({"has_ticket": True, "free": True, "turns": 3, "rank": 3}, Next.WAIT_FOR_TURN),
    ({"has_ticket": True, "free": True, "turns": 1, "probe": True, "rank": 1}, Next.WAIT_FOR_TURN),
    ({"has_ticket": True, "free": True, "turns": 1, "rank": 0}, Next.BACK_OFF_AFTER_SPLIT),
    ({"has_ticket": True, "turns": 1, "rank": 1}, Next.BACK_OFF_AFTER_SPLIT),
    ({"has_ticket": True, "other_slot": True, "several_holders": True}, Next.TRY_ANOTHER_SLOT),
    ({"has_ticket": True, "one_holder": True, "time_up": True}, Next.STOP),
    ({"one_try": True, "one_holder": True}, Next.STOP),
    ({"one_try": True, "other_slot": True}, Next.TRY_ANOTHER_SLOT),
]


@pytest.mark.parametrize(("facts", "expected"), ALONE)
def test_after_a_refusal_of_a_single_node(facts: dict[str, Any], expected: Next) -> None:
    """The facts of a round, and what follows."""
    assert after_refusal(Refusal(nodes=1, **facts)) is expected


@pytest.mark.parametrize("nodes", [2, 3, 5])
@pytest.mark.parametrize(("facts", "expected"), MANY)
def test_after_a_refusal_of_several_nodes(nodes: int, facts: dict[str, Any], expected: Next) -> None:
    """The facts of a round, and what follows."""
    assert after_refusal(Refusal(nodes=nodes, **facts)) is expected


@pytest.mark.parametrize(
    ("first", "majority", "granted", "free_now", "expected"),
    [
        (True, False, True, True, Next.TAKE_GRANT),
        (False, False, True, False, Next.TAKE_GRANT),
        (True, False, False, False, Next.TRY_WHEN_FREE),
        (True, True, False, True, Next.TRY),  # a single node is a majority
        (False, True, False, True, Next.TRY),
        (True, False, False, True, Next.TRY_AFTER_ROUND_TRIP),
        (False, False, False, True, Next.NOTHING),  # the pause ends already, a round trip after the first notice
    ],
)
def test_a_notice_ends_or_moves_a_pause(
    first: bool, majority: bool, granted: bool, free_now: bool, expected: Next
) -> None:
    """A notice that arrives while the acquisition pauses."""
    assert after_notice(first, majority, granted, free_now) is expected
