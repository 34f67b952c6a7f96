"""Slots of a semaphore over N nodes: which one is asked for next, and what an attempt that lost its slot leaves."""

from __future__ import annotations

import re
from contextlib import closing
from random import random

import pytest
import redis as blocking

from asynclock import Lease, LockLost, Redlock
from asynclock.locks.multi import Multi
from asynclock.protocol.core import any_slot
from asynclock.rules.model import Part, Slots
from asynclock.rules.semaphore import Semaphore, wants
from tests.support.cancelled_waits import sent
from tests.support.default_keys import key_of
from tests.support.probes import id_of
from tests.support.waiters import LONG, back


@pytest.mark.parametrize(
    ("taken", "spare", "free"),
    [
        ([(0,), (0,), (0,)], 1, {1}),
        ([(0,), (0, 1), (0,)], 1, {1}),  # a majority may still give it
        ([(0, 1), (0, 1), (0,)], 1, set()),  # no majority is left for either
        ([(0,), (0,), (0,), (0, 1), (0, 1)], 2, {1}),
        ([(0,), (0,), (0, 1), (0, 1), (0, 1)], 2, set()),
        ([(0,), (1,)], 1, {0, 1}),  # a missing reply of the third node is no reason
        ([(), (), ()], 1, {0, 1}),
        ([], 1, {0, 1}),
    ],
)
def test_a_slot_is_asked_for_while_a_majority_may_give_it(
    taken: list[tuple[int, ...]], spare: int, free: set[int]
) -> None:
    """That is as long as no more nodes refuse it than a majority can do without."""
    found = {Semaphore(2).choose([Slots(each) for each in taken], spare, random) for _ in range(50)}
    assert found == (free or {None})


def test_slots_are_told_apart_by_their_whole_number() -> None:
    """Slot 1 is not taken where slot 10 or 11 is."""
    others = Slots(tuple(slot for slot in range(12) if slot != 1))
    assert {Semaphore(12).choose([others] * 3, 1, random) for _ in range(20)} == {1}


@pytest.mark.parametrize(("permits", "parts"), [(3, 2), (10_000, 78), (16, 256)])
def test_each_semaphore_of_a_multi_lock_gets_any_of_its_slots(permits: int, parts: int) -> None:
    """Also where there are more combinations than a float can count."""
    kind = Multi([Part(f"{number:03}", Semaphore(permits)) for number in range(parts)])
    draws = [kind.at(any_slot(random, kind.slots)) for _ in range(50)]
    for number in range(parts):
        found = {int(re.split("[/.]", each.parts[number].kind.mode)[1]) for each in draws}
        assert len(found) > 1
        assert found <= set(range(permits))


async def test_a_multi_lock_of_many_large_semaphores(shared_urls: list[str], name: str) -> None:
    """78 of 10,000 permits, over several nodes."""
    async with Redlock(*shared_urls[:3]) as client:
        pools = [client.semaphore(f"{name}:{number}", 10_000) for number in range(78)]
        async with client.multi(*pools), client.multi(*pools, timeout=0):
            assert len((await client.inspect(pools[-1].name)).holders) == 2


def slot_of(lease: Lease) -> str:
    return wants(id_of(lease))[1]


async def permit(client: Redlock, name: str) -> Lease:
    lease = await client.semaphore(name, 2).acquire(timeout=0)
    assert lease is not None
    return lease


async def test_a_slot_that_a_minority_refuses_can_be_had(shared_urls: list[str], name: str) -> None:
    """One of two permits is held. For the other a minority of the nodes keeps the hold of a client that died. With
    timeout=0 it is found, however often the first slot is drawn at random."""
    urls, majority = shared_urls, len(shared_urls) // 2 + 1
    async with (
        Redlock(*urls, lease=LONG, node_timeout=5.0) as dead,
        Redlock(*urls, lease=LONG, node_timeout=5.0) as client,
    ):
        await back(dead)
        await back(client)
        for number in range(12):
            here = f"{name}:{number}"
            first, second = await permit(dead, here), await permit(dead, here)
            await sent([dead])
            for url in urls[:majority]:
                with closing(blocking.Redis.from_url(url)) as cli:
                    assert cli.zrem(key_of(here), id_of(second)) == 1
            got = await permit(client, here)
            assert slot_of(got) == slot_of(second) != slot_of(first)
            await got.release()
            await first.release()
            with pytest.raises(LockLost):
                await second.release()


async def test_an_attempt_that_lost_its_slot_leaves_nothing(shared_urls: list[str], name: str) -> None:
    """With timeout=0 the first slot is drawn at random: sometimes a majority has another holder there. The attempt is
    undone at the nodes that granted it before the next slot is asked for: after the release they keep nothing."""
    urls, majority = shared_urls, len(shared_urls) // 2 + 1
    async with (
        Redlock(*urls, lease=LONG, node_timeout=5.0) as other,
        Redlock(*urls, lease=LONG, node_timeout=5.0) as client,
    ):
        await client.health()
        await sent([other])  # each node is connected, so each gets the hold
        for number in range(16):  # each draws the slot that is held with a chance of one half
            here = f"{name}:{number}"
            held = await permit(other, here)
            await sent([other])
            for url in urls[majority:]:  # a minority has forgotten it
                with closing(blocking.Redis.from_url(url)) as cli:
                    assert cli.zrem(key_of(here), id_of(held)) == 1
            got = await permit(client, here)
            assert slot_of(got) != slot_of(held)
            await got.release()
            await sent([client])
            for url in urls:
                with closing(blocking.Redis.from_url(url)) as cli:
                    assert set(cli.zrange(key_of(here), 0, -1)) <= {id_of(held).encode()}
            await held.release()
