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


def test_at_most_2000_ops_in_a_second() -> None:
    """A cluster that serves no slot refuses the ops of all names: each pause is longer, the more of them wait."""
    released = Released()
    for slot in range(1000):
        released.parked.add(slot, Handler("op", released.clock.now()), WHY)
    total = 0
    for _ in range(200):
        released.clock.advance(0.01)
        total += len(released.found)
        for slot, _ops in released.found:
            released.parked.add(slot, Handler("op", released.clock.now()), WHY)
        released.found.clear()
    assert 3000 < total < 4500


def test_no_op_waits_beyond_its_time() -> None:
    """Its caller would get its error too late."""
    released = Released()
    for slot in range(10_000):
        released.parked.add(slot, Handler(f"op {slot}", released.clock.now() - 9.0), WHY)
    released.clock.advance(1.01)
    assert len(released.found) == 10_000


def test_many_ops_are_released_in_slices() -> None:
    """1,000 of one slot, and of 1,000 slots: the first ones at once, and all soon. They keep their order, also with one
    that waits again."""
    for slots in (1, 1000):
        released = Released()
        began = released.clock.now()
        for number in range(1000):
            released.parked.add(number % slots, Handler(f"{number:03}", began + number / 1e6), WHY)
        released.parked.release_all()
        assert 0 < sum(len(ops) for _, ops in released.found) < 500
        (slot, (first, *_)), *_ = released.found
        released.parked.add(slot, Handler(first, began), WHY)
        for _ in range(100):
            released.clock.advance(0.01)
        assert [op for _, ops in released.found for op in ops if op != first] == [f"{n:03}" for n in range(1, 1000)]
        assert len(released.parked) == 0


def test_one_slot_that_stays_unavailable() -> None:
    """Its oldest ops are tried. While they are refused, the others stay, and all keep the rate."""
    released = Released()
    began = released.clock.now()
    for number in range(1000):
        released.parked.add(7, Handler("op", began + number / 1e6), WHY)
    total = 0
    for _ in range(100):
        released.clock.advance(0.01)
        for _slot, ops in released.found:
            total += len(ops)
            for number in range(len(ops)):
                released.parked.add(7, Handler("op", began + number / 1e6), WHY)
        released.found.clear()
    assert 500 < total < 3000


def test_all_ops_end_at_once() -> None:
    """The client closes."""
    released = Released()
    for number in range(1000):
        released.parked.add(number % 2, Handler(f"op {number}", 0.0), WHY)
    released.parked.end()
    assert sum(len(ops) for _, ops in released.found) == 1000
    assert len(released.parked) == 0


def test_slots_are_apart() -> None:
    """One slot is released, the other waits."""
    released = Released()
    released.parked.add(7, Handler("a", 0.0), WHY)
    released.parked.add(8, Handler("b", 0.0), WHY)
    released.parked.release_all(lambda slot: slot == 8)
    assert released.found == [(8, ["b"])]
    assert len(released.parked) == 1
    released.parked.release(9)
