"""Commands that a server refused, or for which it had forgotten the script: they are done all the same, or not at all,
never half and never late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from asynclock import Lease, Redlock
from asynclock.rules.model import ID_LENGTH, Entry, Op, Verb
from asynclock.stores.port import NodeConfig, Notice, ReplyHandler
from asynclock.stores.transactional import TransactionalNode
from tests.support.default_keys import key_of
from tests.support.fake_clock import FakeClock
from tests.support.memory_probes import set_state
from tests.support.probes import acquisitions_of, ballot_of, deliver_notice, grant_of, reconnected, tickets_of
from tests.support.proxied_clients import behind_proxies, forget, learn, unknown, whole
from tests.support.servers import Server
from tests.support.still_clock import Memory, Still, idle, turns
from tests.support.user_store import state_of
from tests.support.waiters import LIMIT, LONG, holder, in_queue, until, urls_of

# -- a server that is no master for a while --------------------------------------------------------------------------


@pytest.mark.parametrize("waited_for", [False, True])
async def test_a_release_that_a_replica_refused(server: Server, name: str, waited_for: bool) -> None:
    """The server was made a replica, and refuses the release, by its own command or by the script. Once it is a master
    again the release is delivered, and the name is free long before the lease ends."""
    async with Redlock(server.url, lease=LONG) as client, Redlock(server.url, lease=LONG) as other:
        lease = await client(name).acquire(timeout=None)
        if waited_for:  # then it takes the script
            waiting = asyncio.create_task(other(name).acquire(timeout=None))
            await until(lambda: in_queue([server], name, 1)() and idle(other))
            waiting.cancel()
            await asyncio.wait({waiting})
            await until(in_queue([server], name, 0))
        with server.cli() as cli:
            cli.replicaof("127.0.0.1", "1")
            await lease.release()
            assert cli.exists(key_of(name))
            cli.replicaof("NO", "ONE")
        await until(lambda: not holder(server, name))


async def test_a_replica_is_not_stormed(server: Server, name: str) -> None:
    """While it goes on refusing, the client connects to it again with pauses that grow: in half a second a few
    times."""
    async with Redlock(server.url, lease=LONG) as client:
        lease = await client(name).acquire(timeout=None)
        with server.cli() as cli:
            cli.replicaof("127.0.0.1", "1")
            before = connections(server)
            await lease.release()
            await asyncio.sleep(0.5)
            assert connections(server) - before <= 25
            cli.replicaof("NO", "ONE")
        await until(lambda: not holder(server, name))


def connections(server: Server) -> int:
    """How many connections the server has accepted."""
    with server.cli() as cli:
        stats: Any = cli.info("stats")
    return int(stats["total_connections_received"])


async def test_a_majority_refuses_a_release(five: list[Server], name: str) -> None:
    """Over five nodes: three were replicas for a moment. All of them get the release in the end."""
    async with Redlock(*urls_of(five), lease=LONG) as client:
        lease = await client(name).acquire(timeout=None)
        for server in five[:3]:
            with server.cli() as cli:
                cli.replicaof("127.0.0.1", "1")
        await lease.release()
        assert all(holder(server, name) for server in five[:3])
        for server in five[:3]:
            with server.cli() as cli:
                cli.replicaof("NO", "ONE")
        await until(lambda: not any(holder(server, name) for server in five))


# -- servers that forget the script ----------------------------------------------------------------------------------


def notify_in_vain(client: Redlock, name: str, nodes: int) -> None:
    """All nodes notify the waiters of this client, though nothing has become free."""
    (whose,) = tickets_of(client)
    for index in range(nodes):
        deliver_notice(client, index, Notice(whose[:ID_LENGTH], 1, name=name))


async def test_a_renewal_sent_again_after_the_leave(servers: Any, name: str) -> None:
    """Three servers have lost the script as a ticket is renewed. Another client loads it, the waiter is cancelled, and
    its leaving is carried out; only then comes the reply that the renewal met no script. It is sent again, and leaves
    no ticket."""
    some = [servers.start() for _ in range(3)]
    async with (
        Redlock(*urls_of(some), lease=LONG) as first,
        behind_proxies(some, lease=LONG, node_timeout=5.0) as (second, proxies),
    ):
        lease = await first(name).acquire(timeout=None)
        waiting = asyncio.create_task(second(name).acquire(timeout=None))
        await until(lambda: in_queue(some, name, 1)() and idle(second))
        for server, proxy in zip(some, proxies, strict=True):
            forget(server)
            proxy.hold_replies()
        reconnected(second, 0)
        await until(lambda: all(unknown(server) for server in some))
        for server in some:
            learn(server)
        waiting.cancel()
        await asyncio.wait({waiting})
        await until(in_queue(some, name, 0))
        for proxy in proxies:
            proxy.let_go()
        await until(lambda: all(whole(server) for server in some))
        await second.health()  # behind all that was sent
        assert in_queue(some, name, 0)()
        await lease.release()


async def test_an_undo_sent_again_after_the_leave(servers: Any, name: str) -> None:
    """One of three nodes grants an attempt, so it is undone there, and its ticket stored again; but that server has
    lost the script. Before the reply says so, the waiter is cancelled and has left. The undo is sent again: it deletes
    the hold, and stores no ticket."""
    some = [servers.start() for _ in range(3)]
    odd = some[0]
    async with (
        Redlock(*urls_of(some), lease=LONG) as first,
        behind_proxies(some, lease=LONG, node_timeout=5.0) as (second, proxies),
    ):
        lease = await first(name).acquire(timeout=None)
        waiting = asyncio.create_task(second(name).acquire(timeout=None))
        await until(lambda: in_queue(some, name, 1)() and idle(second))
        ours = holder(odd, name)
        with odd.cli() as cli:
            cli.delete(key_of(name))
        for proxy in proxies:
            proxy.hold_replies()
        notify_in_vain(second, name, 3)
        await until(lambda: holder(odd, name) not in (b"", ours))
        forget(odd)
        for proxy in proxies[1:]:
            proxy.let_go()
        await until(lambda: unknown(odd))
        learn(odd)
        waiting.cancel()
        await asyncio.wait({waiting})
        await until(in_queue(some, name, 0))
        proxies[0].let_go()
        await until(lambda: whole(odd))
        await second.health()
        assert in_queue(some, name, 0)()
        assert not holder(odd, name)
        await lease.release()


class Forgetful(Memory):
    """A store without the script for tickets while it `forgets`: they are sent again later, with their state at that
    time. Later commands find the script loaded."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.forgets = False
        self.fails = False  # the outcome of each command is unknown
        self.late: list[tuple[str, Op, Callable[[list[object]], object]]] = []

    def open(self, config: NodeConfig) -> TransactionalNode:
        return Failing(self, config)

    def decide(self, key: str, op: Op, answer: Callable[[list[object]], object]) -> None:
        if self.forgets and op.queueing.number:
            self.late.append((key, op, answer))
        else:
            super().decide(key, op, answer)

    def resend(self) -> int:
        """Send again all commands that may be sent again; one that was undone may not (rule 5 of a node). Returns their
        number."""
        self.forgets = False
        late, self.late = [each for each in self.late if not each[1].revoked], []
        for key, op, answer in late:
            super().decide(key, op, answer)
        return len(late)


