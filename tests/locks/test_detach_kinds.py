"""Which kinds besides a mutex can be detached and adopted, which cannot, and what happens to a hold meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing

import pytest
import redis as blocking

from asynclock import ConfigError, Lease, Lock, LockNotHeld, Redlock, Unsupported
from asynclock.stores.memory import MemoryStore
from tests.support.default_keys import key_of
from tests.support.still_clock import turns
from tests.support.waiters import LIMIT, LONG

KINDS: dict[str, Callable[[Redlock, str], Lock]] = {
    "read": lambda client, name: client.read(name),
    "write": lambda client, name: client.write(name),
    "permit": lambda client, name: client.semaphore(name, 2),
}
kinds = pytest.mark.parametrize("kind", KINDS)


async def taken(lock: Lock) -> Lease:
    """The lease of a lock that must be free."""
    lease = await lock.acquire(timeout=10)
    assert lease is not None
    return lease


# -- readers, writers, permits ---------------------------------------------------------------------------------------


@pytest.mark.every_store
@kinds
async def test_it_moves_once_and_is_never_free(make: Callable[..., Redlock], name: str, kind: str) -> None:
    """The adopter has it with a greater token, may extend it and give it back; a second adoption comes too late, as
    does one after that."""
    giver, taker, late = make(), make(), make()
    lease = await taken(KINDS[kind](giver, name))
    handle = await lease.detach()
    assert not lease.held
    adopted = await taker.adopt(handle)
    assert adopted.held
    assert adopted.fence > lease.fence
    with pytest.raises(LockNotHeld):
        await late.adopt(handle)
    await adopted.extend()
    exclusive = late.semaphore(name, 1) if kind == "permit" else late.write(name)
    assert await exclusive.acquire(timeout=0) is None
    await adopted.release()
    with pytest.raises(LockNotHeld):
        await late.adopt(handle)
    after = await taken(exclusive)
    assert after.fence > adopted.fence
    await after.release()


@pytest.mark.parametrize("kind", ["read", "permit"])
async def test_other_holders_of_the_name_are_not_disturbed(make: Callable[..., Redlock], name: str, kind: str) -> None:
    """Another reader or permit, before and after: each is released by its own holder, and none twice."""
    giver, taker, neighbour = make(), make(), make()
    beside = await taken(KINDS[kind](neighbour, name))
    lease = await taken(KINDS[kind](giver, name))
    adopted = await taker.adopt(await lease.detach())
    assert adopted.fence > lease.fence > beside.fence
    assert len((await neighbour.inspect(name)).holders) == 2
    await beside.extend()
    await adopted.extend()
    await beside.release()
    assert adopted.held
    await adopted.extend()
    assert len((await neighbour.inspect(name)).holders) == 1
    await adopted.release()
    assert not (await neighbour.inspect(name)).holders


async def test_the_permits_stay_as_many(make: Callable[..., Redlock], name: str) -> None:
    """While one of two is detached, and after it was adopted, only one more may enter."""
    giver, taker, others = make(), make(), make()
    lease = await taken(giver.semaphore(name, 2))
    handle = await lease.detach()
    second = await taken(others.semaphore(name, 2))
    assert await others.semaphore(name, 2).acquire(timeout=0) is None
    adopted = await taker.adopt(handle)
    assert await others.semaphore(name, 2).acquire(timeout=0) is None
    await second.release()
    third = await taken(others.semaphore(name, 2))
    assert await others.semaphore(name, 2).acquire(timeout=0) is None
    await third.release()
    await adopted.release()


async def test_a_writer_waits_for_an_adopted_reader(make: Callable[..., Redlock], name: str) -> None:
    """It is granted when the adopter releases, not before."""
    giver, taker, writer = make(lease=LONG), make(lease=LONG), make(lease=LONG)
    lease = await taken(giver.read(name))
    waiting = asyncio.create_task(writer.write(name).acquire(timeout=30))
    async with asyncio.timeout(LIMIT):
        while not (await giver.inspect(name)).waiters:
            await asyncio.sleep(0.005)
    adopted = await taker.adopt(await lease.detach())
    assert not waiting.done()
    await adopted.release()
    async with asyncio.timeout(LIMIT):
        got = await waiting
    assert got is not None
    assert got.fence > adopted.fence
    await got.release()


# -- what does not move ----------------------------------------------------------------------------------------------


async def test_several_names_cannot_be_detached(make: Callable[..., Redlock], name: str) -> None:
    """It is refused before anything happens: the names stay held, and are released together."""
    client, other = make(), make()
    async with client.multi(name, f"{name}-b") as lease:
        with pytest.raises(Unsupported, match="multi lock"):
            await lease.detach()
        assert lease.held
        for each in name, f"{name}-b":
            assert await other(each).acquire(timeout=0) is None
    for each in name, f"{name}-b":
        await (await taken(other(each))).release()


@kinds
@pytest.mark.parametrize("nodes", [1, 5])
async def test_the_key_is_something_else_by_now(shared_urls: list[str], name: str, nodes: int, kind: str) -> None:
    """On a majority another program has put a list there. Waiting does not help, so the error comes at once, and the
    list is left alone."""
    urls = shared_urls[:nodes]
    async with Redlock(*urls, node_timeout=5.0) as giver, Redlock(*urls, patience=3600.0) as taker:
        handle = await (await taken(KINDS[kind](giver, name))).detach()
        for url in urls[: nodes // 2 + 1]:
            with closing(blocking.Redis.from_url(url)) as cli:
                cli.delete(key_of(name))
                cli.rpush(key_of(name), "somebody's")
        async with asyncio.timeout(LIMIT):
            with pytest.raises(ConfigError, match="in use as a list of another program"):
                await taker.adopt(handle)
        for url in urls[: nodes // 2 + 1]:
            with closing(blocking.Redis.from_url(url)) as cli:
                assert cli.lrange(key_of(name), 0, -1) == [b"somebody's"]
                cli.delete(key_of(name))


# -- an owner that enters again meanwhile ------------------------------------------------------------------------------


async def test_entered_again_while_it_is_detached(make: Callable[..., Redlock], name: str) -> None:
    """Another task of the same owner enters before the servers have answered. It is granted, so the hold cannot move,
    and stays with both. When the inner tenure is over, it can move."""
    client, other = make(), make()
    lease = await client(name, reentrant=True, owner="us").acquire(timeout=None)
    detaching = asyncio.create_task(lease.detach())
    entering = asyncio.create_task(client(name, reentrant=True, owner="us").acquire(timeout=None))
    with pytest.raises(ConfigError, match="more than once"):
        await detaching
    again = await entering
    assert again.held
    assert lease.held
    assert again.fence == lease.fence
    assert await other(name).acquire(timeout=0) is None
    await again.release()
    assert lease.held
    adopted = await other.adopt(await lease.detach())
    assert adopted.fence > lease.fence
    assert await client(name, reentrant=True, owner="us").acquire(timeout=0) is None
    await adopted.release()


async def test_entered_and_left_while_it_is_detached(make: Callable[..., Redlock], name: str) -> None:
    """The second task of the owner has left before the servers have answered: the detach succeeds."""
    client, other = make(), make()
    lease = await client(name, reentrant=True, owner="us").acquire(timeout=None)

    async def visit() -> None:
        async with client(name, reentrant=True, owner="us"):
            pass

    detaching = asyncio.create_task(lease.detach())
    visiting = asyncio.create_task(visit())
    handle = await detaching
    assert visiting.done()
    adopted = await other.adopt(handle)
    await adopted.release()


@pytest.mark.parametrize("turn", range(8))
async def test_never_with_the_owner_and_with_an_adopter(name: str, turn: int) -> None:
    """The owner enters again at any moment: either the detach is refused and both tenures go on, or the second acquire
    returns None."""
    store = MemoryStore()
    async with Redlock(store) as client, Redlock(store) as other:
        lease = await client(name, reentrant=True, owner="us").acquire(timeout=None)
        detaching = asyncio.create_task(lease.detach())
        await turns(turn)
        again = await client(name, reentrant=True, owner="us").acquire(timeout=0)
        try:
            adopted = await other.adopt(await detaching)
        except ConfigError:
            assert again is not None
            assert again.held
            assert lease.held
            await again.release()
            await lease.release()
        else:
            assert again is None
            assert not lease.held
            assert adopted.held
            await adopted.release()
