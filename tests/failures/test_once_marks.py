"""The mark that a run of `once` leaves reaches the nodes that did not have its hold."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import pytest

from asynclock import Redlock, Skipped
from asynclock.rules.model import DONE
from asynclock.runtime import shutdown
from tests.support.default_keys import key_of
from tests.support.far_servers import FarProxy
from tests.support.probes import marks_under_way
from tests.support.servers import Server
from tests.support.still_clock import Still, turns
from tests.support.waiters import LIMIT, PATIENT, holder, until, urls_of

LASTING: Any = {"lease": 600.0, "max_lease": 600.0, "trust_restarts": True}
"""No lease ends, and none is renewed, while a test waits. A server that restarts votes at once, as one does after its
quarantine."""

NAMES = 20


@contextmanager
def taken(servers: Sequence[Server], name: str) -> Iterator[None]:
    """Another attempt has the name at these servers, and is undone late: at the end of the block."""
    for each in servers:
        with each.cli() as cli:
            cli.set(key_of(name), "another's", px=600_000)
    yield
    forget(servers, name)


def run_of(client: Redlock, name: str, runs: list[str]) -> Callable[[], Awaitable[str | Skipped]]:
    """A function that notes its run."""

    async def work() -> str:
        runs.append(name)
        return "it ran"

    return client.once(name, within=3600)(work)


def marked(servers: Sequence[Server], name: str) -> list[bool]:
    """Of each server, whether it has the mark."""
    return [holder(each, name) == DONE.encode() for each in servers]


def forget(servers: Sequence[Server], name: str) -> None:
    """An operator deletes the key there."""
    for each in servers:
        with each.cli() as cli:
            cli.delete(key_of(name))


@pytest.mark.parametrize("nodes", [3, 5])
async def test_d13_a_run_with_a_bare_majority_is_not_repeated(five: Sequence[Server], name: str, nodes: int) -> None:
    """The other nodes refused its hold, and its release. Then one server of its majority restarts empty."""
    servers, runs = five[:nodes], list[str]()
    bare = nodes // 2 + 1
    async with Redlock(*urls_of(servers), **LASTING) as client:
        with taken(servers[bare:], name):
            assert await run_of(client, name, runs)() == "it ran"
            assert marked(servers, name) == [True] * bare + [False] * (nodes - bare)
        await until(lambda: all(marked(servers, name)))
    servers[0].restart()
    async with Redlock(*urls_of(servers), **LASTING) as late:
        assert await run_of(late, name, runs)() is Skipped.DONE
    assert runs == [name]


async def test_d13_a_run_that_ends_at_a_minority_splits_no_votes(five: Sequence[Server], name: str) -> None:
    """Two servers have lost the key of its hold as it returns, and one of the other three dies. The marks of two
    servers of five would let nobody in, and tell nobody why."""
    async with Redlock(*urls_of(five), **LASTING, **PATIENT) as client:

        async def work() -> None:
            forget(five[2:4], name)
            five[4].kill()

        await client.once(name, within=3600)(work)()
        await until(lambda: all(marked(five[:4], name)))
        assert await run_of(client, name, [])() is Skipped.DONE


async def test_d13_clients_at_different_distances(five: Sequence[Server], name: str) -> None:
    """Each of three clients is near to other servers, and all want the same names at the same time: most wins are
    contested. After one server has restarted empty, no name runs again."""
    names, runs = [f"{name}:{number}" for number in range(NAMES)], list[str]()
    async with AsyncExitStack() as stack:
        clients = []
        for number in range(3):
            proxies = [
                await stack.enter_async_context(FarProxy(each.path.with_suffix(f".far{number}"), each.path))
                for each in five
            ]
            client = await stack.enter_async_context(Redlock(*(each.url for each in proxies), **LASTING))
            await client.health()
            for index, each in enumerate(proxies):
                each.way = 0.001 + 0.004 * ((index + 2 * number) % 5)
            clients.append(client)
        await asyncio.gather(*(run_of(client, each, runs)() for each in names for client in clients))
        async with asyncio.timeout(LIMIT):
            while any(marks_under_way(client) for client in clients):
                await asyncio.sleep(0.005)
        five[0].restart()
        late = await stack.enter_async_context(Redlock(*urls_of(five), **LASTING))
        assert {await run_of(late, each, runs)() for each in names} == {Skipped.DONE}
    assert sorted(runs) == sorted(names)


async def test_a_client_that_closes_takes_the_marks_along(
    five: Sequence[Server], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It closes right after the run has returned. Two nodes lacked the hold by then."""
    monkeypatch.setattr(shutdown, "MARKS", LIMIT)  # a busy machine needs more than a moment
    async with Redlock(*urls_of(five), **LASTING) as client:

        async def work() -> None:
            forget(five[3:], name)

        await client.once(name, within=3600)(work)()
    assert all(marked(five, name))


async def test_a_node_that_hangs_during_the_release_gets_the_mark(five: Sequence[Server], name: str) -> None:
    """It answers again later, and lacked the hold."""
    async with Redlock(*urls_of(five), node_timeout=0.2, **LASTING) as client:

        async def work() -> None:
            forget(five[4:], name)
            five[4].freeze()

        try:
            await client.once(name, within=3600)(work)()
            await asyncio.sleep(0.3)  # the release is overdue there
        finally:
            five[4].thaw()
        await until(lambda: all(marked(five, name)))


async def test_no_mark_outlives_a_break(five: Sequence[Server], name: str) -> None:
    """An operator breaks the name through the client that has run it, while two nodes lack the mark."""
    runs = list[str]()
    async with Redlock(*urls_of(five), **LASTING) as client:
        with taken(five[3:], name):
            await run_of(client, name, runs)()
            assert marks_under_way(client)
            assert await client.break_lock(name)
            assert not marks_under_way(client)
        assert not any(holder(each, name) for each in five)
        assert await run_of(client, name, runs)() == "it ran"


@pytest.mark.parametrize("ends", [True, False])
async def test_a_client_that_closes_waits_a_moment_for_another_attempt(name: str, ends: bool) -> None:
    """For 0.2 s at most. If the attempt ends in that time, its node gets the mark."""
    still, runs = Still(3, name), list[str]()
    async with Redlock(still.stores[2]) as rival:
        attempt = await rival(name).acquire(timeout=None)
        client = still.client()
        assert await run_of(client, name, runs)() == "it ran"
        closing = asyncio.create_task(client.aclose())
        await turns()
        assert not closing.done()
        if ends:
            await attempt.release()
        still.clock.advance(0.21)
        async with asyncio.timeout(LIMIT):
            await closing
        if not ends:
            await attempt.release()
        assert await run_of(rival, name, runs)() == (Skipped.DONE if ends else "it ran")
