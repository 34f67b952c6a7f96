"""The next step of an acquisition, after a refusal or a notice. Pure.

`planner.py` and `acquisition.py` collect the facts and do the step; `backoff.py` says when.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Next(Enum):
    """The next step of an acquisition."""

    STOP = "stop"  # the name is held, and the time is over
    NOTHING = "nothing"  # the event changes nothing
    TAKE_GRANT = "take the grant"  # a ticket became the hold
    TRY = "try"  # ask for the hold at once
    TRY_WITH_NEW_ID = "try with a new id"
    TRY_ANOTHER_SLOT = "try another slot"
    TRY_AFTER_ROUND_TRIP = "try after a round trip"  # more nodes may notify until then
    TRY_WHEN_FREE = "try when free"  # the node said when that will be
    WAIT_FOR_HOLDER = "wait for the holder"
    WAIT_FOR_HOLDERS = "wait for the holders"  # several hold it, or votes are split (`obstacles.py`)
    WAIT_FOR_TURN = "wait for its turn"  # the name is free, but others are before it in the queue
    LET_EARLIER_TRY = "let earlier waiters try"  # they were notified; they try first
    BACK_OFF_AFTER_SPLIT = "back off after split votes"
    POLL = "poll"  # no notice will come: ask again after a growing pause
    POLL_WITH_NEW_ID = "poll with a new id"


class Refusal(NamedTuple):
    """The facts of a round that did not become a hold, though a majority answered."""

    nodes: int
    time_up: bool = False  # the caller's time is over
    one_try: bool = False  # the caller allows one try (timeout=0)
    other_slot: bool = False  # a slot may be free on a majority, of a kind that has slots
    denied: bool = True  # at a single node: it refused; else the id is used up (undone, or granted too late)
    has_ticket: bool = False  # the round left a ticket
    notices: bool = True  # notices come from a majority
    plain: bool = False  # it was sent as the server's own SET NX, which leaves no ticket
    probe: bool = False  # it renewed the ticket, and did not ask for the hold
    rank: int = 0  # tickets before this one's
    free: bool = False  # a majority says that nobody holds the name
    one_holder: bool = False  # one hold is in the way at a majority
    several_holders: bool = False  # a majority refuses, of a kind that several may hold
    in_order: bool = False  # this kind enters in the order of the queue


def after_refusal(facts: Refusal) -> Next:
    """The next step after a refusal. Pure."""
    if facts.one_try:
        return Next.TRY_ANOTHER_SLOT if facts.other_slot else Next.STOP
    if facts.time_up:
        return Next.STOP
    return _after_refusal_alone(facts) if facts.nodes == 1 else _after_refusal_by_many(facts)


def _after_refusal_alone(facts: Refusal) -> Next:
    if not facts.denied:
        return Next.POLL_WITH_NEW_ID
    if facts.has_ticket and facts.notices:
        return Next.WAIT_FOR_HOLDER
    # A ticket needs the script, and the script must not know the id of a plain SET that may still arrive.
    return Next.TRY_WITH_NEW_ID if facts.plain else Next.POLL


def _after_refusal_by_many(facts: Refusal) -> Next:
    if facts.other_slot:
        return Next.TRY_ANOTHER_SLOT
    if not facts.notices:
        return Next.POLL
    if not facts.has_ticket:
        return Next.TRY
    if facts.several_holders:
        return Next.WAIT_FOR_HOLDERS
    if facts.one_holder:
        return Next.WAIT_FOR_HOLDER
    if facts.in_order and facts.rank > 0 and facts.free:
        return Next.WAIT_FOR_TURN
    if facts.probe and facts.free:
        return Next.TRY if facts.rank == 0 else Next.LET_EARLIER_TRY
    return Next.BACK_OFF_AFTER_SPLIT


def after_notice(first: bool, majority: bool, granted: bool, free_now: bool) -> Next:
    """The next step of an acquisition that pauses, after a notice. `first`: it is the first one since the last round
    was sent; `majority`: a majority of the nodes has sent one. Pure."""
    if granted:
        return Next.TAKE_GRANT
    if not free_now:
        return Next.TRY_WHEN_FREE
    if majority:
        return Next.TRY
    return Next.TRY_AFTER_ROUND_TRIP if first else Next.NOTHING
