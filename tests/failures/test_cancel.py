"""HAZARDS A: cancellation and tasks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest

from asynclock import ConfigError, LockLost, Redlock
from asynclock.events import Lost, ReleaseFailed
from asynclock.quorum.ballot import Ballot
from asynclock.runtime.session import Session
from tests.support.cancelled_waits import Held
from tests.support.default_keys import key_of
from tests.support.probes import nodes_of, renew_now, valid_until
from tests.support.proxy import RELEASE, Proxy, cancelled_at
from tests.support.servers import Server
from tests.support.told import told
from tests.support.waiters import BRIEF, LIMIT, LONG, is_free, until

pytestmark = pytest.mark.both_loops("the loop delivers the cancel")


async def test_a1_cancelled_after_the_server_granted(server: Server, name: str) -> None:
    """The reply is on its way when the caller is cancelled: the hold is released, and the cancel goes on."""
    async with Proxy(server.path.with_suffix(".p"), server.path) as proxy, Redlock(proxy.url) as redlock:
        sent = proxy.request(b"acquire")
        proxy.hold_replies()
        caller = asyncio.create_task(redlock(name).acquire())
        await sent.wait()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        proxy.let_go()
        assert await is_free(redlock, name)
        assert not server.cli().exists(key_of(name))


async def test_a2_cancelled_during_release(server: Server, name: str) -> None:
    """The release completes all the same, and then the cancel goes on."""
    async with Proxy(server.path.with_suffix(".p"), server.path) as proxy, Redlock(proxy.url) as redlock:
        lease = await redlock(name).acquire(timeout=None)
        sent = proxy.request(*RELEASE)
        proxy.hold_replies()
        caller = asyncio.create_task(lease.release())
        await sent.wait()
        caller.cancel()
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()  # it waits for the server's reply, despite the cancel
        proxy.let_go()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert not server.cli().exists(key_of(name))


@pytest.mark.parametrize("why", ["outage", "lost"])
async def test_a2_a_release_that_fails_after_a_cancel_is_reported(server: Server, name: str, why: str) -> None:
    """The caller gets its cancel. The event and the log tell that the name stays taken, or that the lease was lost
    before."""
    async with Redlock(server.url, lease=LONG, node_timeout=0.3 if why == "outage" else LIMIT) as client:
        lease = await client(name).acquire(timeout=None)
        if why == "outage":
            server.freeze()
        else:
            assert server.cli().delete(key_of(name))
        with told(client) as seen:
            caller = asyncio.create_task(lease.release())
            await asyncio.sleep(0)
            caller.cancel()
            with pytest.raises(asyncio.CancelledError) as cancelled:
                await caller
        server.thaw()
    assert [event.name for event in seen.of(ReleaseFailed if why == "outage" else Lost)] == [name]
    if why == "lost":
        assert any("its key is gone" in note for note in cancelled.value.__notes__)


async def test_a3_no_task_is_lost_to_the_collector(server: Server, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """With a collection at each turn, waiting, renewals and undos go on, and no warning is printed."""
    async with Redlock(server.url, lease=LONG) as redlock:
        async with redlock(name) as lease:
            waiter = asyncio.create_task(redlock(name).acquire())
            ends = valid_until(lease)
            renew_now(lease)  # a lease short enough to wait for could end between two collections
            while valid_until(lease) == ends:  # until it was renewed
                gc.collect()
                await asyncio.sleep(0)
            waiter.cancel()
            await asyncio.wait({waiter})
            gc.collect()
        assert await is_free(redlock, name)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a4_release_while_the_loop_shuts_down(server: Server, name: str) -> None:
    """asyncio.run cancels the holder: the block's release is awaited; so is that of a client that was not closed."""

    left: list[Any] = []
    redlock = Redlock(server.url)

    async def leave_it_to_the_loop() -> None:
        inside = asyncio.Event()

        async def hold() -> None:
            async with redlock(name):
                inside.set()
                await asyncio.Event().wait()

        holder = asyncio.create_task(hold())
        await inside.wait()
        left.append(await redlock(f"{name}:left").acquire())
        assert server.cli().exists(key_of(name), key_of(f"{name}:left")) == 2
        assert not holder.done()

    with pytest.warns(ResourceWarning, match=":left"):
        asyncio.run(leave_it_to_the_loop())
    assert not server.cli().exists(key_of(name), key_of(f"{name}:left"))


async def test_a4_aclose_drains(server: Server, name: str) -> None:
    """aclose returns once the client's holds are released."""
    redlock = Redlock(server.url)
    lease = await redlock(name).acquire(timeout=None)
    await redlock.aclose()
    assert not server.cli().exists(key_of(name))
    assert not lease.held
    with pytest.raises(LockLost) as caught:
        await lease.release()
    assert caught.value.reason == "closed"


