"""When a client of ZooKeeper deletes the holds that were not extended."""

from __future__ import annotations

from typing import Any

from asynclock.rules.model import ACQUIRE, Op
from asynclock.rules.mutex import MUTEX
from asynclock.stores.zookeeper.contender import Contender
from asynclock.stores.zookeeper.expiry import Expiry
from tests.support.fake_clock import FakeClock


def test_a_hold_that_ends_before_the_others_ends_in_time() -> None:
    """It was granted by a ticket that was sent long ago, after another hold began."""
    clock, ended = FakeClock(), list[Any]()
    first, second = (Contender(Op(ACQUIRE, MUTEX, name, f"{name}|", 30.0)) for name in "ab")
    expiry = Expiry(clock, lambda: [first, second], ended.append)
    for contender, seconds in ((first, 30.0), (second, 5.0)):
        contender.granted = True
        expiry.ends_at(contender, clock.now() + seconds)
    clock.advance(6.0)
    assert ended == [second]
    second.granted = False
    clock.advance(25.0)
    assert ended == [second, first]
