"""A waiter's own time: its timeout and its ticket's renewals follow its own clock, whatever the servers answer and
whichever of them are silent; and how far a clock may be wrong."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from itertools import pairwise

import pytest

from asynclock import QuorumUnavailable, Redlock
from asynclock.rules.model import CLOCK_SKEW, State, Verb
from asynclock.stores.port import NodeConfig
from asynclock.stores.transactional import TransactionalNode
from tests.support.distant_stores import Beyond
from tests.support.memory_probes import set_state, shift_clock
from tests.support.probes import acquisitions_of, ballot_of, nodes_of, reconnected
from tests.support.still_clock import Memory, Still, forgotten, idle, turns
from tests.support.user_store import state_of
from tests.support.waiters import LIMIT

both = pytest.mark.parametrize("nodes", [1, 5])


# -- a name that rests -----------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("fair", [False, True], ids=["first-come", "fair"])
async def test_a_name_that_rests_does_not_delay_a_timeout(name: str, nodes: int, fair: bool) -> None:
    """The waiter knows that the name will be free in so many seconds. Its own time is up before that, and it returns
    then."""
    still = Still(nodes, name)
    async with still.held(min_hold=20.0) as (_, lease), still.client() as other:
        began = still.clock.now()
        waiting = asyncio.create_task(other(name, fair=fair).acquire(timeout=5.0))
        await turns()
        assert idle(other)
        await still.until(began + 1.0)
        await lease.release()
        await still.until(began + 4.99)
        assert not waiting.done()
        still.clock.advance(0.02)
        await turns()
        assert waiting.done()
        assert waiting.result() is None
        assert forgotten(other)
        assert not any(state_of(store, name).queue for store in still.stores)


@both
async def test_a_name_that_rests_does_not_delay_renewals(name: str, nodes: int) -> None:
    """The rest lasts longer than a ticket lives. The ticket is renewed as usual, every third of its lifetime, so its
    owner is still in the queue, and notified, when the name is free."""
    still = Still(nodes, name)
    async with still.held(min_hold=20.0) as (_, lease), still.client(lease=6.0) as other:
        began = still.clock.now()
        waiting = asyncio.create_task(other(name).acquire(timeout=None))
        await turns()
        await still.until(began + 1.0)
        await lease.release()
        await turns()
        still.asked()
        while still.clock.now() < began + 19.5:
            assert all(len(state_of(store, name).queue) == 1 for store in still.stores)
            assert not waiting.done()
            still.clock.advance(0.1)
            await turns()
        asked = [began + 1.0, *(when for verb, when in still.asked() if verb in (Verb.ACQUIRE, Verb.WAIT))]
        assert len(asked) > 9
        assert all(later - sooner <= 2.0 + 0.2 for sooner, later in pairwise(asked))
        while not waiting.done():
            still.clock.advance(0.1)
            await turns()
            assert still.clock.now() <= began + 20.5
        await waiting.result().release()


# -- the first use ---------------------------------------------------------------------------------------------------


class Slow(Memory):
    """A store that takes four seconds to connect; and, where it is `dead`, has not been reached then."""

    dead = False

    def open(self, config: NodeConfig) -> TransactionalNode:
        return SlowNode(self, config, self.dead)


class SlowNode(TransactionalNode):
    def __init__(self, store: Slow, config: NodeConfig, dead: bool) -> None:
        super().__init__(store, config)
        self._clock = config.clock
        self.error = ConnectionError("out of reach") if dead else None

    async def open(self) -> None:
        advance = getattr(self._clock, "advance")  # noqa: B009 - of the clock that the test moves
        if self._index == 0:
            advance(4.0)
        if self.error is None:
            await super().open()

    def send(self, op: object, handler: object) -> None:
        error = self.error
        if error is None:
            super().send(op, handler)  # type: ignore[arg-type]
        else:
            asyncio.get_running_loop().call_soon(lambda: handler.fail(self._index, error, maybe=False))  # type: ignore[attr-defined]


@both
async def test_a_first_use_takes_no_longer_than_it_may(name: str, nodes: int) -> None:
    """Connecting counts against the timeout of an acquire. No server is reached, and the acquire says so when the time
    is up."""
    still = Still(nodes, name)
    stores = [Slow(still.clock) for _ in range(nodes)]
    for store in stores:
        store.dead = True
    began = still.clock.now()
    async with aclosing(Redlock(*stores)) as client:
        waiting = asyncio.create_task(client(name).acquire(timeout=5.0))
        await turns(20)
        assert still.clock.now() == began + 4.0
        await still.until(began + 4.9)
        assert not waiting.done()
        await still.until(began + 5.1)
        assert waiting.done()
        assert isinstance(waiting.exception(), QuorumUnavailable)


@both
async def test_a_first_use_waits_no_longer_for_a_holder(name: str, nodes: int) -> None:
    """The same where another client holds the name: None, when the time that began with connecting is over."""
    still = Still(nodes, name)
    still.stores = [Slow(still.clock) for _ in range(nodes)]
    async with still.held(lease=60.0):
        began = still.clock.now()
        async with aclosing(still.client()) as client:
            waiting = asyncio.create_task(client(name).acquire(timeout=5.0))
            await turns(20)
            assert still.clock.now() == began + 4.0
            await still.until(began + 4.9)
            assert not waiting.done()
            await still.until(began + 5.1)
            assert waiting.done()
            assert waiting.result() is None


# -- a command that is not answered ----------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("timeout", [0.01, 1.0, 10.0, 45.0])
async def test_silence_ends_with_the_timeout(name: str, nodes: int, timeout: float) -> None:
    """A server does not answer this one command, and answers others, so it does not count as down. The acquire raises
    its outage when its own time is up, be that before or after the server's."""
    beyond = Beyond(nodes, name, way=0.001)
    async with beyond.opened() as client:
        await client.health()
        beyond.set_answering(False)
        began = beyond.clock.now()
        waiting = asyncio.create_task(client(name).acquire(timeout=timeout))
        await turns()
        await beyond.pass_time(timeout - 0.005, timeout / 10)
        assert not waiting.done()
        await beyond.finish(waiting, within=1.0)
        assert isinstance(waiting.exception(), QuorumUnavailable)
        assert beyond.clock.now() <= began + timeout + 0.02


