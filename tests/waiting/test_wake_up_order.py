"""A waiter asks when it is due: a notice that arrives while it is busy counts, one notice of many is enough, and no
other event delays a due question. A grant that comes too late for the waiter does not count."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from asynclock import Redlock
from asynclock.rules.model import ID_LENGTH
from asynclock.runtime.session import Session
from asynclock.stores.port import Notice
from tests.support.cancelled_waits import SOON, Make, connected
from tests.support.distant_stores import Beyond
from tests.support.probes import (
    acquisitions_of,
    asked_id,
    deliver_notice,
    id_of,
    intercept_notices,
    reconnected,
    tickets_of,
)
from tests.support.still_clock import Still, forgotten, idle, turns
from tests.support.user_store import state_of
from tests.support.waiters import LIMIT, LONG, until

nodes = pytest.mark.parametrize("nodes", [1, 3])


async def until_idle(client: Redlock) -> None:
    """All tasks of this client that want a lock wait for a notice, or in the local queue."""
    async with asyncio.timeout(LIMIT):
        while not idle(client):
            await asyncio.sleep(0)


# -- what wakes it ---------------------------------------------------------------------------------------------------


async def test_a_local_waiter_is_served_after_a_detach(make: Make, name: str) -> None:
    """It waited behind a task of its own process, which passed its hold to another client. It asks for itself, and has
    the name when that client releases it."""
    giver, taker = make(lease=LONG), make(lease=LONG)
    lease = await giver(name).acquire(timeout=None)
    behind = asyncio.create_task(giver(name).acquire(timeout=None))
    await until_idle(giver)
    adopted = await taker.adopt(await lease.detach())
    await adopted.release()
    async with asyncio.timeout(SOON):
        got = await behind
    assert got.fence > adopted.fence
    await got.release()


@nodes
@pytest.mark.parametrize("turn", range(6))
async def test_notified_of_the_free_time_before_it_is_idle(name: str, nodes: int, turn: int) -> None:
    """The release with min_hold reaches the servers so many turns after the acquire. Where it comes right behind the
    waiter's ticket, the reply says that the hold has a minute left, and the notice that arrives before the waiter has
    run again says five seconds. The waiter tries after five seconds."""
    still = Still(nodes, name)
    async with still.held(lease=60.0, min_hold=5.0) as (_, lease), still.client(lease=60.0) as other:
        await other.health()
        waiting = asyncio.create_task(other(name).acquire(timeout=None))
        await turns(turn)
        await lease.release()
        await until_idle(other)
        still.clock.advance(4.9)
        await turns()
        assert not waiting.done()
        still.clock.advance(0.2)
        await turns(20)
        assert waiting.done()
        await waiting.result().release()


@nodes
async def test_the_first_waiter_leaves_while_the_name_rests(name: str, nodes: int) -> None:
    """It alone was notified of the end of the rest. The next one tries then, and not when it renews its ticket, 16 s
    later at the soonest."""
    still = Still(nodes, name)
    async with (
        still.held(lease=60.0, min_hold=5.0) as (_, lease),
        still.client(lease=60.0) as first,
        still.client(lease=60.0) as second,
    ):
        waiting = []
        for client in (first, second):
            waiting.append(asyncio.create_task(client(name).acquire(timeout=None)))
            await until_idle(client)
        await lease.release()
        await turns(20)
        waiting[0].cancel()
        await turns(20)
        still.clock.advance(5.1)
        await turns(40)
        assert waiting[1].done()
        await waiting[1].result().release()


@nodes
async def test_readers_that_wait_for_a_rest_enter_together(name: str, nodes: int) -> None:
    """The first of them alone is notified of its end, and has the others served."""
    still = Still(nodes, name)
    async with AsyncExitStack() as stack:
        writer, *readers = [await stack.enter_async_context(still.client(lease=60.0)) for _ in range(4)]
        lease = await writer.write(name, min_hold=5.0).acquire(timeout=None)
        waiting = []
        for client in readers:
            waiting.append(asyncio.create_task(client.read(name).acquire(timeout=None)))
            await until_idle(client)
        await lease.release()
        await turns(20)
        still.clock.advance(5.1)
        await turns(60)
        still.clock.advance(0.1)
        await turns(60)
        assert [each.done() for each in waiting] == [True] * 3
        for each in waiting:
            await each.result().release()


async def test_one_notice_of_many_is_enough(shared_urls: list[str], name: str) -> None:
    """The notices of all nodes but one are lost. The waiter tries a round trip after that one, and not when its ticket
    is renewed, 16 s later at the soonest."""
    async with (
        Redlock(*shared_urls, lease=LONG, node_timeout=5.0) as first,
        Redlock(*shared_urls, lease=LONG, node_timeout=5.0) as second,
    ):
        await until(lambda: connected(first) and connected(second))
        lease = await first(name).acquire(timeout=None)
        await first.health()  # over the same connections: each node has the hold, not only a majority
        waiting = asyncio.create_task(second(name).acquire(timeout=None))
        await second.health()
        await until_idle(second)
        notices: list[Notice] = []
        receive = intercept_notices(second, lambda index, notice: notices.append(notice) if index == 1 else None)
        await lease.release()
        await first.health()  # each node has carried it out: a try that one refuses would wait for its notice
        await until(lambda: bool(notices))
        receive(1, notices[0])
        async with asyncio.timeout(SOON):
            got = await waiting
        await got.release()


async def test_notified_while_a_renewal_is_unanswered(name: str) -> None:
    """A node is silent, so a renewal of the ticket is open until that node fails. Meanwhile the holder releases, and
    the other two nodes notify the waiter. It tries when the round is over, and not when it renews its ticket again, 8 s
    later at the soonest."""
    far = Beyond(3, name, way=0.001)
    async with far.opened(lease=60.0) as first, far.opened(lease=30.0) as other:
        lease = await far.lease(first)
        waiting = asyncio.create_task(other(name).acquire(timeout=None))
        await far.pass_time(0.1)
        far.far[2].silent = True
        while idle(other):
            await far.pass_time(0.1, step=0.1)
        await far.finish(asyncio.create_task(lease.release()))
        await far.pass_time(0.1)
        assert not waiting.done()
        far.far[2].disconnect()
        await far.finish(waiting, within=1.0)
        await far.finish(asyncio.create_task(waiting.result().release()))


# -- what does not put it off ----------------------------------------------------------------------------------------


@pytest.fixture
def latest(monkeypatch: pytest.MonkeyPatch) -> None:
    """All jitter is as great as it can be."""
    monkeypatch.setattr(Session, "random", lambda _: 1.0 - 1e-12)


@nodes
@pytest.mark.usefixtures("latest")
async def test_a_reconnect_does_not_delay_a_try(name: str, nodes: int) -> None:
    """The name rests until a moment that the waiter knows. A node is connected again just before, for which the waiter
    would renew its ticket within 50 ms: it tries in that moment all the same."""
    still = Still(nodes, name)
    async with still.held(min_hold=5.0) as (_, lease), still.client(lease=LONG) as other:
        began = still.clock.now()
        waiting = asyncio.create_task(other(name).acquire(timeout=None))
        await until_idle(other)
        await lease.release()
        await turns()
        still.clock.advance(4.99)
        await turns()
        assert idle(other)
        reconnected(other, 0)
        still.clock.advance(0.012)
        await turns(20)
        assert still.clock.now() < began + 5.01
        assert waiting.done()
        await waiting.result().release()


@nodes
@pytest.mark.usefixtures("latest")
async def test_a_reconnect_does_not_delay_a_timeout(name: str, nodes: int) -> None:
    """The same just before the waiter's own time is up: it returns in time."""
    still = Still(nodes, name)
    async with still.held(lease=60.0), still.client() as other:
        waiting = asyncio.create_task(other(name).acquire(timeout=2.0))
        await until_idle(other)
        still.clock.advance(1.99)
        await turns()
        assert idle(other)
        reconnected(other, 0)
        still.clock.advance(0.012)
        await turns()
        assert waiting.done()
        assert waiting.result() is None
        assert forgotten(other)


