"""The releases that a node could not deliver: which are sent when, and for how long they are kept."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from asynclock.locks.multi import Multi
from asynclock.rules.model import Op, Part, Queueing, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.stores import undelivered
from asynclock.stores.redelivery import Redelivery
from asynclock.stores.undelivered import GRACE, PendingRelease, Undelivered
from tests.support.fake_clock import FakeClock

ERROR = OSError("gone")
LEASE = 30.0


def release(number: int, name: str = "x", lease: float = LEASE, rest: float = 0.0) -> Op:
    return Op(Verb.RELEASE, MUTEX, name, f"{number:032}|", lease, rest=rest, queueing=Queueing(number=1))


def kept(*ops: Op) -> Undelivered:
    """At the time 0."""
    found = Undelivered()
    for op in ops:
        found.add(op, 0.0, 0.0, ERROR)
    return found


def sent_at(found: Undelivered, now: float) -> PendingRelease:
    release = found.take(now)
    assert release is not None
    return release


def test_f23_it_is_sent_again_after_pauses_that_grow_up_to_two_seconds() -> None:
    """Doubled after each failure."""
    found, now, pauses = kept(release(1)), 0.0, []
    for _ in range(10):
        due = found.due_at()
        assert due is not None
        assert found.take(due - 0.001) is None
        pauses.append(due - now)
        now = due
        found.failed(sent_at(found, now), now, ERROR)
    assert pauses == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.0, 2.0, 2.0])


def test_f23_all_are_due_once_the_node_is_connected_again() -> None:
    """Whatever their pauses were."""
    found = kept(release(1))
    for _ in range(8):
        due = found.due_at()
        assert due is not None
        found.failed(sent_at(found, due), due, ERROR)
    found.all_due(5.0)
    assert found.take(5.0) is not None


def test_f23_an_op_of_its_name_makes_it_due() -> None:
    """Those of other names are not, and one that is under way is not sent twice."""
    pair = Op(Verb.RELEASE, Multi([Part("x", MUTEX), Part("y", MUTEX)]), "x, y", "2" * 32, LEASE)
    found = kept(release(1, "x"), pair, release(3, "z"))
    assert [each.id for each in found.before(Op(Verb.ACQUIRE, MUTEX, "y", "4" * 32, LEASE), 0.0)] == [pair.id]
    assert [each.id for each in found.before(Op(Verb.ACQUIRE, MUTEX, "x", "5" * 32, LEASE), 0.0)] == [release(1).id]
    assert not found.before(Op(Verb.ACQUIRE, MUTEX, "x", "6" * 32, LEASE), 0.0)
    assert sent_at(found, 1.0).id == release(3).id
    assert found.due_at() is None


def test_f23_one_that_was_delivered_is_forgotten() -> None:
    """By its id and by its name."""
    found = kept(release(1))
    found.delivered(sent_at(found, 1.0))
    assert len(found) == 0
    assert not found.before(Op(Verb.ACQUIRE, MUTEX, "x", "5" * 32, LEASE), 0.0)
    assert found.due_at() is None


def test_f23_it_is_kept_until_its_lease_and_a_minute_are_over() -> None:
    """Also behind an older one with a longer lease; a failure does not move that."""
    found = kept(release(1, lease=600.0), release(2, "y", lease=1.0))
    found.failed(sent_at(found, 1.0), 1.0, ERROR)
    found.failed(sent_at(found, 1.0), 1.0, ERROR)
    assert sent_at(found, 1.0 + GRACE).id == release(1).id
    assert found.take(1.0 + GRACE) is None
    assert len(found) == 1


def test_f23_it_leaves_a_tombstone_and_no_ticket_and_rests_for_what_is_left() -> None:
    """min_hold counts from the release."""
    found = Undelivered()
    found.add(release(1, rest=5.0), 2.0, 1.0, ERROR)
    again = sent_at(found, 3.0)
    assert again.tombstone
    assert again.queueing.number == 0
    assert again.rest == pytest.approx(3.0)


def test_f23_they_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The newest are kept; a warning says so, once."""
    monkeypatch.setattr(undelivered, "MOST", 3)
    found = kept(*[release(number) for number in range(9)])
    assert len(found) == 3
    assert sent_at(found, 1.0).id == release(6).id
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def lines_of(work: Callable[[], object]) -> int:
    """How many lines of Python run in a call."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        del frame, arg
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


CALLS: dict[str, Callable[[Undelivered], object]] = {
    "all are due": lambda found: found.all_due(5.0),
    "the next one, after many were sent for an op of their name": lambda found: found.due_at(),
    "many have expired": lambda found: found.take(2 * GRACE),
    "one more, after many have expired": lambda found: found.add(release(9_999), 2 * GRACE, 2 * GRACE, ERROR),
}


@pytest.mark.parametrize("call", CALLS)
def test_f23_no_call_takes_longer_the_more_are_kept(call: str) -> None:
    """So a turn of the event loop stays short with all that an outage leaves."""
    lines = []
    for number in (500, 2_000):
        found = kept(*[release(each, lease=1.0) for each in range(number)], release(number, "another", lease=GRACE))
        if "sent" in call:
            for each in found.before(release(0), 1.0):
                found.failed(each, 1.0, ERROR)
        lines.append(lines_of(lambda found=found: CALLS[call](found)))  # type: ignore[misc]
    assert lines[0] == lines[1]


def test_f23_thousands_that_expire_at_once_are_dropped_in_slices() -> None:
    """None of them is sent, and the one behind them is."""
    found = kept(*[release(each, lease=1.0) for each in range(2_000)], release(2_000, lease=600.0))
    slices = 0
    while (last := found.take(2 * GRACE)) is None:
        slices += 1
        assert found.due_at() is not None
    assert last.id == release(2_000).id
    assert len(found) == 1
    assert slices > 1


def test_f23_none_is_sent_while_the_node_is_known_to_be_down() -> None:
    """It is asked to open, with a pause that grows up to two seconds; once it is open, all are sent."""
    clock, is_open, asked, sent = FakeClock(), False, 0, list[PendingRelease]()

    def opens() -> bool:
        nonlocal asked
        asked += 1
        return is_open

    def send(release: PendingRelease, done: Callable[[Exception | None], object]) -> None:
        sent.append(release)
        done(None)

    node = Redelivery(clock, send, opens)
    for number in range(100):
        node.keep(release(number), clock.now(), ERROR)
    clock.advance(20.0)
    node.send_before(release(7))
    assert not sent
    assert asked < 20
    is_open = True
    node.retry()
    clock.advance(0.1)
    assert len(sent) == 100
    assert not node


def test_f23_one_is_sent_at_a_time_until_one_was_delivered() -> None:
    """Then twice as many after each that was delivered, up to eight; after a failure one again. So those that cannot be
    delivered take one of the connections of the store."""
    clock, under_way = FakeClock(), list[Callable[[Exception | None], object]]()
    node = Redelivery(clock, lambda release, done: under_way.append(done), lambda: True)
    for number in range(100):
        node.keep(release(number, name=f"x{number}"), clock.now(), ERROR)
    numbers = []
    for error in (ERROR, None, None, None, None, ERROR, ERROR):
        clock.advance(0.5)
        numbers.append(len(under_way))
        answered = list(under_way)
        under_way.clear()
        for done in answered:
            done(error)
        node.retry()
    assert numbers == [1, 1, 2, 8, 8, 8, 1]