async def test_a6_a_holder_that_is_stuck_for_ever(make: Callable[..., Redlock], name: str) -> None:
    """max_hold ends the renewals: even a body that ignores its cancel loses the lease."""
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(pytest.raises(LockLost))
        lease = await stack.enter_async_context(make(node_timeout=0.2)(name, lease=0.6, max_hold=0.7))
        with pytest.raises(asyncio.CancelledError):
            await asyncio.Event().wait()
        assert not lease.held
        async with make()(name, timeout=LIMIT) as successor:
            assert successor.fence > lease.fence


async def test_a7_renewal_in_flight_while_released(server: Server, name: str) -> None:
    """A renewal that is not answered yet when the release is sent brings no key back."""
    async with Proxy(server.path.with_suffix(".p"), server.path) as proxy, Redlock(proxy.url, lease=LONG) as redlock:
        lease = await redlock(name).acquire(timeout=None)
        renewing = proxy.request(b"extend")
        renew_now(lease)
        await renewing.wait()
        proxy.hold_replies()
        releasing = asyncio.create_task(lease.release())
        await asyncio.sleep(0)
        proxy.let_go()
        await releasing
        assert await is_free(redlock, name)
        assert not server.cli().exists(key_of(name))


async def test_a10_a_cancel_while_waiting_is_raised(make: Callable[..., Redlock], name: str) -> None:
    """A cancel in the very turn of the grant is not swallowed: it is raised, and the grant is released."""
    client = make()
    for turns in range(12):
        caller = asyncio.create_task(client(name).acquire())
        for _ in range(turns):
            await asyncio.sleep(0)
        if not caller.cancel():
            await caller.result().release()
            continue
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert await is_free(client, name)


@pytest.fixture
async def held_by_a_fixture(redlock: Redlock, name: str) -> AsyncIterator[Any]:
    """Set-up, test and tear-down run in three tasks."""
    async with redlock(name) as lease:
        yield lease
    assert await is_free(redlock, name)


async def test_a11_left_in_another_task(held_by_a_fixture: Any, redlock: Redlock, name: str) -> None:
    """A block that one task enters and another one leaves works."""
    assert held_by_a_fixture.held
    assert not await is_free(redlock, name)


async def test_a11_loss_sets_the_event_only(redlock: Redlock, name: str) -> None:
    """The task that entered has ended: the loss cancels no task, and the end of the block raises LockLost."""
    lock = redlock(name, max_hold=BRIEF)
    lease = await asyncio.create_task(lock.__aenter__())
    assert await lease.wait_lost() is True
    with pytest.raises(LockLost):
        await lock.__aexit__(None, None, None)


async def test_a11_async_generator_closed_elsewhere(redlock: Redlock, name: str) -> None:
    """An async generator that holds a lock may be closed by another task while the first still lives."""

    async def holding() -> AsyncIterator[int]:
        async with redlock(name):
            yield 1

    generator = holding()
    opened, closed = asyncio.Event(), asyncio.Event()

    async def opener() -> None:
        await anext(generator)
        opened.set()
        await closed.wait()

    task = asyncio.create_task(opener())
    await opened.wait()
    await generator.aclose()  # type: ignore[attr-defined]
    closed.set()
    await task
    assert await is_free(redlock, name)


async def test_a12_the_bodys_exception_is_raised(redlock: Redlock, name: str) -> None:
    """The body raised and the lease was lost: the body's exception is raised, the loss is its note."""
    with pytest.raises(KeyError) as caught:
        async with redlock(name, max_hold=BRIEF) as lease:
            with contextlib.suppress(asyncio.CancelledError):
                await lease.wait_lost()
                await asyncio.Event().wait()
            raise KeyError("mine")
    assert any("max_hold" in note for note in caught.value.__notes__)


async def test_a13_an_anyio_scope_cancels_at_every_await(redlock: Redlock, name: str) -> None:
    """A handler in a cancelled scope still releases its lock before it ends."""
    async with anyio.create_task_group() as group:

        async def handler() -> None:
            async with redlock(name):
                group.cancel_scope.cancel()
                await anyio.sleep_forever()

        group.start_soon(handler)
    assert await is_free(redlock, name)


