"""The promises of a script that no history reaches: on a server without memory, and among keys of other programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import redis

from asynclock.rules.model import ALONE, DONE, ID_LENGTH, RESTING, Kind, Op, Queueing, Serve, Verb
from tests.support.agreement import KEYS, command_of
from tests.support.histories import AT, ELDER, IDS, NAME, NOBODY, THIRD, YOUNGER
from tests.support.stage import Stage

TICKET = Queueing(Serve.GRANT, number=1, fresh=10.0)
FAR = 2_000_000_000_000
"""An end in Unix ms, years from now."""


class Odd:
    """A server, and ops of 20 s with a memory of 60 s there."""

    def __init__(self, stage: Stage, kind: Kind, turned: Mapping[str, str] | None = None) -> None:
        self.turned = turned or {}
        self.stage = stage
        self.cli = stage.cli
        self.kind = kind
        stage.reset()

    def ask(
        self,
        verb: Verb,
        fence: int = 0,
        rest: float = 0.0,
        tombstone: bool = False,
        queueing: Queueing = ALONE,
        who: int = ELDER,
        done: bool = False,
    ) -> list[object]:
        """One of the ids asks."""
        op = Op(
            verb, self.kind, NAME, "" if who == NOBODY else IDS[who], 20.0, fence, 60.0, rest,
            tombstone=tombstone, queueing=queueing, done=done,
        )  # fmt: skip
        command = command_of(op)
        command[1] = self.turned.get(command[1].decode(), command[1].decode()).encode()
        reply: list[object] = self.cli.execute_command(*command)  # type: ignore[no-untyped-call]
        return reply

    def full(self, verb: Verb, **more: object) -> list[object]:
        """The same while the server is out of memory: no command that may need some is let through."""
        self.cli.config_set("maxmemory", 1)
        try:
            return self.ask(verb, **more)  # type: ignore[arg-type]
        finally:
            self.cli.config_set("maxmemory", 0)

    def holds(self, fence: int = 5, mark: str = "") -> None:
        """Before: the first id holds for 10 s, F is kept for 10 s."""
        self.cli.set(AT.hold, mark + IDS[ELDER], px=10_000)
        self.cli.set(AT.fence, fence, px=10_000)

    def waits(self, number: int = 7, ends: int = FAR) -> None:
        """Before: the second id waits."""
        self.cli.zadd(AT.queue, {IDS[YOUNGER]: 1})
        self.cli.hset(AT.tickets, IDS[YOUNGER][:ID_LENGTH], f"{number} {FAR} {ends} 1")

    def ranks(self) -> list[bytes]:
        """The waiters."""
        found: Any = self.cli.zrange(AT.queue, 0, -1)
        return list(found)

    def published(self) -> list[bytes]:
        """The notices to others."""
        self.cli.publish(*self.stage.last())
        return [text for _, text in self.stage.published()]

    def left(self, key: str) -> float:
        """Seconds left, rounded up to ten: 10 before, 20 and 60 once renewed; negative: none, or no end."""
        ms: int = self.cli.pttl(key)
        return -(-ms // 10_000) * 10


def full_acquire_leaves_nothing(odd: Odd) -> None:
    """An acquire fails whole."""
    with pytest.raises(redis.ResponseError, match="maxmemory"):
        odd.full(Verb.ACQUIRE, fence=7)
    assert not odd.cli.exists(*KEYS)


def full_acquire_of_own_id_is_answered(odd: Odd) -> None:
    """An id that holds already needs no memory, and moves its end."""
    odd.holds()
    assert odd.full(Verb.ACQUIRE, fence=7) == [1, 5]
    assert odd.left(AT.hold) == 20


def full_wait_leaves_nothing(odd: Odd) -> None:
    """No ticket is kept, and the hold is not marked."""
    odd.holds()
    with pytest.raises(redis.ResponseError, match="maxmemory"):
        odd.full(Verb.WAIT, who=YOUNGER, queueing=TICKET)
    assert not odd.cli.exists(AT.queue, AT.tickets)
    assert odd.cli.get(AT.hold) == IDS[ELDER].encode()


def full_extend_goes_on(odd: Odd) -> None:
    """The lease is prolonged; the reply says that F could not be raised."""
    odd.holds(fence=5)
    assert odd.full(Verb.EXTEND, fence=7) == [1, 5]
    assert odd.left(AT.hold) == 20
    assert odd.cli.get(AT.fence) == b"5"


def full_extend_renews_an_equal_fence(odd: Odd) -> None:
    """In steady state F is the token, and its memory goes on without a write."""
    odd.holds(fence=7)
    assert odd.full(Verb.EXTEND, fence=7) == [1, 7]
    assert odd.left(AT.fence) == 60


def full_release_frees(odd: Odd) -> None:
    """The name is free, though neither F nor a tombstone could be written."""
    odd.holds(fence=5)
    assert odd.full(Verb.RELEASE, fence=7, tombstone=True) == [1, 5]
    assert not odd.cli.exists(AT.hold)


def full_release_of_nothing_is_answered(odd: Odd) -> None:
    """An undo of an op that never came does not fail either."""
    assert odd.full(Verb.RELEASE, tombstone=True) == [0, -2, b"", -1, 0]


def full_release_rests(odd: Odd) -> None:
    """A name with min_hold rests; the waiter is notified."""
    odd.holds(mark="+")
    odd.waits(number=7)
    assert odd.full(Verb.RELEASE, rest=30.0) == [1, 5]
    assert odd.left(AT.hold) == 30
    assert odd.cli.get(AT.hold) == RESTING.encode()
    assert odd.published() == [f"{IDS[YOUNGER][:ID_LENGTH]} 7 0 30000 {AT.hold}".encode()]


def full_release_marks_as_done(odd: Odd) -> None:
    """The end of a run of `once` is kept; the first waiter is notified of the time when the name is free."""
    odd.holds(mark="+")
    odd.waits(number=7)
    assert odd.full(Verb.RELEASE, rest=30.0, done=True) == [1, 5]
    assert odd.left(AT.hold) == 30
    assert odd.cli.get(AT.hold) == DONE.encode()
    assert odd.published() == [f"{IDS[YOUNGER][:ID_LENGTH]} 7 0 30000 {AT.hold}".encode()]


def full_release_notifies(odd: Odd) -> None:
    """The waiter is notified."""
    odd.holds(mark="+")
    odd.waits(number=7)
    assert odd.full(Verb.RELEASE, queueing=Queueing(Serve.WAKE)) == [1, 5]
    assert odd.published() == [f"{IDS[YOUNGER][:ID_LENGTH]} 7 0 -1 {AT.hold}".encode()]


def full_release_grants(odd: Odd) -> None:
    """The waiter is granted."""
    odd.holds(mark="+")
    odd.waits()
    assert odd.full(Verb.RELEASE, queueing=Queueing(Serve.GRANT)) == [1, 5]
    assert odd.cli.get(AT.hold) == b"+" + IDS[YOUNGER].encode()


def full_release_stores_the_ticket_again(odd: Odd) -> None:
    """The undo of an attempt is complete."""
    odd.holds()
    assert odd.full(Verb.RELEASE, queueing=TICKET) == [1, 5]
    assert odd.ranks() == [IDS[ELDER].encode()]


def full_break_grants(odd: Odd) -> None:
    """The waiter is granted."""
    odd.holds(mark="+")
    odd.waits()
    assert odd.full(Verb.BREAK, who=THIRD, queueing=Queueing(Serve.GRANT)) == [1, 5]
    assert odd.cli.get(AT.hold) == b"+" + IDS[YOUNGER].encode()


def full_probe_grants_nothing(odd: Odd) -> None:
    """Without a fence there is no grant. The name is free, and the waiter keeps its place."""
    odd.waits()
    assert odd.full(Verb.WAIT, who=THIRD, queueing=Queueing(Serve.GRANT)) == [0, -2, b"", -1, 0]
    assert not odd.cli.exists(AT.hold, AT.fence)
    assert (odd.published(), odd.ranks()) == ([], [IDS[YOUNGER].encode()])


FULL: list[Callable[[Odd], None]] = [
    full_acquire_leaves_nothing,
    full_acquire_of_own_id_is_answered,
    full_wait_leaves_nothing,
    full_extend_goes_on,
    full_extend_renews_an_equal_fence,
    full_release_frees,
    full_release_of_nothing_is_answered,
    full_release_rests,
    full_release_marks_as_done,
    full_release_notifies,
    full_release_grants,
    full_release_stores_the_ticket_again,
    full_break_grants,
    full_probe_grants_nothing,
]


def wrong_type_is_reported(odd: Odd) -> None:
    """A name that is in use as a list is no lock: nobody is granted."""
    odd.cli.lpush(AT.hold, "somebody's")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        odd.ask(Verb.ACQUIRE, fence=7)
    odd.waits()  # for what it is in truth
    asks = {
        Verb.ACQUIRE: Queueing(Serve.GRANT, fair=True, number=1, fresh=20.0),
        Verb.WAIT: Queueing(Serve.GRANT, number=1, fresh=20.0),
        Verb.RELEASE: Queueing(Serve.GRANT),
    }
    for verb, queueing in asks.items():
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            odd.ask(verb, queueing=queueing)
    assert odd.cli.lrange(AT.hold, 0, -1) == [b"somebody's"]
    assert (odd.published(), odd.ranks()) == ([], [IDS[YOUNGER].encode()])


def only_an_undo_leaves_a_tombstone(odd: Any, hold: str, undone: str) -> None:
    """Where the name is in use as something else: its acquire may arrive when that use has ended. Also where memory is
    short by then. A plain release leaves none."""
    for verb, tombstone, ask in (
        (Verb.RELEASE, False, odd.ask), (Verb.ACQUIRE, True, odd.ask), (Verb.RELEASE, True, odd.full),
        (Verb.RELEASE, True, odd.ask),
    ):  # fmt: skip
        odd.cli.delete(undone)
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            ask(verb, tombstone=tombstone)
        assert odd.cli.pttl(undone) in (range(19_000, 20_001) if tombstone and verb is Verb.RELEASE else [-2])
    odd.cli.delete(hold)
    assert odd.ask(Verb.ACQUIRE, fence=7) == [-1]


def an_undo_of_a_wrong_type_leaves_its_tombstone(odd: Odd) -> None:
    """The name is in use as a list."""
    odd.cli.lpush(AT.hold, "somebody's")
    only_an_undo_leaves_a_tombstone(odd, AT.hold, AT.undone + IDS[ELDER][:ID_LENGTH])


def any_type_is_broken_when_asked(odd: Odd) -> None:
    """A list goes only with the id of an operator who says so; then the waiter gets the name."""
    odd.cli.lpush(AT.hold, "somebody's")
    odd.cli.set(AT.fence, 5, px=10_000)
    odd.waits()
    for verb in Verb.BREAK, Verb.PEEK:
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            odd.ask(verb, who=NOBODY)
    assert odd.cli.lrange(AT.hold, 0, -1) == [b"somebody's"]
    assert odd.ask(Verb.BREAK, queueing=Queueing(Serve.GRANT)) == [1, 5]
    assert odd.cli.get(AT.hold) == b"+" + IDS[YOUNGER].encode()


def a_huge_value_is_cut(odd: Odd) -> None:
    """Another program's value of megabytes is not sent to each waiter."""
    odd.cli.set(AT.hold, "ab" * 1_000_000)
    assert odd.ask(Verb.ACQUIRE) == [0, -1, b"ab" * 4_096, -1, 0]


