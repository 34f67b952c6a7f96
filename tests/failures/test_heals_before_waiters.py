"""A node that has lost a hold gets it again before the waiters at that node, and never beside another holder
(HAZARDS D3)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from asynclock import Lease, Lock, Redlock
from tests.support.cancelled_waits import sent
from tests.support.default_keys import key_of, keys_of
from tests.support.probes import id_of
from tests.support.proxy import KeepingProxy
from tests.support.servers import Server, Servers
from tests.support.waiters import LIMIT, LONG, holder, in_queue, until, urls_of

OPTIONS: dict[str, Any] = {"lease": LONG, "trust_restarts": True, "node_timeout": 5.0}
"""Of a client that takes a vote from a restarted server at once. On a busy machine no node counts as silent."""


class Held(NamedTuple):
    """A hold of one or two names, and a waiter for one of them."""

    holds: Callable[[Redlock, str], Lock]
    waits: Callable[[Redlock, str], Lock]
    shared: bool  # the hold of the name that is waited for is a sorted set


KINDS = {
    "read": Held(lambda client, name: client.read(name), lambda client, name: client.write(name), shared=True),
    "multi with a fair part": Held(
        lambda client, name: client.multi(f"{name}:more", client(name, fair=True)),
        lambda client, name: client(name, fair=True),
        shared=False,
    ),
    "multi with a read part": Held(
        lambda client, name: client.multi(f"{name}:more", client.read(name)),
        lambda client, name: client.write(name),
        shared=True,
    ),
}


def readers(server: Server, name: str) -> list[bytes]:
    """The ids that hold a sorted set there."""
    with server.cli() as cli:
        found: Any = cli.zrange(key_of(name), 0, -1)
    return list(found)


def has_it(server: Server, kind: Held, name: str, lease: Lease) -> bool:
    """Whether that hold, and no other, is at the server."""
    found = readers(server, name) if kind.shared else [holder(server, name)]
    return [each[:32] for each in found] == [id_of(lease)[:32].encode()]


async def renewed(lease: Lease, client: Redlock) -> None:
    """It is renewed, and each node has answered what followed from that."""
    await lease.extend()
    await sent([client])  # each node has answered the renewal
    await sent([client])  # and the heal, which that answer may have caused


@pytest.mark.timeout(120)
@pytest.mark.parametrize("loss", ["deleted", "restarted"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
async def test_d3_a_hold_that_others_wait_for_outlives_rolling_losses(
    five: list[Server], name: str, kind: Held, loss: str
) -> None:
    """Each of three nodes loses the hold, one after the other: its keys are deleted, or it restarts empty. The ticket
    of a waiter is there as the hold is renewed. Each node has the hold again by its next renewals, so it is never lost,
    and the waiter gets the name with the release."""
    some = five[:3]
    async with Redlock(*urls_of(some), **OPTIONS) as client, Redlock(*urls_of(some), **OPTIONS) as other:
        lease = await kind.holds(client, name).acquire(timeout=None)
        await sent([client, other])
        waiting = asyncio.create_task(kind.waits(other, name).acquire(timeout=None))
        await until(in_queue(some, name, 1))
        for server in some:
            if loss == "restarted":
                server.restart()
            else:
                with server.cli() as cli:
                    cli.delete(key_of(name), key_of(f"{name}:more"))
            await until(in_queue([server], name, 1))
            async with asyncio.timeout(LIMIT):
                while not has_it(server, kind, name, lease):  # an attempt of the waiter may be there for a moment
                    await renewed(lease, client)
        assert lease.held
        assert not waiting.done()
        await lease.release()
        async with asyncio.timeout(LIMIT):
            await (await waiting).release()


async def test_d3_a_reader_is_not_healed_beside_a_writer(five: list[Server], name: str) -> None:
    """A node has lost a reader's hold, and a writer has taken the name at this node. The reader's renewals leave the
    writer alone there. Once it has left, the reader gets its hold back before another writer that waits."""
    some, odd = five[:3], five[0]
    async with (
        Redlock(*urls_of(some), **OPTIONS) as client,
        Redlock(*urls_of(some), **OPTIONS) as other,
        Redlock(odd.url, lease=LONG) as alone,
    ):
        lease = await client.read(name).acquire(timeout=None)
        await sent([client, other])
        with odd.cli() as cli:
            cli.delete(key_of(name))
        writer = await alone.write(name).acquire(timeout=0)
        assert writer is not None
        waiting = asyncio.create_task(other.write(name).acquire(timeout=None))
        await until(in_queue(some, name, 1))
        for _ in range(3):
            await renewed(lease, client)
            assert readers(odd, name) == [id_of(writer).encode()]
            assert lease.held
        with odd.cli() as cli:  # the writer expires: its release would wake the writer that waits
            cli.delete(key_of(name))
        await renewed(lease, client)
        assert readers(odd, name) == [id_of(lease).encode()]
        assert not waiting.done()
        await lease.release()
        async with asyncio.timeout(LIMIT):
            await (await waiting).release()


async def test_c3_a_heal_that_a_server_reads_after_the_release_is_refused(servers: Servers, name: str) -> None:
    """The third server gets the heal of a reader so late that the release came before it, over another connection. The
    release left a tombstone, so the heal takes nothing, although it does not wait behind the queue."""
    some = servers.start_together(3)
    odd = some[2]
    async with (
        KeepingProxy(odd.path.with_suffix(".p"), odd.path) as proxy,
        Redlock(some[0].url, some[1].url, proxy.url, **OPTIONS) as client,
    ):
        lease = await client.read(name, renew=False).acquire(timeout=None)
        assert lease is not None
        await sent([client])
        with odd.cli() as cli:
            cli.delete(key_of(name))
        proxy.keep(b"acquire")
        await lease.extend()
        async with asyncio.timeout(LIMIT):
            await proxy.has_kept.wait()
        proxy.cut()
        await lease.release()
        await sent([client])
        with odd.cli() as cli:
            assert cli.exists(keys_of(name).undone + id_of(lease)[:32])
        assert await proxy.arrives() == b"*1\r\n:-1\r\n"
        assert readers(odd, name) == []
