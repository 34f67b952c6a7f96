"""detach and adopt: a hold that goes from one process to another, on every deployment and both loops."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from asynclock import ConfigError, LockLost, LockNotHeld, QuorumUnavailable, Redlock
from tests.support.default_keys import key_of
from tests.support.kinds_of_node import each_kind_of_node
from tests.support.servers import Server
from tests.support.still_clock import Still


@pytest.mark.every_store
async def test_a_hold_moves_and_is_never_free(make: Callable[..., Redlock], name: str) -> None:
    """The giver's block ends without an error, no other client gets in between, and the adopter's token is greater."""
    giver, taker, third = make(), make(), make()
    async with giver(name) as lease:
        handle = await lease.detach()
        assert not lease.held
        assert not await lease.wait_lost()
        with pytest.raises(LockNotHeld, match="detached"):
            await lease.release()
        with pytest.raises(LockNotHeld):
            await lease.detach()
    assert await third(name).acquire(timeout=0) is None
    adopted = await taker.adopt(handle)
    assert adopted.held
    assert adopted.fence > lease.fence
    assert await third(name).acquire(timeout=0) is None
    async with adopted:
        pass
    async with third(name, timeout=5) as last:
        assert last.fence > adopted.fence


@pytest.mark.every_store
async def test_a_handle_serves_once(make: Callable[..., Redlock], name: str) -> None:
    """Of two adoptions at once, one succeeds; later ones raise that the handle is used."""
    lease = await make()(name).acquire(timeout=None)
    handle = await lease.detach()
    clients = [make() for _ in range(2)]
    outcomes = await asyncio.gather(*(client.adopt(handle) for client in clients), return_exceptions=True)
    won = [each for each in outcomes if not isinstance(each, BaseException)]
    assert len(won) == 1
    assert all(isinstance(each, LockNotHeld) for each in outcomes if each is not won[0])
    assert won[0].held
    await won[0].extend()
    await won[0].release()
    with pytest.raises(LockNotHeld):
        await make().adopt(handle)
    assert not await make()(name).locked()


async def test_a_handle_that_comes_too_late(make: Callable[..., Redlock], name: str) -> None:
    """Where nobody adopts it the hold expires; then another client has the name."""
    lease = await make(node_timeout=1.0)(name, lease=3.0).acquire(timeout=None)
    handle = await lease.detach()
    client = make()
    async with client(name, timeout=30) as other:
        assert other.fence > lease.fence
        with pytest.raises(LockNotHeld):
            await make().adopt(handle)
        assert other.held


async def test_waiters_get_it_from_the_adopter(make: Callable[..., Redlock], name: str) -> None:
    """They wait on, and are notified when the adopter releases."""
    lease = await make()(name).acquire(timeout=None)
    client = make()
    waiting = asyncio.create_task(client(name).acquire(timeout=30))
    async with asyncio.timeout(20):
        while not (await client.inspect(name)).waiters:
            await asyncio.sleep(0.005)
    adopted = await make().adopt(await lease.detach())
    assert not waiting.done()
    await adopted.release()
    got = await waiting
    assert got is not None
    assert got.fence > adopted.fence
    await got.release()


@pytest.mark.parametrize("nodes", [1, 5])
async def test_the_adopter_is_under_the_watchdog(name: str, nodes: int) -> None:
    """Its hold outlives its lease."""
    still = Still(nodes, name)
    async with still.held() as (_, lease), still.client() as taker, still.client() as other:
        adopted = await taker.adopt(await lease.detach(), lease=9.0)
        await still.until(still.clock.now() + 60.0)
        assert adopted.held
        assert await other(name).acquire(timeout=0) is None
        await adopted.release()


async def test_inspect_shows_the_adopter(name: str) -> None:
    """Its process, its note and the time of the adoption, and nothing of the client that detached the hold."""
    still = Still(1, name)
    async with still.client(metadata="web.handler") as giver, still.client(metadata="worker") as taker:
        handle = await (await giver(name).acquire(timeout=None)).detach()
        still.clock.advance(10.0)
        adopted = await taker.adopt(handle)
        (holder,) = (await taker.inspect(name)).holders
        assert (holder.host, holder.pid, holder.metadata) == (socket.gethostname(), os.getpid(), "worker")
        assert holder.since == pytest.approx(still.clock.wall(), abs=0.001)
        await adopted.release()


@each_kind_of_node
async def test_an_adopted_hold_may_be_detached_again(make: Callable[..., Redlock], name: str) -> None:
    """The next adopter's token is greater."""
    lease = await make()(name).acquire(timeout=None)
    adopted = await make().adopt(await lease.detach())
    again = await make().adopt(await adopted.detach())
    assert again.fence > adopted.fence > lease.fence
    await again.release()


async def test_leases_that_cannot_be_detached(make: Callable[..., Redlock], name: str) -> None:
    """A lease that was released, and one whose owner entered more than once."""
    client = make()
    lease = await client(name).acquire(timeout=None)
    await lease.release()
    with pytest.raises(LockNotHeld):
        await lease.detach()
    async with client(name, reentrant=True) as outer:
        async with client(name, reentrant=True):
            with pytest.raises(ConfigError, match="more than once"):
                await outer.detach()
        assert outer.held
        with pytest.raises(ConfigError, match="seconds"):
            await outer.detach(lease=3600)
        handle = await outer.detach()
    await (await client.adopt(handle)).release()


