"""When a client of ZooKeeper deletes the holds that were not extended."""

from __future__ import annotations

import asyncio
from typing import Any

from asynclock.rules.model import ACQUIRE, Op
from asynclock.rules.mutex import MUTEX
from asynclock.stores.backlog import SLICE
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


async def test_many_holds_end_in_several_turns_of_the_loop() -> None:
    """Each begins a task, and no turn begins all."""
    clock, ended = FakeClock(), list[Any]()
    contenders = [Contender(Op(ACQUIRE, MUTEX, str(number), f"{number}|", 30.0)) for number in range(3 * SLICE)]
    expiry = Expiry(clock, lambda: contenders, ended.append)
    for contender in contenders:
        contender.granted = True
        expiry.ends_at(contender, clock.now() + 30.0)
    clock.advance(31.0)
    for turn in range(1, 4):
        assert len(ended) <= turn * SLICE
        await asyncio.sleep(0)
    assert ended == contenders
