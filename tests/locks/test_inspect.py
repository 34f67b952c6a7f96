"""inspect and holders for operators, on every deployment and both loops."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable

import pytest

from asynclock import ConfigError, Holder, Lock, QuorumUnavailable, Redlock, Waiter
from asynclock.locks import admin
from asynclock.locks.admin import merged_waiters
from asynclock.protocol.causes import note_of
from asynclock.rules.model import DONE, RESTING
from asynclock.stores.port import NodeView, WaiterView
from tests.support.default_keys import key_of
from tests.support.servers import Server
from tests.support.waiters import LIMIT, LONG, back


async def names_of(client: Redlock, prefix: str) -> list[str]:
    """The names of all that is held."""
    return sorted([holder.name async for holder in client.holders(prefix)])


async def waiting(client: Redlock, name: str, count: int) -> None:
    """Until so many wait."""
    async with asyncio.timeout(20):
        while sum(waiter.tasks for waiter in (await client.inspect(name)).waiters) != count:
            await asyncio.sleep(0.005)


async def once(lock: Lock) -> None:
    """Hold it for a moment."""
    async with lock:
        pass


@pytest.mark.every_store
async def test_inspect_shows_holder_and_waiters(make: Callable[..., Redlock], name: str) -> None:
    """The holder's host, process, note and times; the process that waits, with the time of the first of its clients;
    and the view of each node."""
    client, began = make(), time.time()
    async with make(node_timeout=5.0)(name, metadata="nightly|run 7", lease=LONG) as lease:
        tasks = []
        for count in (1, 2):
            second = time.time()
            tasks.append(asyncio.create_task(make()(name, metadata=str(count)).acquire(timeout=30)))
            await waiting(client, name, count)
        async with asyncio.timeout(LIMIT):  # a majority was enough for the lease
            info = await client.inspect(name)
            while not all("held by" in said for said in info.nodes.values()):
                info = await client.inspect(name)
        (holder,) = info.holders
        assert (info.name, info.kind, info.fence) == (name, "mutex", lease.fence)
        assert (holder.host, holder.pid) == (socket.gethostname(), os.getpid())
        assert holder.metadata == "nightly|run 7"
        assert began - 1 <= holder.since <= time.time() + 1
        assert holder.remaining is not None
        assert LONG / 2 < holder.remaining <= LONG
        (waiter,) = info.waiters
        assert (waiter.host, waiter.pid, waiter.tasks) == (holder.host, holder.pid, 2)
        assert holder.since < waiter.since < second
    for task in tasks:
        lease_or_none = await task
        assert lease_or_none is not None
        await lease_or_none.release()


async def test_inspect_of_a_free_name(redlock: Redlock, name: str) -> None:
    """No holder, no kind, and no token yet."""
    await back(redlock)
    info = await redlock.inspect(name)
    assert (info.kind, info.fence, info.holders, info.waiters) == ("", 0, (), ())
    assert all(said.startswith("free") for said in info.nodes.values())


async def test_a_name_that_rests_is_shown_as_such(redlock: Redlock, name: str) -> None:
    """It is released, and taken still."""
    async with redlock(name, min_hold=20):
        pass
    (holder,) = (await redlock.inspect(name)).holders
    assert holder.metadata == "(resting)"


async def test_a_name_whose_run_returned_is_shown_as_done(redlock: Redlock, name: str) -> None:
    """Operators can tell it from a min_hold."""

    @redlock.once(name, within=20)
    async def work() -> None: ...

    await work()
    (holder,) = (await redlock.inspect(name)).holders
    assert holder.metadata == "(done)"


@pytest.mark.every_store
async def test_holders_lists_the_held_names(redlock: Redlock, name: str) -> None:
    """Each name once, without free names, names with another prefix, and the library's own keys."""
    async with redlock(f"{name}:a"), redlock(f"{name}:b*"), redlock(f"x{name}"):
        async with redlock(f"{name}:c"):
            pass
        assert await names_of(redlock, f"{name}:") == [f"{name}:a", f"{name}:b*"]
        assert await names_of(redlock, f"{name}:b*") == [f"{name}:b*"]
        assert await names_of(redlock, f"{name}:*") == []
        assert f"x{name}" in await names_of(redlock, "")
    assert await names_of(redlock, f"{name}:") == []


async def test_a_key_without_expiry_is_shown(server: Server, name: str) -> None:
    """An old program left it. Its value is not shown, since it may be a secret."""
    with server.cli() as cli:
        cli.set(key_of(name), "an old program's token")
    async with Redlock(server.url) as client:
        assert [holder async for holder in client.holders(name)] == [Holder(name, "", 0, 0.0, None, "")]
        info = await client.inspect(name)
    assert info.holders == (Holder(name, "", 0, 0.0, None, ""),)
    assert "without an expiry" in info.nodes[next(iter(info.nodes))]
    assert "token" not in repr(info)


@pytest.mark.every_store
async def test_a_process_that_waits_has_one_entry_with_its_tasks(make: Callable[..., Redlock], name: str) -> None:
    """Those of all its clients. The tasks in a local queue count when their client sends its ticket: here at the second
    round, after the first was refused."""
    client, other = make(lease=3.0), make(lease=3.0)
    async with make()(name):
        tasks = [asyncio.create_task(once(each(name))) for each in (client, client, client, other)]
        async with asyncio.timeout(20):
            info = await other.inspect(name)
            while not all("4 wait" in said for said in info.nodes.values()):
                await asyncio.sleep(0.01)
                info = await other.inspect(name)
        assert [(waiter.pid, waiter.tasks) for waiter in info.waiters] == [(os.getpid(), 4)]
    await asyncio.gather(*tasks)


