"""Servers that do not answer, and a client that was too busy to read (HAZARDS C10)."""

from __future__ import annotations

import asyncio
import os
import resource
import select
import socket
import time
from typing import Any

import pytest

from asynclock import QuorumUnavailable, Redlock
from asynclock.stores.redis.handlers import patience
from asynclock.stores.redis.store import RedisStore
from tests.support.cut_servers import Clocked
from tests.support.fake_clock import FakeClock
from tests.support.probes import connection_of, nodes_of, socket_of, tickets_of, unanswered, unsent
from tests.support.servers import Server
from tests.support.still_clock import turns
from tests.support.waiters import LIMIT, back, healthy, until

pytestmark = pytest.mark.both_loops("the loop has the timers and the transports")


async def test_c10_a_frozen_minority_costs_nothing(five: list[Server], name: str) -> None:
    """Two of five nodes hang: with a node timeout of 20 s no call waits for it even once."""
    async with Redlock(*(each.url for each in five), lease=60.0, node_timeout=20.0) as redlock:
        for each in five[:2]:
            each.freeze()
        async with asyncio.timeout(15):
            for _ in range(20):
                async with redlock(name) as lease:
                    await lease.extend()
        for each in five[:2]:
            each.thaw()


@pytest.mark.parametrize("pinged", [False, True])
async def test_c10_a_frozen_node_is_found_down_and_comes_back(five: list[Server], name: str, pinged: bool) -> None:
    """Silent for three node timeouts it is down, so that calls fail at once; it votes again once it wakes. An
    unanswered ping, which has more time, does not delay that."""
    async with Redlock(*(each.url for each in five), node_timeout=0.3) as redlock:
        await redlock.health()
        await back(redlock)
        five[0].freeze()
        node = nodes_of(redlock)[0]
        async with asyncio.timeout(LIMIT), asyncio.TaskGroup() as group:
            if pinged:
                group.create_task(redlock.health())
                while not unanswered(connection_of(node)):
                    await asyncio.sleep(0)
            while node.error is None:
                async with redlock(name):
                    await asyncio.sleep(0.02)
        assert "silent" in str(node.error)
        five[0].thaw()
        await back(redlock)
        async with redlock(name):
            pass


async def test_a_short_lease_drops_no_connection(server: Server, name: str) -> None:
    """How long a server may be silent follows from its oldest command, whatever is sent after that."""
    async with Redlock(server.url) as redlock:
        await redlock.health()
        server.freeze()
        node = nodes_of(redlock)[0]
        connection = connection_of(node)
        long = asyncio.create_task(redlock(name).acquire(timeout=None))
        silent = 0.6  # longer than a short lease is patient
        while not unanswered(connection) or node.clock.now() - connection.moved_at < silent:
            await asyncio.sleep(0.01)
        with pytest.raises(QuorumUnavailable):
            await redlock(f"{name}:short", lease=0.1).acquire(timeout=0)
        server.thaw()
        async with asyncio.timeout(LIMIT), await long as lease:
            assert lease.held
        assert connection_of(node) is connection


async def test_c10_nodes_that_accept_and_do_not_answer(five: list[Server], name: str) -> None:
    """Half-open peers do not delay the first use either."""
    folder = five[0].path.parent
    silent = []
    for i in range(2):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / f"silent{i}"))
        listener.listen()
        silent.append(listener)
    urls = [each.url for each in five[:3]] + [
        f"unix://{listener.getsockname()}?socket_connect_timeout=0.5" for listener in silent
    ]
    async with asyncio.timeout(LIMIT), Redlock(*urls) as redlock, redlock(name) as lease:
        assert lease.held
        health = await healthy(redlock)
        assert [node.ok for node in health.nodes] == [True, True, True, False, False]
    for listener in silent:
        listener.close()


async def test_c10_majority_frozen_then_thawed(five: list[Server], name: str) -> None:
    """A waiter survives an outage that ends within its timeout."""
    async with Redlock(*(each.url for each in five), node_timeout=0.3, patience=LIMIT) as redlock:
        for each in five[:3]:
            each.freeze()
        with pytest.raises(QuorumUnavailable) as caught:
            await redlock(name).acquire(timeout=0)
        assert caught.value.errors
        waiter = asyncio.create_task(redlock(name).acquire(timeout=LIMIT))
        with pytest.raises(QuorumUnavailable):
            await redlock(name).acquire(timeout=0.5)
        assert not waiter.done()
        for each in five[:3]:
            each.thaw()
        lease = await waiter
        assert lease is not None
        await lease.release()


async def test_a_blocked_loop_is_no_outage(five: list[Server], name: str) -> None:
    """A task that blocks the loop for several node timeouts costs no connection and no vote."""
    async with Redlock(*(each.url for each in five[:3]), lease=5.0) as redlock:
        await back(redlock)
        before = [*map(connection_of, nodes_of(redlock))]
        for _ in range(5):
            async with redlock(name):
                time.sleep(0.3)
                await asyncio.sleep(0)
            lease = await redlock(name).acquire(timeout=0)
            assert lease is not None
            time.sleep(0.2)
            await lease.release()
        assert before == [*map(connection_of, nodes_of(redlock))]


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        (0.05, 0.5),  # a crowded machine
        (0.5, 1.5),  # three times
        (3.0, 5.0),  # at most 5 s ...
        (6.0, 6.0),  # ... but never less than the command was given
    ],
)
def test_how_long_a_server_may_be_silent(limit: float, seconds: float) -> None:
    """Its oldest command has `limit` seconds to be answered."""
    assert patience(limit) == seconds