class Failing(TransactionalNode):
    def __init__(self, store: Forgetful, config: NodeConfig) -> None:
        super().__init__(store, config)
        self._forgetful = store

    def send(self, op: Op, handler: ReplyHandler) -> None:
        if self._forgetful.fails:
            error = ConnectionError("it disconnected")
            asyncio.get_running_loop().call_soon(partial(handler.fail, self._index, error, maybe=True))
        else:
            super().send(op, handler)


class Waiter(Still):
    """A task that waits for a name that another client holds at five such stores."""

    def __init__(self, name: str) -> None:
        super().__init__(5, name)
        self.all = [Forgetful(self.clock) for _ in range(5)]
        self.stores = list(self.all)

    @asynccontextmanager
    async def waits(self) -> AsyncIterator[tuple[Lease, Redlock, asyncio.Task[Lease]]]:
        """The holder's lease, the waiting client, and the lock that it waits for."""
        async with self.held(lease=60.0) as (_, lease), self.client(lease=30.0) as other:
            waiting = asyncio.create_task(other(self.name).acquire(timeout=None))
            await turns(20)
            assert idle(other)
            yield lease, other, waiting
            waiting.cancel()
            await asyncio.wait({waiting})

    def tickets(self) -> list[int]:
        """The stores at which there is a ticket."""
        return [index for index, store in enumerate(self.all) if state_of(store, self.name).queue]


