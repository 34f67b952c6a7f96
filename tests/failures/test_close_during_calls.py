"""The client closes in the very turn in which a task releases, acquires or times out. This is the usual shutdown, where
a worker and its client wait for one stop event (HAZARDS A17, A18)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from asynclock import ConfigError, Lease, LockLost, LockNotHeld, Redlock, Skipped
from asynclock.rules.model import Op, Verb
from tests.support.cancelled_waits import known, no_task_is_left
from tests.support.fake_clock import FakeClock
from tests.support.memory_probes import set_state
from tests.support.probes import acquisitions_of, pauses
from tests.support.still_clock import Memory, turns
from tests.support.user_store import state_of
from tests.support.waiters import LIMIT, LONG

pytestmark = pytest.mark.both_loops("the loop orders the turns")

either_order = pytest.mark.parametrize("closes_first", [False, True])


class Shutdown:
    """A client that closes once `stop` is set; an observer of the same servers; and a name."""

    def __init__(self, client: Redlock, observer: Redlock, name: str) -> None:
        self.client = client
        self.observer = observer
        self.name = name
        self.stop = asyncio.Event()
        self.ready = asyncio.Event()

    async def stopped(self) -> None:
        """Return in the turn in which the client closes."""
        self.ready.set()
        await self.stop.wait()

    async def play(self, scene: Callable[[Shutdown], Awaitable[Any]], *, closes_first: bool) -> Any:
        """The result of the scene, or its exception. Both wake in one turn, in the order in which they came."""
        closing = asyncio.create_task(self._close()) if closes_first else None
        await turns(1)
        acting = asyncio.create_task(_awaited(scene(self)))
        async with asyncio.timeout(LIMIT):
            await self.ready.wait()
            closing = closing or asyncio.create_task(self._close())
            await turns(1)
            self.stop.set()
            await closing
            return (await asyncio.gather(acting, return_exceptions=True))[0]

    async def _close(self) -> None:
        await self.stop.wait()
        await self.client.aclose()

    async def left(self) -> list[Any]:
        """What the servers still keep of the name, without its fence."""
        return await known(self.observer, self.name)


async def _awaited(what: Awaitable[Any]) -> Any:
    return await what


@pytest.fixture(params=[1, 5])
def nodes(request: pytest.FixtureRequest, shared_urls: list[str]) -> list[str]:
    return shared_urls[: request.param]


@pytest.fixture
async def shutdown(nodes: list[str], name: str) -> AsyncIterator[Shutdown]:
    client = Redlock(*nodes, lease=LONG)
    async with Redlock(*nodes, lease=LONG) as observer:
        await client.health()
        yield Shutdown(client, observer, name)


# -- releases ----------------------------------------------------------------------------------------------------------


async def a_block(shutdown: Shutdown) -> str:
    async with shutdown.client(shutdown.name):
        await shutdown.stopped()
    return "left"


async def a_release(shutdown: Shutdown) -> str:
    lock = shutdown.client(shutdown.name)
    await lock.acquire()
    await shutdown.stopped()
    await lock.release()
    return "left"


async def a_release_of_a_lease(shutdown: Shutdown) -> str:
    lease = await shutdown.client(shutdown.name).acquire(timeout=None)
    await shutdown.stopped()
    await lease.release()
    return "left"


async def a_block_entered_twice(shutdown: Shutdown) -> str:
    lock = shutdown.client(shutdown.name, reentrant=True)
    async with lock, lock:
        await shutdown.stopped()
    return "left"


async def a_read(shutdown: Shutdown) -> str:
    async with shutdown.client.read(shutdown.name):
        await shutdown.stopped()
    return "left"


async def a_permit(shutdown: Shutdown) -> str:
    async with shutdown.client.semaphore(shutdown.name, 2):
        await shutdown.stopped()
    return "left"


async def several(shutdown: Shutdown) -> str:
    async with shutdown.client.multi(shutdown.name, shutdown.name[::-1]):
        await shutdown.stopped()
    return "left"


async def synchronized(shutdown: Shutdown) -> str:
    @shutdown.client.synchronized(lambda: shutdown.name)
    async def work() -> str:
        await shutdown.stopped()
        return "left"

    return await work()


async def lead(shutdown: Shutdown) -> str:
    async def main(lease: Lease) -> str:
        await shutdown.stopped()
        return "left"

    return await shutdown.client.lead(shutdown.name, main)


GIVEN_BACK = [
    a_block, a_release, a_release_of_a_lease, a_block_entered_twice, a_read, a_permit, several, synchronized, lead,
]  # fmt: skip


@either_order
@pytest.mark.parametrize("scene", GIVEN_BACK)
async def test_a17_a_release_as_the_client_closes(shutdown: Shutdown, scene: Any, closes_first: bool) -> None:
    """It is sent and awaited before the client disconnects: no error, and no key is left for the rest of the lease."""
    with no_task_is_left():
        assert await shutdown.play(scene, closes_first=closes_first) == "left"
    assert not await shutdown.left()


@either_order
async def test_a17_an_exception_as_the_client_closes(shutdown: Shutdown, closes_first: bool) -> None:
    """The body's exception is the one that is raised, and the name is free."""

    async def fails(shutdown: Shutdown) -> None:
        async with shutdown.client(shutdown.name):
            await shutdown.stopped()
            raise ZeroDivisionError

    assert isinstance(await shutdown.play(fails, closes_first=closes_first), ZeroDivisionError)
    assert not await shutdown.left()