def nothing_is_broken(odd: Odd) -> None:
    """Where there is no key, an operator who says so breaks none."""
    assert odd.ask(Verb.BREAK)[:2] == [0, -2]


def a_peek_changes_nothing(odd: Odd) -> None:
    """Also where a waiter could be served."""
    odd.waits()
    assert odd.ask(Verb.PEEK, who=THIRD, queueing=Queueing(Serve.GRANT)) == [0, -2, b"", -1, 0]
    assert odd.ask(Verb.PEEK, who=THIRD, queueing=Queueing(Serve.GRANT, fair=True)) == [0, -2, b"", 0, 0]
    assert (odd.published(), odd.ranks()) == ([], [IDS[YOUNGER].encode()])


def a_grant_without_end_is_none(odd: Odd) -> None:
    """A ticket that is fresh beyond its own end stops no release, and gets nothing."""
    odd.holds(mark="+")
    odd.waits(ends=1)
    assert odd.ask(Verb.RELEASE, queueing=Queueing(Serve.GRANT)) == [1, 5]
    assert not odd.cli.exists(AT.hold)
    assert (odd.published(), odd.ranks()) == ([], [IDS[YOUNGER].encode()])


FOREIGN: list[Callable[[Odd], None]] = [
    wrong_type_is_reported,
    an_undo_of_a_wrong_type_leaves_its_tombstone,
    any_type_is_broken_when_asked,
    a_huge_value_is_cut,
    nothing_is_broken,
    a_peek_changes_nothing,
    a_grant_without_end_is_none,
]