async def test_a13_a_release_in_a_cancelled_scope_sleeps(
    server: Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the release waits for its reply, the scope does not cancel it in each turn of the loop."""
    waits: list[Ballot] = []
    settled = Session.settled

    def counted(session: Session, ballot: Ballot) -> Any:
        waits.append(ballot)
        return settled(session, ballot)

    monkeypatch.setattr(Session, "settled", counted)
    async with Proxy(server.path.with_suffix(".p"), server.path) as proxy, Redlock(proxy.url) as client:
        lease = await client(name).acquire(timeout=None)
        proxy.hold_replies()
        waits.clear()
        with anyio.CancelScope() as scope:
            releasing = asyncio.get_running_loop().call_later(0.1, proxy.let_go)
            scope.cancel()
            await lease.release()
        releasing.cancel()
        assert not server.cli().exists(key_of(name))
        assert len(waits) <= 2


async def test_a14_one_lock_object_in_many_tasks(redlock: Redlock, name: str) -> None:
    """Each tenure is its own Lease: tokens never mix, and no task releases another's."""
    lock = redlock(name)
    fences: list[int] = []

    async def worker() -> None:
        async with lock as lease:
            await asyncio.sleep(0)
            assert lease.held
            fences.append(lease.fence)

    await asyncio.gather(*(worker() for _ in range(20)))
    assert fences == sorted(set(fences))
    assert len(fences) == 20


async def test_a15_a_lease_dropped_while_held(redlock: Redlock, name: str) -> None:
    """A ResourceWarning names it, and the watchdog renews it no more, so it expires."""

    async def drop() -> None:
        await redlock(name, lease=3.0).acquire()

    with pytest.warns(ResourceWarning, match=name):
        await drop()
        assert not await is_free(redlock, name)  # by now the last node's vote has come, which still knew the lease
        gc.collect()
    async with redlock(name, timeout=LIMIT):
        pass


@pytest.mark.parametrize("late", [False, True], ids=["at-once", "as-it-wakes"])
@pytest.mark.parametrize("what", ["acquire", "extend", "release", "wait", "block"])
async def test_a16_cancel_at_every_await(make: Callable[..., Redlock], name: str, what: str, late: bool) -> None:
    """Await by await: no key and no task is left, whichever await is cut."""
    client, other = make(), make()
    await client.health()
    await other.health()
    before = asyncio.all_tasks()
    for index in range(100):
        here = f"{name}:{index}"
        lease = await client(here).acquire(timeout=None) if what in ("extend", "release") else None
        blocker = Held(await other(here).acquire(timeout=None)) if what == "wait" else None
        freeing = asyncio.create_task(blocker.end_when_idle(client)) if blocker is not None else None

        async def run(here: str = here, lease: Any = lease) -> None:
            if what in ("extend", "release"):
                await getattr(lease, what)()
            elif what == "block":
                async with client(here):
                    await asyncio.sleep(0)
            else:
                await (await client(here).acquire(timeout=None)).release()

        hit = await cancelled_at(run, index, late=late)
        if lease is not None and lease.held:
            await lease.release()
        if blocker is not None and freeing is not None:
            freeing.cancel()
            await asyncio.wait({freeing})
            await blocker.ended()
        assert await is_free(client, here)
        if not hit:
            break
    else:
        pytest.fail("it never came to an end")
    assert index > 0
    assert asyncio.all_tasks() <= before  # a busy machine may still have connected to one of five then


async def test_a12_released_by_hand_inside_the_block(redlock: Redlock, name: str) -> None:
    """The end of the block has nothing left to do, and does not replace the body's exception."""
    async with redlock(name) as lease:
        await lease.release()
    lock = redlock(name)
    with pytest.raises(KeyError):
        async with lock:
            await lock.release()
            raise KeyError("mine")
    assert await is_free(redlock, name)


async def test_a14_a_block_released_early_ends_no_other_tenure(redlock: Redlock, name: str) -> None:
    """One Lock, two tasks: the end of the first block leaves the second task's tenure alone."""
    lock = redlock(name)
    inside, ended = asyncio.Event(), asyncio.Event()

    async def second() -> None:
        async with lock as lease:
            inside.set()
            await ended.wait()
            assert lease.held
            assert not await is_free(redlock, name)

    async with lock as lease:
        await lease.release()
        task = asyncio.create_task(second())
        await inside.wait()
    ended.set()
    await task


async def test_a14_a_lost_tenure_of_a_task_that_is_gone_is_no_second(redlock: Redlock, name: str) -> None:
    """`release` finds the one tenure that is open, though an older one was lost."""
    lock = redlock(name, lease=LONG)

    async def take() -> Any:
        return await lock.acquire(timeout=None)

    lost = await asyncio.create_task(take())
    assert await redlock.break_lock(name)
    assert await lost.wait_lost()
    open_one = await asyncio.create_task(take())
    await lock.release()
    assert not open_one.held


async def test_a4_a_client_that_closes_ends_its_acquires(make: Callable[..., Redlock], name: str) -> None:
    """Waiting tasks get ConfigError at once, and attempts on their way leave no key."""
    client, other = make(), make()
    async with other(name):
        waiting = [asyncio.create_task(client(name).acquire()) for _ in range(5)]
        fresh = [asyncio.create_task(client(f"{name}:{i}").acquire()) for i in range(5)]
        await asyncio.sleep(0)
        await client.aclose()
        results = await asyncio.gather(*waiting, *fresh, return_exceptions=True)
    assert all(isinstance(each, ConfigError) or (each is not None and not each.held) for each in results)
    for i in range(5):
        assert await is_free(other, f"{name}:{i}")


async def test_a4_a_cancelled_aclose_still_closes(server: Server, name: str) -> None:
    """The cancel goes on, and so does the closing."""
    async with Proxy(server.path.with_suffix(".p"), server.path) as proxy:
        client = Redlock(proxy.url)
        lease = await client(name).acquire(timeout=None)
        proxy.hold_replies()
        closing = asyncio.create_task(client.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        proxy.let_go()
        await until(lambda: not server.cli().exists(key_of(name)))
        await client.aclose()
        assert not lease.held
        assert nodes_of(client)[0].state.value == "closed"