@pytest.mark.parametrize("late", ["yes", "no", "nothing"])
async def test_answers_that_come_after_the_attempt_was_won(name: str, late: str) -> None:
    """Two of five servers lose the script as the last attempt comes, which wins without them; so it is sent again
    there. Where they grant it, no ticket is left and nothing more is sent to them. Where they refuse, or disconnect, it
    is undone."""
    waiter = Waiter(name)
    slow = waiter.all[3:]
    async with waiter.waits() as (lease, _, waiting):
        for store in slow:
            store.forgets = True
        await lease.release()
        async with asyncio.timeout(LIMIT):
            got = await waiting
        await turns()
        assert waiter.tickets() == [3, 4]
        for index, store in enumerate(slow, 3):
            store.asked.clear()
            if late == "no":
                stranger = Entry(f"{'f' * ID_LENGTH}|1|a stranger", None)
                set_state(store, name, replace(state_of(store, name), holds=(stranger,)))
            if late == "nothing":
                grant_of(got).fail(index, ConnectionError("it disconnected"), maybe=True)
            else:
                assert store.resend() == 1
        await turns()
        assert not waiter.tickets()
        again = [Verb.RELEASE] if late != "yes" else []
        assert [[verb for verb, _ in store.asked if verb is Verb.RELEASE] for store in slow] == [again, again]
        await got.release()


async def test_a_renewal_sent_again_after_the_attempt_that_won(name: str) -> None:
    """One of five loses the script as the ticket is renewed there, and has it back as the attempt comes that wins. Then
    the renewal is sent again: it leaves no ticket."""
    waiter = Waiter(name)
    odd = waiter.all[4]
    async with waiter.waits() as (lease, other, waiting):
        odd.forgets = True
        reconnected(other, 4)
        (waits,) = acquisitions_of(other)
        waiter.clock.advance(0.1)
        await turns()
        assert odd.late
        ballot_of(waits).fail(4, ConnectionError("it says nothing"), maybe=True)
        await turns(20)
        assert idle(other)
        odd.forgets = False
        await lease.release()
        async with asyncio.timeout(LIMIT):
            got = await waiting
        assert odd.resend() == 1
        await turns()
        assert not waiter.tickets()
        await got.release()


async def test_a_split_attempt_undone_again_after_the_leave(name: str) -> None:
    """Two of five nodes grant the attempt, two refuse, and one does not answer: so it is undone at three, and its
    ticket stored there again. One that granted it has lost the script; the waiter leaves before that undo is sent
    again."""
    waiter = Waiter(name)
    async with waiter.waits() as (_, other, waiting):
        free, odd, unsure = waiter.all[2:]
        for store in free, odd:
            set_state(store, name, replace(state_of(store, name), holds=(), marked=False))
        unsure.fails = True
        notify_in_vain(other, name, 5)
        await until_held(odd, name)
        odd.forgets = True
        await turns(20)
        assert idle(other)
        unsure.fails = False
        waiting.cancel()
        await asyncio.wait({waiting})
        await turns()
        assert not waiter.tickets()
        assert odd.resend() == 1
        assert not waiter.tickets()
        assert not state_of(odd, name).holds


async def until_held(store: Memory, name: str) -> None:
    """Turn by turn, so that the next step comes after it."""
    async with asyncio.timeout(LIMIT):
        while not state_of(store, name).holds:
            await asyncio.sleep(0)