@both
async def test_silence_after_a_refusal_ends_with_the_timeout(name: str, nodes: int) -> None:
    """The same where a reply had said before that another client holds the name: at the end that is too old."""
    beyond = Beyond(nodes, name, way=0.001)
    async with beyond.opened() as first, beyond.opened() as second:
        held = await beyond.lease(first, lease=60.0)
        began = beyond.clock.now()
        waiting = asyncio.create_task(second(name).acquire(timeout=15.0))
        await beyond.pass_time(1.0)
        assert idle(second)
        beyond.set_answering(False)
        await beyond.pass_time(13.9, 0.1)  # its renewals get no answer
        assert not waiting.done()
        await beyond.finish(waiting, within=1.0)
        assert isinstance(waiting.exception(), QuorumUnavailable)
        assert beyond.clock.now() <= began + 15.02
        beyond.set_answering(True)
        beyond.disconnect()
        await beyond.finish(asyncio.create_task(held.release()))


@both
async def test_each_outage_has_patience_of_its_own(name: str, nodes: int) -> None:
    """However long the acquire waits, and whatever outages it has survived before."""
    beyond = Beyond(nodes, name, way=0.001)
    async with beyond.opened() as first, beyond.opened() as second:
        held = await beyond.lease(first, lease=60.0)
        waiting = asyncio.create_task(second(name, lease=6.0).acquire())
        for _ in range(3):
            await beyond.pass_time(10.0, 0.1)
            beyond.set_answering(False)
            await beyond.pass_time(3.0, 0.1)  # its renewals get no answer
            beyond.disconnect()
            await beyond.pass_time(0.5, 0.01)
            beyond.set_answering(True)
            beyond.disconnect()
            await beyond.pass_time(1.0, 0.01)
            assert not waiting.done()
        await beyond.finish(asyncio.create_task(held.release()))
        await beyond.finish(waiting)
        assert waiting.result().held
        await beyond.finish(asyncio.create_task(waiting.result().release()))


async def test_silence_in_the_second_round_ends_with_the_timeout(name: str) -> None:
    """All nodes grant, with tokens that differ, so they are asked once more, and none answers that. It is an outage,
    raised when the time is up; no other client held the name."""
    beyond = Beyond(3, name, way=0.1)
    async with beyond.opened() as client:
        await client.health()
        for index, store in enumerate(beyond.far):
            ahead = int((store.now() + 5.0 * (index + 1)) * 1_000_000)
            set_state(store, name, State(fence=ahead, fence_ends=store.now() + 3600.0))
        waiting = asyncio.create_task(client(name).acquire(timeout=1.0))
        await beyond.pass_time(0.15)
        beyond.set_answering(False)
        await beyond.pass_time(0.8)
        assert not waiting.done()
        await beyond.pass_time(0.1)
        assert waiting.done()
        assert isinstance(waiting.exception(), QuorumUnavailable)


