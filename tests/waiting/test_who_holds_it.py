"""LockTimeout names the holder and the wait: of every kind, for a holder in another process, in another client or in
this one, and for keys of other programs."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

from asynclock import LockTimeout, Redlock
from asynclock.info import Holder
from tests.support.servers import Server
from tests.support.still_clock import Still, idle, turns
from tests.support.told import KINDS
from tests.support.waiters import IN_VAIN, LIMIT, LONG, decided, holder, processes, until, urls_of

Make = Callable[..., Redlock]

each_kind = pytest.mark.parametrize("kind", KINDS)
ME = (socket.gethostname(), os.getpid())


async def late(lock: object) -> LockTimeout:
    """The error of `async with` in a task of its own."""

    async def enter() -> None:
        async with lock:  # type: ignore[attr-defined]
            raise AssertionError("it was entered")

    with pytest.raises(LockTimeout) as caught:
        await decided(lambda: asyncio.create_task(enter()))
    return caught.value


@each_kind
async def test_a_holder_in_another_client(make: Make, name: str, kind: str) -> None:
    """Its host, process, note and times are in the error of a try, and in its message."""
    client = make()
    await client.health()
    await names_the_other_client(make(), client, name, kind, 0)


async def test_a_holder_in_another_client_after_a_wait(make: Make, name: str) -> None:
    """The same, with the timeout. All kinds wait side by side."""
    holds, client = make(), make()
    await client.health()  # it is connected, so the timeout is for the lock
    async with asyncio.TaskGroup() as group:
        for kind in KINDS:
            group.create_task(names_the_other_client(holds, client, f"{name}:{kind}", kind, IN_VAIN))


async def names_the_other_client(holds: Redlock, client: Redlock, name: str, kind: str, timeout: float) -> None:
    _, lock_of = KINDS[kind]
    began = time.time()
    async with lock_of(holds, name, metadata="nightly", lease=LONG):
        lock = lock_of(client, name, timeout=timeout)
        error = await late(lock)
        # The one try of a plain lock is the server's own SET NX, which does not say who holds the name.
        unknown = kind == "plain" and timeout == 0 and error.holder is None
        assert error.name == lock.name
        assert timeout * 0.9 <= error.waited < LIMIT
        if unknown:
            assert "was held by another owner" in str(error)
            return
        assert error.holder is not None
        assert (error.holder.host, error.holder.pid) == ME
        assert error.holder.metadata == "nightly"
        assert began - 1 <= error.holder.since <= time.time() + 1
        assert error.holder.remaining is not None
        assert LONG / 2 < error.holder.remaining < LONG + 0.1
    when = f"for the whole timeout ({timeout:g} s)" if timeout else "at the only try (timeout=0)"
    assert f"was held by another owner {when}; the holder is {ME[0]}, pid {ME[1]} ('nightly'), for" in str(error)
    assert pickle.loads(pickle.dumps(error)).holder == error.holder


@each_kind
async def test_a_holder_in_this_client(make: Make, name: str, kind: str) -> None:
    """A task that asks the servers beside the holder learns the same of a task of its own client; and that it is
    one."""
    await names_this_client(make(), name, kind, 0)


async def test_a_holder_in_this_client_after_a_wait(make: Make, name: str) -> None:
    """So does a task that waits in the local queue."""
    client = make()
    await client.health()
    async with asyncio.TaskGroup() as group:
        for kind in KINDS:
            group.create_task(names_this_client(client, f"{name}:{kind}", kind, IN_VAIN))


async def names_this_client(client: Redlock, name: str, kind: str, timeout: float) -> None:
    _, lock_of = KINDS[kind]
    async with lock_of(client, name, metadata="batch", lease=LONG):
        error = await late(lock_of(client, name, timeout=timeout))
        assert timeout * 0.9 <= error.waited < LIMIT
        assert error.holder is not None
        assert (error.holder.host, error.holder.pid, error.holder.metadata) == (*ME, "batch")
        assert error.holder.remaining is not None
        assert LONG / 2 < error.holder.remaining < LONG + 0.1
    assert f"the holder is {ME[0]}, pid {ME[1]} (this process, 'batch'), for" in str(error)


async def test_a_task_behind_the_one_that_asks_knows_as_much(make: Make, name: str) -> None:
    """Of a holder in another client: a waiter in the local queue has what the task before it was told."""
    client = make()
    async with make()(name, metadata="far"):
        first = asyncio.create_task(client(name).acquire(timeout=None))
        await until(lambda: idle(client))
        error = await late(client(name, timeout=IN_VAIN))
        assert error.waited >= IN_VAIN * 0.9
        assert error.holder is not None
        assert error.holder.metadata == "far"
    await (await first).release()


async def test_a_holder_in_another_process(server: Server, name: str) -> None:
    """Its process id is in the message."""
    async with processes(1, [server.url]) as (other,), Redlock(server.url) as client:
        other.wait(name, ever=True)
        await until(lambda: other.served)
        error = await late(client(name, timeout=IN_VAIN))
        assert error.holder is not None
        assert error.holder.pid != os.getpid()
        assert f"the holder is {ME[0]}, pid {error.holder.pid}, for" in str(error)


async def test_one_of_several_holders_is_named(make: Make, name: str) -> None:
    """Readers hold it together: the writer's error names one of them. The same for the permits of a semaphore."""
    async with AsyncExitStack() as stack:
        for number in range(3):
            await stack.enter_async_context(make().read(name, metadata=f"reader {number}"))
            await stack.enter_async_context(make().semaphore(f"{name}:s", 3, metadata=f"holder {number}"))
        client = make()
        await client.health()  # it is connected, so the timeout is for the lock
        for lock, note in (
            (client.write(name, timeout=IN_VAIN), "reader"),
            (client.semaphore(f"{name}:s", 3, timeout=IN_VAIN), ""),
        ):
            error = await late(lock)
            assert error.holder is not None
            assert (error.holder.host, error.holder.pid) == ME
            assert error.holder.metadata.startswith(note or "holder")


