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
from tests.support.zookeeper_contenders import created_in, expire_into, node_with


def held(name: str) -> Contender:
    contender = Contender(Op(ACQUIRE, MUTEX, name, f"{name}|", 30.0))
    contender.granted = True
    return contender


def by_id(contenders: list[Contender]) -> dict[str, Contender]:
    return {each.id: each for each in contenders}


def test_a_hold_that_ends_before_the_others_ends_in_time() -> None:
    """It was granted by a ticket that was sent long ago, after another hold began."""
    clock, ended = FakeClock(), list[Any]()
    first, second = contenders = [held(name) for name in "ab"]
    expiry = Expiry(clock, by_id(contenders).get, ended.append)
    for contender, seconds in ((first, 30.0), (second, 5.0)):
        expiry.ends_at(contender, clock.now() + seconds)
    clock.advance(6.0)
    assert ended == [second]
    second.granted = False
    clock.advance(25.0)
    assert ended == [second, first]


async def test_many_holds_end_in_several_turns_of_the_loop() -> None:
    """Each begins a task, and no turn begins all."""
    clock, ended = FakeClock(), list[Any]()
    contenders = [held(f"{number:03}") for number in range(3 * SLICE)]
    expiry = Expiry(clock, by_id(contenders).get, ended.append)
    for contender in contenders:
        expiry.ends_at(contender, clock.now() + 30.0)
    clock.advance(31.0)
    for turn in range(1, 4):
        assert len(ended) <= turn * SLICE
        await asyncio.sleep(0)
    assert ended == contenders


def test_the_end_of_a_hold_looks_at_no_other() -> None:
    """Each of many that are not extended has an end of its own. One that is extended is looked at when its earlier end
    has come, and then once for each lease."""
    clock, ended, looks = FakeClock(), list[Any](), list[str]()
    contenders = [held(str(number)) for number in range(50)]
    known = by_id(contenders)

    def contender_of(whose: str) -> Contender | None:
        looks.append(whose)
        return known.get(whose)

    expiry = Expiry(clock, contender_of, ended.append)
    for contender in contenders:
        clock.advance(0.1)
        expiry.ends_at(contender, clock.now() + 30.0)
    extended, released, *others = contenders
    for _ in range(3):
        clock.advance(1.0)
        expiry.ends_at(extended, clock.now() + 30.0)
    del known[released.id]
    clock.advance(60.0)
    assert ended == [*others, extended]
    assert len(looks) == len(contenders) + 1


def test_an_id_that_acquires_again_has_another_end() -> None:
    """The end of its earlier hold does not count."""
    clock, ended = FakeClock(), list[Any]()
    first, second = held("a"), held("a")
    known = by_id([first])
    expiry = Expiry(clock, known.get, ended.append)
    expiry.ends_at(first, clock.now() + 30.0)
    clock.advance(10.0)
    known[second.id] = second
    expiry.ends_at(second, clock.now() + 30.0)
    clock.advance(25.0)
    assert not ended
    clock.advance(5.0)
    assert ended == [second]


async def test_a_node_of_the_next_session_outlives_the_end_of_the_last() -> None:
    """The contenders of a session that has expired are forgotten in slices. Between two of them a request that was
    under way may create a node in the session that there is by then: it counts."""
    node, contenders = node_with(3 * SLICE)
    expire_into(node, 2)
    created_in(contenders[-1], 2)
    while any(each.nodes for each in contenders[:-1]):
        await asyncio.sleep(0)
    for _ in range(3):
        await asyncio.sleep(0)
    assert contenders[-1].nodes