# -- what comes too late for it --------------------------------------------------------------------------------------


@nodes
@pytest.mark.parametrize("renewed", [False, True], ids=["first-ticket", "renewed"])
async def test_a_ticket_is_served_no_longer_than_its_owner_waits(name: str, nodes: int, renewed: bool) -> None:
    """A process hangs, and the time of its waiter is up long before its ticket ends. The holder releases: the next in
    the queue has the name at once, without any time passing."""
    still = Still(nodes, name)
    async with still.held(lease=60.0) as (_, lease), still.client() as hangs, still.client() as other:
        began = still.clock.now()
        late = asyncio.create_task(hangs(name, lease=30.0).acquire(timeout=12.0 if renewed else 5.0))
        await until_idle(hangs)
        await still.until(began + (10.5 if renewed else 1.0))
        assert {its.number for store in still.stores for its in state_of(store, name).queue} == {2 if renewed else 1}
        next_one = asyncio.create_task(other(name, lease=30.0).acquire(timeout=None))
        await until_idle(other)
        still.clock.block(2.0 if renewed else 4.5)  # from here on its timers do not run
        await lease.release()
        await turns(20)
        assert next_one.done()
        await next_one.result().release()
        still.clock.advance(1.0)
        if (granted := await late) is not None:  # it asked once more, since it could not before its time was up
            await granted.release()


async def test_a_grant_whose_notice_comes_too_late(name: str) -> None:
    """No validity is left when the notice of a grant is read. The waiter releases that hold, and asks with another id:
    the release may be sent once more."""
    still = Still(1, name)
    async with still.held(lease=60.0) as (_, lease), still.client(lease=30.0) as other:
        late: list[Notice] = []
        receive = intercept_notices(other, lambda index, notice: late.append(notice))
        waiting = asyncio.create_task(other(name).acquire(timeout=None))
        await until_idle(other)
        (first,) = map(asked_id, acquisitions_of(other))
        await lease.release()
        await turns()
        still.clock.block(31.0)
        receive(0, late[0])
        async with asyncio.timeout(LIMIT):
            got = await waiting
        assert got.held
        assert id_of(got) != first
        await got.release()


async def test_a_grant_of_a_forgotten_ticket_is_no_lease(name: str) -> None:
    """A notice names a sending from which no validity can be counted. The waiter asks the server, which says who holds
    the name, and waits on; later it is served as ever."""
    still = Still(1, name)
    async with still.held(lease=60.0) as (_, lease), still.client(lease=LONG) as other:
        waiting = asyncio.create_task(other(name).acquire(timeout=None))
        await until_idle(other)
        (whose,) = tickets_of(other)
        still.asked()
        deliver_notice(other, 0, Notice(whose[:ID_LENGTH], 99, lease.fence + 1, name=name))
        await turns(20)
        assert not waiting.done()
        assert len(still.asked()) == 1
        assert lease.held
        await lease.release()
        async with asyncio.timeout(LIMIT):
            got = await waiting
        assert got.fence > lease.fence
        await got.release()