@either_order
async def test_a17_once_as_the_client_closes(shutdown: Shutdown, closes_first: bool) -> None:
    """A run that has returned counts: it does not run again."""

    def guarded(client: Redlock) -> Any:
        @client.once(lambda: shutdown.name, within=LONG)
        async def work() -> str:
            if client is shutdown.client:
                await shutdown.stopped()
            return "ran"

        return work

    assert await shutdown.play(lambda _: guarded(shutdown.client)(), closes_first=closes_first) == "ran"
    assert await guarded(shutdown.observer)() is Skipped.DONE


@either_order
async def test_a17_a_release_is_not_called_unreachable(
    shutdown: Shutdown, closes_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The servers answer, so no warning says that the hold can only expire."""
    await shutdown.play(a_block, closes_first=closes_first)
    assert not caplog.records


async def test_a17_a_block_that_ends_after_the_client_closed(shutdown: Shutdown) -> None:
    """Its lease was lost and released as the client closed. The block raises that, and nothing else."""
    lock = shutdown.client(shutdown.name, cancel_on_lost=False)
    with pytest.raises(LockLost) as caught:
        async with lock:
            await shutdown.client.aclose()
    assert caught.value.reason == "closed"
    assert not await shutdown.left()


# -- what is taken, or under way -------------------------------------------------------------------------------------


@either_order
@pytest.mark.parametrize("kind", ["mutex", "read", "semaphore"])
async def test_a17_an_acquire_as_the_client_closes(shutdown: Shutdown, kind: str, closes_first: bool) -> None:
    """It raises that the client was closed, and its grant is released."""

    async def asks(shutdown: Shutdown) -> Lease | None:
        client, name = shutdown.client, shutdown.name
        lock = {"mutex": client(name), "read": client.read(name), "semaphore": client.semaphore(name, 1)}[kind]
        await shutdown.stopped()
        return await lock.acquire(timeout=LIMIT)

    assert isinstance(await shutdown.play(asks, closes_first=closes_first), ConfigError)
    assert not await shutdown.left()


@either_order
async def test_a17_a_waiter_as_the_client_closes(shutdown: Shutdown, closes_first: bool) -> None:
    """It times out in that turn, and leaves no ticket behind the holder."""
    holder = await shutdown.observer(shutdown.name).acquire(timeout=None)

    async def waits(shutdown: Shutdown) -> Any:
        waiting = asyncio.create_task(_awaited(shutdown.client(shutdown.name).acquire(timeout=None)))
        while not (await shutdown.observer.inspect(shutdown.name)).waiters:
            await turns(1)
        await shutdown.stopped()
        waiting.cancel()
        return (await asyncio.gather(waiting, return_exceptions=True))[0]

    result = await shutdown.play(waits, closes_first=closes_first)
    assert isinstance(result, (asyncio.CancelledError, ConfigError))
    assert not (await shutdown.observer.inspect(shutdown.name)).waiters
    await holder.release()
    assert not await shutdown.left()


@either_order
async def test_a17_an_adoption_as_the_client_closes(shutdown: Shutdown, closes_first: bool) -> None:
    """The adopted hold is released; or nothing was adopted, and the handle serves another client."""
    handle = await (await shutdown.observer(shutdown.name).acquire(timeout=None)).detach()

    async def adopts(shutdown: Shutdown) -> Lease:
        await shutdown.stopped()
        return await shutdown.client.adopt(handle)

    assert isinstance(await shutdown.play(adopts, closes_first=closes_first), ConfigError)
    if await shutdown.left():
        await (await shutdown.observer.adopt(handle)).release()
    assert not await shutdown.left()


async def test_a17_an_adoption_that_meets_an_outage_as_the_client_closes(shared_urls: list[str], name: str) -> None:
    """It stops at once, not after its patience."""
    dead = [f"unix:///nowhere/{name}/{each}" for each in range(2)]
    async with Redlock(shared_urls[0]) as alone:
        shutdown = Shutdown(Redlock(shared_urls[0], *dead, lease=LONG, patience=LONG), alone, name)
        handle = await (await alone(name).acquire(timeout=None)).detach()

        async def adopts(shutdown: Shutdown) -> Lease:
            adopting = asyncio.create_task(shutdown.client.adopt(handle))
            while not any(map(pauses, acquisitions_of(shutdown.client))):
                await turns(1)
            await shutdown.stopped()
            return await adopting

        assert isinstance(await shutdown.play(adopts, closes_first=False), ConfigError)


@either_order
async def test_a17_an_extend_as_the_client_closes(shutdown: Shutdown, closes_first: bool) -> None:
    """The lease is lost with its client, and released."""

    async def extends(shutdown: Shutdown) -> None:
        lease = await shutdown.client(shutdown.name).acquire(timeout=None)
        await shutdown.stopped()
        await lease.extend()

    lost = await shutdown.play(extends, closes_first=closes_first)
    assert isinstance(lost, LockLost)
    assert lost.reason == "closed"
    assert not await shutdown.left()


@either_order
async def test_a17_a_detach_as_the_client_closes(shutdown: Shutdown, closes_first: bool) -> None:
    """Either it returned a handle, which another client adopts; or the lease is lost with its client, and released."""

    async def detaches(shutdown: Shutdown) -> str:
        lease = await shutdown.client(shutdown.name).acquire(timeout=None)
        await shutdown.stopped()
        return await lease.detach()

    result = await shutdown.play(detaches, closes_first=closes_first)
    if isinstance(result, str):
        await (await shutdown.observer.adopt(result)).release()
    else:
        assert isinstance(result, LockLost)
    assert not await shutdown.left()


@either_order
async def test_a17_a_break_as_the_client_closes(shutdown: Shutdown, closes_first: bool) -> None:
    """Either it returns that it broke the lock, and did; or it raises that the client was closed, and did nothing."""
    held = await shutdown.observer(shutdown.name, cancel_on_lost=False).acquire(timeout=None)

    async def breaks(shutdown: Shutdown) -> bool:
        await shutdown.stopped()
        return await shutdown.client.break_lock(shutdown.name)

    result = await shutdown.play(breaks, closes_first=closes_first)
    if result is True:
        assert await asyncio.wait_for(held.wait_lost(), LIMIT)
    else:
        assert isinstance(result, ConfigError)
        await held.release()
    assert not await shutdown.left()


# -- what is passed on -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("next_is_cancelled", [False, True])
async def test_a18_a_hold_passed_on_as_the_client_closes(shutdown: Shutdown, next_is_cancelled: bool) -> None:
    """The next task of the local queue gets the hold in that turn, cannot use it, and releases it."""
    passed: list[asyncio.Task[Any]] = []

    async def passes_on(shutdown: Shutdown) -> str:
        lock = shutdown.client(shutdown.name)
        async with lock:
            passed.extend(asyncio.create_task(_awaited(lock.acquire(timeout=None))) for _ in range(3))
            await turns(2)
            await shutdown.stopped()
            if next_is_cancelled:
                asyncio.get_running_loop().call_soon(passed[0].cancel)
        return "left"

    assert await shutdown.play(passes_on, closes_first=False) == "left"
    result = await asyncio.gather(*passed, return_exceptions=True)
    assert all(isinstance(each, (ConfigError, asyncio.CancelledError, LockNotHeld)) for each in result)
    assert not await shutdown.left()


# -- the second round of an acquire ----------------------------------------------------------------------------------


class Unanswering(Memory):
    """A store that carries an extend out, and does not answer it while it is silent."""

    deaf = False

    def decide(self, key: str, op: Op, answer: Callable[[list[object]], object]) -> None:
        super().decide(key, op, (lambda reply: None) if self.deaf and op.verb is Verb.EXTEND else answer)


@pytest.mark.parametrize("what", ["acquire", "adopt"])
async def test_a17_the_second_round_as_the_client_closes(name: str, what: str) -> None:
    """The counters of the nodes differ, so a second round raises them. It is interrupted like the first, and undone."""
    clock = FakeClock()
    stores = [Unanswering(clock) for _ in range(3)]
    async with Redlock(*stores) as client, Redlock(*stores) as other:
        handle = await (await other(name).acquire(timeout=None)).detach() if what == "adopt" else ""
        for store, fence in zip(stores, (2**52, 2**51, 2**50), strict=True):
            store.deaf = True
            store.asked.clear()
            set_state(store, name, replace(state_of(store, name), fence=fence, fence_ends=clock.wall() + LONG))
        asked = client.adopt(handle) if what == "adopt" else client(name).acquire(timeout=None)
        asking = asyncio.create_task(_awaited(asked))
        async with asyncio.timeout(LIMIT):
            while not all(Verb.EXTEND in [verb for verb, _ in store.asked] for store in stores):
                await turns(1)
            await client.aclose()
            with pytest.raises(ConfigError):
                await asking
        assert not any(state_of(store, name).holds for store in stores)