async def test_a_frozen_server_is_down_after_its_commands_time(server: Server, name: str) -> None:
    """One node and a lease of 60 s: a command has 6 s, and the server that did not answer it is down then."""
    clock = FakeClock()
    async with Redlock(Clocked(server.url, clock), lease=60.0) as redlock:
        (node,) = nodes_of(redlock)
        server.freeze()
        try:
            trying = asyncio.create_task(redlock(f"{name}:other").acquire(timeout=0))
            await until(lambda: unanswered(connection_of(node)))
            clock.advance(5.9)
            assert node.error is None
            clock.advance(0.2)
            assert "silent" in str(node.error)
            with pytest.raises(QuorumUnavailable):
                await trying
        finally:
            server.thaw()
        await until(lambda: node.error is None)


@pytest.mark.parametrize("leaves", ["a body", "a wait", "a try", "a client"])
async def test_a_frozen_server_delays_no_task_for_long(server: Server, name: str, leaves: str) -> None:
    """One node and a lease of ten minutes, so that a command has a minute to be answered. A release has 3 s: so a body
    that is cancelled, a waiter that is, and a client that closes, are done by then."""
    clock = FakeClock()
    options: dict[str, Any] = {"lease": 600.0, "max_lease": 600.0}
    async with Redlock(server.url, **options) as other:
        client = Redlock(Clocked(server.url, clock), **options)
        if leaves == "a wait":
            theirs = await other(name).acquire(timeout=None)
        entered = asyncio.Event()

        async def body() -> None:
            async with client(name):
                entered.set()
                await asyncio.Event().wait()

        if leaves == "a try":
            await client.health()
            server.freeze()
            task: asyncio.Task[Any] = asyncio.create_task(client(name).acquire(timeout=0))
            await turns()
        else:
            task = asyncio.create_task(body())
            if leaves == "a wait":
                await until(lambda: tickets_of(client))
            else:
                await entered.wait()
            server.freeze()
        try:
            leaving = task
            if leaves == "a client":
                leaving = asyncio.create_task(client.aclose())
            else:
                task.cancel()
                if leaves != "a body":
                    await asyncio.wait({task})
                    leaving = asyncio.create_task(client.aclose())
            await turns()
            clock.advance(2.9)
            await turns()
            assert not leaving.done()
            clock.advance(0.2)
            await asyncio.wait({leaving}, timeout=5.0)
            assert leaving.done()
        finally:
            server.thaw()
            task.cancel()
            await asyncio.wait({task})
            await client.aclose()
        if leaves == "a wait":
            await theirs.release()


@pytest.mark.parametrize("alive", [True, False])
async def test_a_loop_that_is_blocked_again_and_again_is_no_outage(
    server: Server, name: str, alive: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The replies to many releases are not read while the loop is blocked between any two checks, as in asyncio's debug
    mode: no warning says that they failed. A server that has sent nothing is dropped at the second check."""
    clock, store = FakeClock(), RedisStore(server.url)
    store.clock = clock  # type: ignore[assignment]
    async with Redlock(store) as redlock:
        leases = [await redlock(f"{name}:{i}").acquire(timeout=None) for i in range(300)]
        node = nodes_of(redlock)[0]
        connection = connection_of(node)
        server.freeze()
        releases = [asyncio.create_task(lease.release()) for lease in leases]
        while len(unanswered(connection)) < len(leases) or unsent(connection):
            await asyncio.sleep(0)
        if alive:
            server.thaw()
            assert select.select([socket_of(connection).fileno()], [], [], LIMIT)[0]
        for _ in range(5):
            clock.block(9.0)  # longer than a node timeout, and than commands may wait
            clock.advance(0.0)  # the timers that are due run; nothing has been read
        assert (connection_of(node) is connection) is alive
        await asyncio.gather(*releases)
        assert (connection_of(node) is connection) is alive
        assert bool(caplog.records) is not alive
        server.thaw()


async def test_c10_a_frozen_server_is_found_by_a_process_without_free_descriptors(server: Server, name: str) -> None:
    """As where a program leaks sockets: the caller gets its error, and does not wait for good."""
    async with Redlock(server.url, node_timeout=0.3) as client:
        async with client(name):
            pass
        server.freeze()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            with pytest.raises(QuorumUnavailable):
                async with asyncio.timeout(LIMIT):
                    await client(name).acquire(timeout=0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        server.thaw()


async def test_a_look_at_a_frozen_server_says_what_is_wrong(server: Server, name: str) -> None:
    """inspect waits for a second, or for the node timeout if that is more, and names the server."""
    async with Redlock(server.url, lease=3.0) as redlock, Redlock(server.url, lease=12.0) as patient:
        await patient.inspect(name)
        server.freeze()
        with pytest.raises(QuorumUnavailable, match=r"\.sock did not answer within 1 s"):
            await redlock.inspect(name)
        with pytest.raises(QuorumUnavailable, match=r"\.sock did not answer within 1\.2 s"):
            await patient.inspect(name)
        server.thaw()
