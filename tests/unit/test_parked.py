"""Ops that wait until the slot of their name can be asked again."""

from __future__ import annotations

from typing import Any

from asynclock.stores.redis.cluster.parked import Entry, Parked
from tests.support.fake_clock import FakeClock


class Handler:
    def __init__(self, name: str, sent: float) -> None:
        self.op: Any = name
        self.sent = sent
        self.deadline = sent + 10

    def answer(self, index: int, reply: Any) -> None: ...

    def fail(self, index: int, error: Exception, *, maybe: bool) -> None: ...


WHY = ConnectionError("TRYAGAIN")


class Released:
    """What was released, in order."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.found: list[tuple[int, list[Any]]] = []
        self.parked = Parked(self.clock, self._ready)

    def _ready(self, slot: int, entries: list[Entry]) -> None:
        self.found.append((slot, [handler.op for handler, _ in entries]))


def test_in_the_order_in_which_they_were_sent() -> None:
    """The reply to an older op may come after a newer op was parked: it is sent again first all the same."""
    released = Released()
    for name, sent in (("undo", 1.0), ("later", 3.0), ("acquire", 2.0)):
        released.parked.add(7, Handler(name, sent), WHY)
    assert 7 in released.parked
    released.clock.advance(0.006)
    assert released.found == [(7, ["undo", "acquire", "later"])]
    assert 7 not in released.parked


def test_the_pause_grows() -> None:
    """5 ms, then twice as long each time, up to 50 ms; after a second of quiet it begins anew."""
    released = Released()
    for pause in (0.005, 0.01, 0.02, 0.04, 0.05, 0.05):
        released.parked.add(7, Handler("op", 0.0), WHY)
        released.clock.advance(pause * 0.9)
        assert 7 in released.parked
        released.clock.advance(pause * 0.2)
        assert 7 not in released.parked
    released.clock.advance(2.0)
    released.parked.add(7, Handler("op", 0.0), WHY)
    released.clock.advance(0.006)
    assert 7 not in released.parked


def test_slots_are_apart() -> None:
    """One slot is released, the other waits."""
    released = Released()
    released.parked.add(7, Handler("a", 0.0), WHY)
    released.parked.add(8, Handler("b", 0.0), WHY)
    released.parked.release_all(lambda slot: slot == 8)
    assert released.found == [(8, ["b"])]
    assert len(released.parked) == 1
    released.parked.release(9)