# -- clocks that are wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [3, 5])
@pytest.mark.parametrize("fair", [False, True], ids=["first-come", "fair"])
@pytest.mark.parametrize("wrong", [-3600.0, 3600.0])
async def test_an_order_key_is_one_however_wrong_the_clock(name: str, nodes: int, fair: bool, wrong: float) -> None:
    """The servers' clocks differ a little, and the client's by an hour. Each server clamps the key of the first ticket
    to its own clock. From the next sending on the key is the same at all of them, and stays as it is."""
    still = Still(nodes, name)
    for index, store in enumerate(still.stores):
        shift_clock(store, index * 0.7)
    async with still.held(lease=60.0), still.client(lease=30.0) as other:
        still.clock.jump_wall(wrong)
        began = still.clock.now()
        clocks = sorted(store.now() for store in still.stores)
        waiting = asyncio.create_task(other(name, fair=fair).acquire(timeout=None))
        await turns(20)
        assert [its.number for store in still.stores for its in state_of(store, name).queue] == [1] * nodes
        assert len(orders(still, name)) == nodes
        known: set[int] = set()
        for number in range(2, 6):
            while {its.number for store in still.stores for its in state_of(store, name).queue} != {number}:
                still.clock.advance(0.5)
                await turns()
                assert still.clock.now() < began + 55.0
            known |= orders(still, name)
            assert len(known) == 1
        (order,) = known
        limit = CLOCK_SKEW + 0.001
        assert clocks[0] - limit <= order / 1_000_000 <= clocks[-1] + limit
        waiting.cancel()
        await asyncio.wait({waiting})


def orders(still: Still, name: str) -> set[int]:
    """The order keys of the ticket, at all stores."""
    return {its.order for store in still.stores for its in state_of(store, name).queue}


# -- a grant ---------------------------------------------------------------------------------------------------------


async def test_a_grant_counts_from_when_its_ticket_was_sent(name: str) -> None:
    """For ten seconds notices are off: the client asks again and again, and renews its ticket each time. Then they are
    on again, and the ticket is granted: the hold ends when the ticket that was sent last ends, and so does the
    validity."""
    still = Still(1, name)
    async with still.held(lease=60.0) as (_, lease), still.client(lease=30.0) as other:
        waiting = asyncio.create_task(other(name).acquire(timeout=None))
        await turns()
        sent = still.clock.now()
        (node,) = nodes_of(other)
        node.listens = False
        reconnected(other, 0)
        still.asked()
        while still.clock.now() < sent + 10.0:
            still.clock.advance(0.1)
            await turns()
        assert len(still.asked()) > 10
        node.listens = True
        await lease.release()
        async with asyncio.timeout(LIMIT):
            got = await waiting
        (hold,) = state_of(still.stores[0], name).holds
        assert hold.ends is not None
        left = hold.ends - still.stores[0].now()
        assert left == pytest.approx(30.0, abs=0.3)  # a pause between two polls
        assert got.remaining < left
        await got.release()


async def test_notices_that_come_again_while_it_asks_without(name: str) -> None:
    """Over three nodes notices are off for half a minute, so the client asks again and again, without a ticket, and its
    old ticket is stale. Notices are on again while it asks: it leaves a ticket at once, and is notified."""
    still = Still(3, name)
    async with still.held(lease=60.0) as (_, lease), still.client(lease=60.0) as other:
        waiting = asyncio.create_task(other(name).acquire(timeout=None))
        await turns(20)
        for node in nodes_of(other):
            node.listens = False
        reconnected(other, 0)
        await still.until(still.clock.now() + 35.0)
        (wait,) = acquisitions_of(other)
        while True:  # a round over these nodes takes one turn of the loop
            still.clock.advance(0.01)
            if not idle(other):
                break
            await asyncio.sleep(0)
        assert ballot_of(wait) is not None
        for node in nodes_of(other):
            node.listens = True
            reconnected(other, 0)
        await turns(20)
        await lease.release()
        async with asyncio.timeout(LIMIT):
            await (await waiting).release()