async def test_holders_that_no_majority_agrees_on(five: list[Server], name: str) -> None:
    """Of three readers no two are known to the same nodes: the error names the one that most nodes name."""
    urls = urls_of(five)
    async with Redlock(*urls) as client, Redlock(*urls) as other:
        leases = [await client.read(name, lease=LONG, metadata=f"reader {each}").acquire() for each in range(3)]
        await client.health()  # over the same connections: each node knows all three, not only a majority
        for server, reader in zip(five, (b"0", b"1", b"1", b"2", b"0"), strict=True):
            with server.cli() as cli:
                members: list[bytes] = cli.zrange(f"lock:{name}", 0, -1)
                gone = [each for each in members if not each.endswith(b"reader " + reader)]
                assert cli.zrem(f"lock:{name}", *gone) == 2
        named = ""
        async with asyncio.timeout(LIMIT):
            while named not in ("reader 0", "reader 1"):  # an outcome may come of three replies, one of each reader
                error = await late(other.write(name, timeout=IN_VAIN))
                named = error.holder.metadata if error.holder is not None else ""
        assert all(leases)


@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("fencing", [True, False])
async def test_d11_a_key_of_another_program_is_named(five: list[Server], name: str, nodes: int, fencing: bool) -> None:
    """Without an expiry it never ends by itself, which the message says; its value is not shown."""
    for server in five[:nodes]:
        with server.cli() as cli:
            cli.set(name, "swordfish")
            cli.set(f"{name}:ends", "swordfish", ex=90)
    async with Redlock(*urls_of(five[:nodes]), prefix="", fencing=fencing) as client:
        never = await late(client(name, timeout=IN_VAIN))
        ends = await late(client(f"{name}:ends", timeout=IN_VAIN))
    assert never.holder == Holder(name, "", 0, 0.0, None, "")
    assert "a key of another program, without an expiry" in str(never)
    assert ends.holder is not None
    assert ends.holder.remaining is not None
    assert 60 < ends.holder.remaining <= 91
    assert "a key of another program, which expires in" in str(ends)
    assert "swordfish" not in f"{never} {ends} {never.holder} {ends.holder}"


@pytest.mark.parametrize("nodes", [1, 5])
async def test_a_name_that_rests_is_named(five: list[Server], name: str, nodes: int) -> None:
    """After a release with min_hold nobody holds it: the message says why it is not free, and until when."""
    async with Redlock(*urls_of(five[:nodes])) as client, Redlock(*urls_of(five[:nodes])) as other:
        async with client(name, lease=30, min_hold=30):
            pass
        error = await late(other(name, timeout=IN_VAIN))
    assert "min_hold" in str(error)
    assert "it is free in" in str(error)


async def test_no_error_shows_an_id(server: Server, name: str) -> None:
    """The random part of an id is a secret: whoever knows it can release the lock."""
    async with Redlock(server.url) as client, Redlock(server.url) as other:
        async with client(name):
            secret = holder(server, name).decode().lstrip("+")[:32]
            error = await late(other(name, timeout=IN_VAIN))
    assert len(secret) == 32
    assert secret not in f"{error} {error!r} {error.holder!r}"


async def test_lead_names_the_leader(make: Make, name: str) -> None:
    """Its LockTimeout tells the same."""

    async def main(lease: object) -> None:
        raise AssertionError("it was elected")

    async with make()(name, metadata="leader"):
        client = make()
        with pytest.raises(LockTimeout) as caught:
            await decided(lambda: client.lead(name, main, timeout=IN_VAIN))
    assert caught.value.holder is not None
    assert caught.value.holder.metadata == "leader"
    assert caught.value.waited >= IN_VAIN * 0.9


@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("local", [False, True], ids=["asks", "local queue"])
async def test_the_wait_is_exact(name: str, nodes: int, local: bool) -> None:
    """`waited` is the time from the call to the error; and the holder has held for the time that passed."""
    still = Still(nodes, name)
    async with still.held(lease=LONG, metadata="slow") as (ours, lease), still.client() as other:
        client = ours if local else other
        await still.until(still.clock.now() + 10.0)
        waiting = asyncio.create_task(late(client(name, timeout=7.5)))
        await turns()
        await still.until(still.clock.now() + 7.5)
        async with asyncio.timeout(LIMIT):
            error = await waiting
        assert error.waited == pytest.approx(7.5, abs=0.01)
        assert error.holder is not None
        assert still.clock.wall() - error.holder.since == pytest.approx(17.5, abs=0.1)
        await lease.release()


async def test_entering_a_reentrant_lock_counts_the_whole_wait(name: str) -> None:
    """A second task of the same owner first waits for the first one's entry, and then for the lock."""
    still = Still(1, name)
    async with still.held(lease=LONG) as (_, lease), still.client() as client:
        first = asyncio.create_task(client(name, reentrant=True, owner="us").acquire(timeout=4.0))
        await turns()
        second = asyncio.create_task(late(client(name, reentrant=True, owner="us", timeout=6.0)))
        await turns()
        async with asyncio.timeout(LIMIT):
            while not second.done():
                still.clock.advance(0.5)
                await asyncio.sleep(0.001)
            error = await second
        assert await first is None
        assert error.waited == pytest.approx(6.0, abs=0.6)
        await lease.release()
