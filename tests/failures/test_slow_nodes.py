"""Nodes that answer late to the attempt that won without them: what is still to be undone there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asynclock import Lease, Redlock
from asynclock.stores.redis import handlers as _handlers
from tests.support.default_keys import key_of
from tests.support.probes import clock_of, connection_of, grant_of, nodes_of, tickets_of, unanswered
from tests.support.servers import Server
from tests.support.still_clock import idle
from tests.support.waiters import LIMIT, LONG, in_queue, until, urls_of

STRANGER = "another program's"


@asynccontextmanager
async def waited_for(
    some: list[Server], name: str, **options: Any
) -> AsyncIterator[tuple[Lease, Redlock, asyncio.Task[Lease]]]:
    """The lease of a client, another client that waits for it, and its task."""
    async with Redlock(*urls_of(some), lease=LONG) as first, Redlock(*urls_of(some), lease=LONG, **options) as second:
        lease = await first(name).acquire(timeout=None)
        waiting = asyncio.create_task(second(name).acquire(timeout=None))
        await until(lambda: in_queue(some, name, 1)() and idle(second))
        yield lease, second, waiting


@pytest.mark.usefixtures("no_looks")
async def test_a_late_undo_delays_no_other_command(servers: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three is frozen. The attempt that wins without it, an acquire that hangs on its silence, and the ticket's
    release that follows the first are out one after the other: each fails at its own deadline."""
    monkeypatch.setattr(_handlers, "_SILENCE", LIMIT)  # else a slow test finds its connection lost
    some = [servers.start() for _ in range(3)]
    async with waited_for(some, name, node_timeout=3.0) as (lease, client, waiting):
        with some[0].cli() as cli:
            cli.set(key_of(f"{name}:other"), STRANGER)
        some[2].freeze()
        (ticket,) = tickets_of(client)
        await lease.release()
        got = await waiting
        attempt = grant_of(got)
        await until(lambda: clock_of(client).now() > (attempt.sent + attempt.deadline) / 2)
        assert await client(f"{name}:other").acquire(timeout=0) is None
        waiting_there = unanswered(connection_of(nodes_of(client)[2]))
        ops = [handler.op for handler in waiting_there if hasattr(handler, "op")]
        assert any(op.id.startswith(ticket) for op in ops)  # the last one's time is not up
        some[2].thaw()
        await got.release()


async def test_a_client_that_closes_withdraws_its_ticket_everywhere(servers: Any, name: str) -> None:
    """One of three is frozen, where another program has the name. The client that wins without it releases and closes
    at once."""
    some = [servers.start() for _ in range(3)]
    async with waited_for(some, name, node_timeout=5.0) as (lease, client, waiting):
        with some[2].cli() as cli:
            cli.set(key_of(name), STRANGER)
        some[2].freeze()
        releasing = asyncio.create_task(lease.release())
        got = await waiting
        await got.release()
        await client.aclose()
        some[2].thaw()
        await releasing
        await until(in_queue(some, name, 0))