async def test_forged_handles_are_refused(redlock: Redlock, name: str) -> None:
    """The error says what to do, and never shows a handle."""
    handle = await (await redlock(name).acquire(timeout=None)).detach()
    for bad in ("", "x", handle[:-4], handle + "AAAA", handle.replace("asynclock1.", "asynclock2."), None, 17):
        with pytest.raises(ConfigError, match="no handle") as caught:
            await redlock.adopt(bad)  # type: ignore[arg-type]
        assert handle[20:40] not in str(caught.value)
    adopted = await redlock.adopt(handle)
    assert handle[20:40] not in repr(adopted)
    await adopted.release()
    with pytest.raises(LockNotHeld) as late:
        await redlock.adopt(handle)
    assert pickle.loads(pickle.dumps(late.value)).name == name


async def test_an_adoption_that_is_cancelled_frees_the_name(make: Callable[..., Redlock], name: str) -> None:
    """Cancelled at any await, it adopts completely or leaves a name that is free, at the latest when the handle
    expires."""
    for step in range(12):
        lease = await make()(name).acquire(timeout=20)
        assert lease is not None
        handle = await lease.detach()
        client = make()
        task = asyncio.create_task(client.adopt(handle))
        for _ in range(step):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        if task.cancelled():
            try:
                adopted = await make().adopt(handle)
            except LockNotHeld:
                continue  # it had gone through, and was undone
        else:
            adopted = task.result()
        await adopted.release()


async def test_another_process_adopts(server: Server, name: str) -> None:
    """A web handler acquires, a worker releases."""
    program = (
        "import asyncio, sys\nfrom asynclock import Redlock\n"
        "async def main():\n"
        "    async with Redlock(sys.argv[1]) as client, await client.adopt(sys.stdin.read()) as lease:\n"
        "        print(lease.fence)\n"
        "asyncio.run(main())\n"
    )
    async with Redlock(server.url) as client:
        lease = await client(name).acquire(timeout=None)
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, server.url, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        printed, _ = await worker.communicate((await lease.detach()).encode())
        assert int(printed) > lease.fence
        assert not await client(name).locked()


async def test_an_outage_leaves_the_hold_where_it_is(five: list[Server], name: str) -> None:
    """A failed detach leaves the lease held; a failed adopt may be tried again later."""
    async with Redlock(*(server.url for server in five), patience=1.0, node_timeout=1.0) as client:
        lease = await client(name).acquire(timeout=None)
        for server in five[:3]:
            server.freeze()
        with pytest.raises(QuorumUnavailable):
            await lease.detach()
        assert lease.held
        for server in five[:3]:
            server.thaw()
        async with asyncio.timeout(20):
            while True:
                try:
                    handle = await lease.detach()
                    break
                except QuorumUnavailable:
                    await asyncio.sleep(0.02)
        adopted = await client.adopt(handle)
        await adopted.release()


# -- break_lock ------------------------------------------------------------------------------------------------------


@pytest.mark.every_store
async def test_a_broken_hold_is_notified_at_once(make: Callable[..., Redlock], name: str) -> None:
    """By a notice: the holder's block ends with the reason although no renewal is due for 20 s, and the next waiter
    gets the name."""
    inside = asyncio.Event()

    async def hold() -> str:
        try:
            async with make()(name, lease=60):
                inside.set()
                await asyncio.Event().wait()
        except LockLost as lost:
            return lost.reason
        return ""

    holder = asyncio.create_task(hold())
    await inside.wait()
    operator = make()
    async with asyncio.timeout(10):
        assert await operator.break_lock(name)
        assert await holder == "broken"
    async with operator(name, timeout=5):
        pass
    assert not await operator.break_lock(name)


@pytest.mark.every_store
async def test_breaking_serves_the_next_waiter(make: Callable[..., Redlock], name: str) -> None:
    """The next in the queue is granted, though the holder lives."""
    holder = await make()(name, lease=60).acquire(timeout=None)
    operator, client = make(), make()
    waiting = asyncio.create_task(client(name).acquire(timeout=30))
    async with asyncio.timeout(10):
        while not (await operator.inspect(name)).waiters:
            await asyncio.sleep(0.005)
        await operator.break_lock(name)
        assert await holder.wait_lost()
        got = await waiting
    assert got is not None
    assert got.fence > holder.fence
    await got.release()
    with pytest.raises(LockLost):
        await holder.release()


async def test_breaking_frees_what_another_program_left(server: Server, name: str) -> None:
    """The key of another program is deleted where the operator says so, also one without expiry."""
    with server.cli() as cli:
        cli.set(key_of(name), "left")
        async with Redlock(server.url) as client:
            assert await client.break_lock(name, foreign=True)
            assert cli.get(key_of(name)) is None
            async with client(name, timeout=0):
                pass