async def test_the_tasks_of_a_shared_kind_have_one_entry(make: Callable[..., Redlock], name: str) -> None:
    """Each of them has a ticket of its own, and the entry counts them."""
    client = make()
    async with make().write(name):
        tasks = [asyncio.create_task(once(client.read(name))) for _ in range(3)]
        await waiting(client, name, 3)
        (waiter,) = (await client.inspect(name)).waiters
        assert (waiter.pid, waiter.tasks) == (os.getpid(), 3)
    await asyncio.gather(*tasks)


@pytest.mark.every_store
async def test_inspect_counts_the_free_permits(make: Callable[..., Redlock], name: str) -> None:
    """Of the largest number of permits among the holders. None while nobody holds it, and of other kinds."""
    client = make()
    assert (await client.inspect(name)).free is None
    async with client.semaphore(name, 2):
        assert (await client.inspect(name)).free == 1
        async with client.semaphore(name, 5):
            assert (await client.inspect(name)).free == 3
        async with client.semaphore(name, 2):
            assert (await client.inspect(name)).free == 0
    assert (await client.inspect(name)).free is None
    async with client(f"{name}:mutex"), client.read(f"{name}:read"):
        assert (await client.inspect(f"{name}:mutex")).free is None
        assert (await client.inspect(f"{name}:read")).free is None


@pytest.mark.parametrize("kind", ["read", "semaphore"])
async def test_a_name_whose_leases_have_all_ended_is_free(server: Server, name: str, kind: str) -> None:
    """A reader that released a longer lease leaves the key, with holds in it that have ended."""
    mode = {"read": "r.", "semaphore": "s2/."}[kind]
    with server.cli() as cli:
        cli.zadd(key_of(name), {f"{'a' * 32}|{mode}17|1|host|": 1_000})
    async with Redlock(server.url) as client:
        info = await client.inspect(name)
        assert (info.kind, info.holders, info.free) == ("", (), None)
        assert all(said.startswith("free") for said in info.nodes.values())


WHERE = ("17|h1", "17|h2", "17|h1", "18|h1")


def view(*tickets: WaiterView) -> NodeView:
    return NodeView("none", (), 0, tickets)


def test_the_last_sending_of_a_ticket_counts() -> None:
    """A node that missed the last one shows an older number of tasks."""
    early, late = f"{'a' * 32}|5000000|17|host|", f"{'b' * 32}|4000000|18|host|"
    old, new = WaiterView(7, early, 1, 1), WaiterView(7, early, 3, 9)
    views = [view(old), view(new, WaiterView(8, late)), view(old)]
    assert merged_waiters(views) == (Waiter("host", 17, 5.0, 9), Waiter("host", 18, 4.0, 1))


def test_waiters_are_merged_by_process() -> None:
    """By host and pid: the clients of a process have different ids, and two hosts may have the same pid."""
    told = zip("abcd", (5, 6, 4, 7), WHERE, strict=True)
    ids = [f"{digit * 32}|{since}000000|{where}|" for digit, since, where in told]
    views = [view(*(WaiterView(order, each) for order, each in enumerate(ids)))]
    assert merged_waiters(views) == (Waiter("h1", 17, 4.0, 2), Waiter("h2", 17, 6.0, 1), Waiter("h1", 18, 7.0, 1))


async def test_inspect_lives_with_a_dead_minority(five: list[Server], name: str) -> None:
    """It reports the errors of these nodes; without a majority it raises."""
    async with Redlock(*(server.url for server in five), node_timeout=5.0) as client, client(name):
        await back(client)
        for server in five[:2]:
            server.kill()
        info = await client.inspect(name)
        assert len(info.holders) == 1
        assert sum("held by" in said for said in info.nodes.values()) == 3
        assert await names_of(client, name) == [name]
        five[2].kill()
        with pytest.raises(QuorumUnavailable):
            await client.inspect(name)
        with pytest.raises(QuorumUnavailable):
            await names_of(client, name)


@pytest.mark.parametrize(("least", "node_timeout"), [(0.0, LIMIT), (LIMIT, 1e-6)])
async def test_inspect_waits_for_the_node_timeout(
    server: Server, name: str, monkeypatch: pytest.MonkeyPatch, least: float, node_timeout: float
) -> None:
    """Or for the time that each node has at least, if that is more."""
    monkeypatch.setattr(admin, "_LOOK", least)
    async with (
        Redlock(server.url, lease=LONG) as holder,
        holder(name),
        Redlock(server.url, node_timeout=node_timeout, lease=LONG) as client,
    ):
        assert len((await client.inspect(name)).holders) == 1


async def test_bad_names_are_refused(redlock: Redlock) -> None:
    """As when a lock is made."""
    with pytest.raises(ConfigError):
        await redlock.inspect("")


def test_an_id_shows_nothing_of_its_secret() -> None:
    """And a value that another program wrote is no error."""
    random = "0f" * 16
    assert note_of(f"{random}|1700000000000000|17|host|a|b") == ("host", 17, 1_700_000_000.0, "a|b")
    assert note_of(f"{random}!1700000000000000|17|host|") == ("host", 17, 1_700_000_000.0, "")
    assert note_of(RESTING).metadata == "(resting)"
    assert note_of(DONE).metadata == "(done)"
    assert note_of(f"~{'0' * 31}|r.1|2|host|note").metadata == "(resting)"
    for strange in ("", "x", random, random + "|", random + "|a|b|c|d", "+" + random):
        assert random not in str(note_of(strange))
