"""A client with much work does it in slices: other tasks of its event loop run in between."""

from __future__ import annotations

import asyncio
import time

import pytest

from asynclock import ConfigError, Lease, Redlock
from asynclock.protocol import holds
from asynclock.protocol.acquisition import Acquisition
from asynclock.runtime import session
from asynclock.stores.memory import MemoryStore
from asynclock.stores.redis import connection
from asynclock.stores.redis.connection import REPLIES
from tests.support.probes import (
    acquisitions_of,
    connection_of,
    nodes_of,
    release_by_script,
    session_of,
    stop_renewals,
    unanswered,
    unsent,
)
from tests.support.servers import Server
from tests.support.user_store import state_of
from tests.support.waiters import LIMIT, until

pytestmark = pytest.mark.both_loops("the loop orders the turns")

MANY = 500
SENT = 250
"""So many commands fit into the buffers of a socket."""


async def test_many_replies_at_once_are_handled_in_slices(server: Server, name: str) -> None:
    """A server that was stopped answers hundreds of commands at once."""
    async with Redlock(server.url, lease=300.0, max_lease=300.0) as client:
        await client.health()
        (node,) = nodes_of(client)
        server.freeze()
        asking = [asyncio.create_task(client(f"{name}:{i}").acquire(timeout=0)) for i in range(SENT)]
        while len(unanswered(connection_of(node))) < SENT or unsent(connection_of(node)):
            await asyncio.sleep(0)
        server.thaw()
        with server.cli() as cli:  # the loop stands still until each name has its hold and its fence
            while len(cli.keys(f"*{name}:*")) < 2 * SENT:
                pass
        left, handled = SENT, []
        async with asyncio.timeout(LIMIT):
            while left:
                await asyncio.sleep(0)
                now_left = len(unanswered(connection_of(node)))
                handled.append(left - now_left)
                left = now_left
        assert max(handled) <= REPLIES
        assert all(await asyncio.gather(*asking))


async def test_a_reply_that_has_come_is_not_overdue(server: Server, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replies come together, and the client takes longer than the node timeout to handle them, slice by slice. The
    server was not silent: each reply counts."""
    monkeypatch.setattr(connection, "REPLIES", 1)

    async def ask(client: Redlock, i: int) -> Lease | None:
        lease = await client(f"{name}:{i}").acquire(timeout=0)
        time.sleep(0.005)
        return lease

    async with Redlock(server.url, lease=300.0, max_lease=300.0, node_timeout=1.0) as client:
        await client.health()
        (node,) = nodes_of(client)
        server.freeze()
        asking = [asyncio.create_task(ask(client, i)) for i in range(SENT)]
        while len(unanswered(connection_of(node))) < SENT or unsent(connection_of(node)):
            await asyncio.sleep(0)
        server.thaw()
        with server.cli() as cli:  # the loop stands still until each name has its hold and its fence
            while len(cli.keys(f"*{name}:*")) < 2 * SENT:
                pass
        async with asyncio.timeout(LIMIT):
            assert all(await asyncio.gather(*asking))


async def test_all_is_released_in_slices(server: Server, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """release_all() and aclose() of many leases: the releases are sent in more than one turn of the loop, and none is
    forgotten."""
    monkeypatch.setattr(holds, "SLICE", holds.SLICE / 4)
    for close in (False, True):
        client = Redlock(server.url, lease=300.0, max_lease=300.0)
        leases = [await client(f"{name}:{i}").acquire(timeout=0) for i in range(MANY)]
        stop_renewals(client)
        release_by_script(client)
        closing = asyncio.create_task(client.aclose() if close else client.release_all())
        turns = set()
        async with asyncio.timeout(LIMIT):
            while not closing.done():
                turns.add(sum(lease is not None and lease.held for lease in leases))
                await asyncio.sleep(0)
        await closing
        assert len(turns) > 3
        with server.cli() as cli:
            assert not [key for key in cli.keys(f"*{name}:*") if b"fence" not in key]
        await client.aclose()


async def test_an_acquire_is_granted_between_two_slices_of_a_close(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The close has begun to release the holds that it found. An acquire that is granted then brings no lease, which
    nobody would release: it is undone."""
    monkeypatch.setattr(holds, "SLICE", -1.0)  # one hold in each
    store = MemoryStore()
    client = Redlock(store, lease=300.0, max_lease=300.0)
    leases = [await client(f"{name}:{i}").acquire(timeout=0) for i in range(9)]
    acquiring = asyncio.create_task(client(name).acquire(timeout=None))
    closing = asyncio.create_task(client.aclose())
    with pytest.raises(ConfigError, match="closed"):
        await acquiring
    await closing
    assert not any(lease is not None and lease.held for lease in leases)
    assert not state_of(store, name).holds


async def test_the_waiters_of_a_client_that_closes_end_in_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets its error, and leaves nothing behind."""
    monkeypatch.setattr(session, "SLICE", -1.0)  # one waiter in each
    store = MemoryStore()
    client = Redlock(store, lease=300.0, max_lease=300.0)
    lease = await client(name).acquire(timeout=0)
    waiting = [asyncio.create_task(client(name).acquire(timeout=None)) for _ in range(9)]
    await until(lambda: len(acquisitions_of(client)) == len(waiting))
    closing, left = asyncio.create_task(client.aclose()), set[int]()
    while not closing.done():
        left.add(len(acquisitions_of(client)))
        await asyncio.sleep(0)
    await closing
    assert left == set(range(10))
    assert lease is not None
    assert not lease.held
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(each) for each in errors} == {ConfigError}
    assert not state_of(store, name).holds
    assert not state_of(store, name).queue


async def test_an_acquire_that_wins_while_the_waiters_end_leaves_no_timer(
    server: Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers between two waiters. That brings no lease, and the watchdog that would renew it has ended."""
    monkeypatch.setattr(session, "SLICE", -1.0)  # one waiter in each
    client = Redlock(server.url, lease=300.0, max_lease=300.0)
    async with client(f"first of {name}"):  # a first use asks the server whether it votes
        pass
    machine, (node,) = session_of(client).machine, nodes_of(client)
    server.freeze()
    acquiring = [asyncio.create_task(client(f"{name}:{i}").acquire(timeout=0)) for i in range(SENT)]
    while len(unanswered(connection_of(node))) < SENT or unsent(connection_of(node)):
        await asyncio.sleep(0)
    end = Acquisition.close

    def thaw_and_end(acquisition: Acquisition) -> None:
        monkeypatch.setattr(Acquisition, "close", end)
        server.thaw()
        with server.cli() as cli:
            while len(cli.keys(f"*{name}:*")) < 2 * SENT:  # each name has its hold and its fence
                pass
        end(acquisition)

    monkeypatch.setattr(Acquisition, "close", thaw_and_end)
    await client.aclose()
    assert {type(each) for each in await asyncio.gather(*acquiring, return_exceptions=True)} == {ConfigError}
    assert not machine.watchdog.is_armed
    with server.cli() as cli:
        assert not [key for key in cli.keys(f"*{name}:*") if b"fence" not in key]
