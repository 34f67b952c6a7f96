"""Entering a client, and its first acquire: what only the user can solve is told at once, and an outage is waited for
(HAZARDS D12)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress

import pytest

from asynclock import ConfigError, Lease, QuorumUnavailable, Redlock
from asynclock.runtime.opening import check
from tests.support.cut_servers import Clocked
from tests.support.fake_clock import FakeClock
from tests.support.probes import loops_of, nodes_of, session_of
from tests.support.servers import Server, Servers
from tests.support.still_clock import turns
from tests.support.waiters import LIMIT, healthy, until, urls_of


@pytest.mark.parametrize("nodes", [1, 3])
async def test_d12_a_misconfigured_server_is_told_at_the_start(servers: Servers, name: str, nodes: int) -> None:
    """The first acquire finds what it does not need yet: here the rights of a waiter. One node of three costs nothing.
    Once it is mended, the same client works."""
    some = [servers.start() for _ in range(3)]
    urls = [each.user("-zadd") for each in some[:nodes]]
    for use in ("acquire", "enter"):
        async with aclosing(Redlock(*urls)) as client:
            async with asyncio.timeout(LIMIT):  # no patience: waiting does not help
                with pytest.raises(ConfigError, match="zadd"):
                    await (client(name).acquire() if use == "acquire" else client.__aenter__())
            for each in some[:nodes]:
                each.user()
            async with client(name, timeout=LIMIT) as lease:
                assert lease.held
            for each in some[:nodes]:
                each.user("-zadd")
    if nodes == 3:
        some[0].user()
        some[1].user()
        async with Redlock(*urls) as client, client(name) as lease:
            assert lease.held


async def test_d12_an_error_without_a_caller_is_not_kept(server: Server, name: str) -> None:
    """The first caller is cancelled before the server has refused it. When the user has got the rights, the next one
    asks the server, and does not get the error of before."""
    with server.cli() as cli:
        async with aclosing(Redlock(server.user("-zadd"), connect_timeout=LIMIT, lease=60)) as client:
            server.freeze()
            first = asyncio.create_task(client(name).acquire())
            await until(lambda: _open_tasks() == 1)
            first.cancel()
            await asyncio.wait({first})
            server.thaw()
            await until(lambda: _open_tasks() == 0)
            cli.execute_command("ACL", "SETUSER", "worker", "+zadd")
            async with client(name, timeout=0) as lease:
                assert lease.held


def _open_tasks() -> int:
    return sum(each.get_name() == "asynclock open" for each in asyncio.all_tasks())


async def test_d12_a_monitor_needs_no_right_to_lock(server: Server, name: str) -> None:
    """inspect, holders and locked do not check for votes."""
    async with Redlock(server.url) as holder, holder(name):
        url = server.user("-set", "-del", "-zadd")
        async with aclosing(Redlock(url)) as monitor:
            assert (await monitor.inspect(name)).holders
            assert [each.name async for each in monitor.holders()] == [name]
            assert not (await monitor.health()).ok
        async with aclosing(Redlock(url)) as monitor:
            assert await monitor(name).locked()


async def test_d12_entering_waits_for_the_end_of_an_outage(servers: Servers, name: str) -> None:
    """The server has no memory left as the program starts; entering goes on as soon as it has."""
    server = servers.start("--maxmemory", "1")
    client = Redlock(server.url, patience=LIMIT)
    entering = asyncio.create_task(client.__aenter__())
    with server.cli() as cli:
        await until(lambda: "errorstat_OOM" in cli.info("errorstats"))
        assert not entering.done()
        cli.config_set("maxmemory", 0)
    async with asyncio.timeout(LIMIT):
        await entering
    async with client, client(name) as lease:
        assert lease.held


async def test_d12_entering_ends_when_waiting_does_not_help(servers: Servers) -> None:
    """The outage is over, and the user has no rights: ConfigError, before the patience ends."""
    server = servers.start("--maxmemory", "1")
    client = Redlock(server.user(), patience=60)
    entering = asyncio.create_task(client.__aenter__())
    with server.cli() as cli:
        await until(lambda: "errorstat_OOM" in cli.info("errorstats"))
        server.user("-zadd")
        cli.config_set("maxmemory", 0)
    async with asyncio.timeout(LIMIT):
        with pytest.raises(ConfigError, match="zadd"):
            await entering
    await client.aclose()


@pytest.mark.parametrize("first", [0, 1])
async def test_d12_entering_waits_for_servers_that_start_later(servers: Servers, name: str, first: int) -> None:
    """A program and its three servers start together, or one of the servers first: they are new, so they vote at
    once."""
    some = [servers.start() for _ in range(3)]
    for each in some[first:]:
        each.kill()
    client = Redlock(*urls_of(some), patience=LIMIT)
    entering = asyncio.create_task(client.__aenter__())
    await until(lambda: sum("refused" in str(node.error) for node in nodes_of(client)) == 3 - first)
    for each in some[first:]:
        each.restart()
    async with asyncio.timeout(LIMIT):
        await entering
    async with client, client(name, timeout=0) as lease:
        assert lease.held


@pytest.mark.parametrize("use", ["acquire", "health"])
async def test_d12_new_servers_that_start_after_a_first_outage_vote(servers: Servers, name: str, use: str) -> None:
    """Also for a client that was not entered, whose first acquire found no server at all."""
    some = [servers.start() for _ in range(3)]
    for each in some:
        each.kill()
    async with aclosing(Redlock(*urls_of(some), patience=LIMIT)) as client:
        with pytest.raises(QuorumUnavailable):
            await client(name).acquire(timeout=0)
        for each in some:
            each.restart()
        await until(lambda: all(node.error is None for node in nodes_of(client)))
        if use == "health":
            await healthy(client)
        else:
            async with client(name) as lease:
                assert lease.held


async def test_d12_servers_that_another_client_found_new_vote(servers: Servers, name: str) -> None:
    """One of the three never starts, so a client that was there before cannot find out by itself that the two are new:
    the third may have a mark. A client that comes later finds it out, and sets their marks."""
    some = [servers.start() for _ in range(3)]
    for each in some:
        each.kill()
    async with aclosing(Redlock(*urls_of(some), patience=0)) as client:
        with pytest.raises(QuorumUnavailable):
            await client(name).acquire()
        for each in some[1:]:
            each.restart()
        await until(lambda: all(node.error is None for node in nodes_of(client)[1:]))
        assert not (await client.health()).ok
        async with Redlock(*urls_of(some)):
            await healthy(client)


@pytest.mark.parametrize("first", ["answers", "killed", "frozen"])
async def test_d12_entering_does_not_take_a_deployment_in_use_for_new(servers: Servers, name: str, first: str) -> None:
    """While it waits, another client uses the servers, and two of them restart empty: they cast no vote, so there is no
    second holder. Also if the first one, which it met before it had a mark, is out of reach by then."""
    some = [servers.start() for _ in range(3)]
    hidden = [each.path.with_suffix(".link") for each in some[1:]]
    client = Redlock(some[0].url, *(f"unix://{path}" for path in hidden), patience=8)  # longer than two restarts
    entering = asyncio.create_task(client.__aenter__())
    await until(lambda: nodes_of(client)[0].error is None and all(node.error for node in nodes_of(client)[1:]))
    async with Redlock(*urls_of(some)) as other:
        lease = await other(name, renew=False).acquire(timeout=None)
        if first == "killed":
            some[0].kill()
        elif first == "frozen":
            some[0].freeze()
        for each, path in zip(some[1:], hidden, strict=True):
            each.restart()
            path.symlink_to(each.path)
        with pytest.raises(QuorumUnavailable, match="casts no vote for another"):
            await entering
        with pytest.raises(QuorumUnavailable):
            await client(name).acquire(timeout=0)
        assert lease.held
        if first == "frozen":
            some[0].thaw()
    await client.aclose()


@pytest.mark.parametrize("patience", [0, 0.3])
async def test_d12_entering_ends_with_patience(servers: Servers, patience: float) -> None:
    """With the reason of the node."""
    server = servers.start("--maxmemory", "1")
    client = Redlock(server.url, patience=patience)
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(QuorumUnavailable, match="OOM"):
        await client.__aenter__()
    assert loop.time() - began >= patience - 0.01
    await client.aclose()


async def test_c20_a_silence_of_the_last_moment_hides_no_reason(servers: Servers) -> None:
    """As the patience ends, a check has little time left. A server that refused a moment ago, and is late to answer, is
    reported with its refusal."""
    clock = FakeClock()
    server = servers.start("--maxmemory", "1")
    async with aclosing(Redlock(Clocked(server.url, clock))) as client:
        await client.health()
        assert "OOM" in str(await check(session_of(client).quorum, LIMIT))
        server.freeze()
        for seconds, reason in ((0.0, "OOM"), (2.0, "did not answer")):
            clock.advance(seconds)
            checking = asyncio.create_task(check(session_of(client).quorum, 0.05))
            await turns()
            clock.advance(0.1)
            assert reason in str(await checking)
        server.thaw()


async def test_d12_a_server_without_memory_still_gets_releases(server: Server, name: str) -> None:
    """It casts no vote, and stays connected: what is held there is released."""
    async with Redlock(server.url) as client:
        async with client(name):
            with server.cli() as cli:
                cli.config_set("maxmemory", 1)
            assert not (await client.health()).ok
        with server.cli() as cli:
            assert not cli.exists(name)


async def test_b1_entering_that_is_cancelled_leaves_nothing(make: Callable[..., Redlock], name: str) -> None:
    """At whichever await: no task of the client is left, and the same client can be entered again."""
    before = asyncio.all_tasks()
    for number in (1, 2, 3, 5, 8, 13, 21, 34, 55):
        client = make()
        entering = asyncio.create_task(client.__aenter__())
        for _ in range(number):
            await asyncio.sleep(0)
        entering.cancel()
        await asyncio.wait({entering})
        if entering.cancelled():
            assert not list(loops_of(client))
        await client.aclose()
        assert asyncio.all_tasks() == before
    async with client, client(name) as lease:
        assert lease.held


async def test_b1_entering_that_fails_leaves_nothing(server: Server, name: str) -> None:
    """In an outage: no task and no connection of the client is left, and the same client can be entered again."""
    before = asyncio.all_tasks()
    server.freeze()
    client = Redlock(server.url, patience=0.1, connect_timeout=0.1)
    for _ in range(3):
        with pytest.raises(QuorumUnavailable):
            await client.__aenter__()
        assert asyncio.all_tasks() == before
    server.thaw()
    with server.cli() as cli:
        await until(lambda: len(cli.client_list()) == 1)
    async with asyncio.timeout(LIMIT):
        while True:
            with suppress(QuorumUnavailable):  # a busy machine may take longer than this patience
                await client.__aenter__()
                break
    async with client, client(name) as lease:
        assert lease.held


async def test_b1_a_client_in_use_stays_open(server: Server, name: str) -> None:
    """Entering it is cancelled, and the lock that was taken before is held on."""
    async with aclosing(Redlock(server.url)) as client, client(name) as lease:
        server.freeze()
        entering = asyncio.create_task(client.__aenter__())
        await asyncio.sleep(0)
        entering.cancel()
        await asyncio.wait({entering})
        assert entering.cancelled()
        server.thaw()
        assert await lease.extend() is None
        assert lease.held


@pytest.mark.parametrize("use", ["enter", "acquire"])
async def test_b1_a_client_that_others_begin_to_use_stays_open(server: Server, name: str, use: str) -> None:
    """The first task that enters it is cancelled. Another one, which began after that, goes on: it enters it, too, or
    waits for a lock."""
    client = Redlock(server.url)
    server.freeze()
    entering = asyncio.create_task(client.__aenter__())
    await asyncio.sleep(0)
    other = asyncio.create_task(client.__aenter__() if use == "enter" else client(name).acquire(timeout=None))
    await asyncio.sleep(0)
    entering.cancel()
    await asyncio.wait({entering})
    assert entering.cancelled()
    server.thaw()
    async with aclosing(client), asyncio.timeout(LIMIT):
        used = await other
        async with client(f"{name}:other") as lease:
            assert lease.held
        if isinstance(used, Lease):
            await used.release()
        later = asyncio.create_task(client.__aenter__())
        await asyncio.sleep(0)
        later.cancel()
        await asyncio.wait({later})
        assert list(loops_of(client))


async def test_b1_a_client_with_a_lease_stays_open(servers: Servers, name: str) -> None:
    """While a first task waits for the end of an outage, it is over, and another one gets a lock. The wait is
    cancelled, and the lease goes on."""
    server = servers.start("--maxmemory", "1")
    client = Redlock(Clocked(server.url, FakeClock()), patience=LIMIT)
    entering = asyncio.create_task(client.__aenter__())
    await asyncio.sleep(0)
    with server.cli() as cli:
        assert not (await client.health()).ok
        cli.config_set("maxmemory", 0)
    async with aclosing(client), client(name) as lease:
        assert not entering.done()  # its clock stands still
        entering.cancel()
        await asyncio.wait({entering})
        assert entering.cancelled()
        await lease.extend()
        assert lease.held


async def test_b1_the_last_entry_that_is_cancelled_closes_the_client(server: Server, name: str) -> None:
    """Several tasks enter it, and each is cancelled."""
    before = asyncio.all_tasks()
    client = Redlock(server.url)
    server.freeze()
    entries = [asyncio.create_task(client.__aenter__()) for _ in range(3)]
    await asyncio.sleep(0)
    for entry in entries[1:]:
        entry.cancel()
        await asyncio.wait({entry})
        assert list(loops_of(client))
    entries[0].cancel()
    await asyncio.wait(entries)
    assert not list(loops_of(client))
    assert asyncio.all_tasks() == before
    server.thaw()
    async with client, client(name) as lease:
        assert lease.held
