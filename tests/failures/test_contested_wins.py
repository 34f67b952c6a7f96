"""A hold that other attempts have kept from some nodes reaches those nodes before its first renewal."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from asynclock import Lease, Redlock
from tests.support.default_keys import key_of
from tests.support.probes import hold_of
from tests.support.servers import Server
from tests.support.waiters import holder, until, urls_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LASTING: Any = {"lease": 600.0, "max_lease": 600.0, "node_timeout": 5.0}
"""No lease ends, and none is renewed, while a test waits."""

pytestmark = pytest.mark.both_loops("the loop orders the replies")


@asynccontextmanager
async def taken(servers: Sequence[Server], name: str) -> AsyncIterator[None]:
    """Another attempt has the name at these servers, and is undone late: at the end of the block."""
    async with AsyncExitStack() as stack:
        for each in servers:
            client = await stack.enter_async_context(Redlock(each.url, **LASTING))
            await stack.enter_async_context(client(name))
        yield


async def won(client: Redlock, name: str) -> Lease:
    lease = await client(name).acquire(timeout=0)
    assert lease is not None
    return lease


def has_it(servers: Sequence[Server], name: str, lease: Lease) -> list[bool]:
    """Of each server, whether it has that hold."""
    return [hold_of(lease).op.id.encode() in holder(each, name) for each in servers]


@pytest.mark.parametrize("extended", [False, True])
async def test_a_contested_win_reaches_each_node(five: Sequence[Server], name: str, extended: bool) -> None:
    """Two of five nodes refused it. Each has it soon after the other attempts are undone, which is late; not only with
    the first renewal, and also if the program has extended it before. Its release reaches them, too."""
    async with Redlock(*urls_of(five), **LASTING) as client:
        async with taken(five[3:], name):
            lease = await won(client, name)
            assert has_it(five, name, lease) == [True, True, True, False, False]
            if extended:
                await lease.extend()
        await until(lambda: all(has_it(five, name, lease)))
        await lease.release()
        await until(lambda: not any(holder(each, name) for each in five))


async def test_a_minority_that_forgets_lets_nobody_in(five: Sequence[Server], name: str) -> None:
    """Two of the three nodes that granted a contested win lose all data. The hold is at a majority still, since the
    others have got it meanwhile."""
    async with Redlock(*urls_of(five), **LASTING) as client, Redlock(*urls_of(five), **LASTING) as other:
        await other.health()
        async with taken(five[3:], name):
            lease = await won(client, name)
        await until(lambda: all(has_it(five, name, lease)))
        for each in five[:2]:
            with each.cli() as cli:
                cli.flushall()
        assert await other(name).acquire(timeout=0) is None
        assert lease.held


async def test_an_adopted_hold_reaches_each_node(five: Sequence[Server], name: str) -> None:
    """Two of five nodes have lost it before the adoption, which they refused."""
    async with Redlock(*urls_of(five), **LASTING) as giver, Redlock(*urls_of(five), **LASTING) as taker:
        lease = await won(giver, name)
        await until(lambda: all(has_it(five, name, lease)))
        handle = await lease.detach()
        for each in five[:2]:
            with each.cli() as cli:
                cli.delete(key_of(name))
        adopted = await taker.adopt(handle)
        await until(lambda: all(has_it(five, name, adopted)))
        await adopted.release()
        await until(lambda: not any(holder(each, name) for each in five))
