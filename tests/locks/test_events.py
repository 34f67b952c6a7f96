"""What `subscribe` tells of locks: each acquire, release, loss and renewal, on every deployment and of every kind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

from asynclock import ConfigError, LockLost, QuorumUnavailable, Redlock, SelfDeadlock
from asynclock.events import (
    Acquired,
    Broken,
    Detached,
    Event,
    Lost,
    NodeDown,
    Released,
    ReleaseFailed,
    Renewed,
    TimedOut,
    Unavailable,
)
from tests.support.probes import intercept_notices, renew_now
from tests.support.servers import Server
from tests.support.still_clock import Still, turns
from tests.support.told import KINDS, Told, told
from tests.support.waiters import LIMIT, LONG, until

each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
async def test_an_acquire_and_its_release_are_told(make: Callable[..., Redlock], name: str, kind: str) -> None:
    """With the name, the kind, the label and the times; in the order in which they happen."""
    client, (called, lock_of) = make(), KINDS[kind]
    lock = lock_of(client, name, label="orders")
    with told(client) as seen:
        async with lock:
            assert seen.named() == ["Acquired"]
        assert seen.named() == ["Acquired", "Released"]
    (acquired,), (released,) = seen.of(Acquired), seen.of(Released)
    assert (acquired.name, acquired.kind, acquired.label) == (lock.name, called, "orders")
    assert (released.name, released.kind, released.label) == (lock.name, called, "orders")
    assert 0 <= acquired.waited < LIMIT
    assert 0 <= released.held_for < LIMIT


@each_kind
async def test_a_try_in_vain_is_told(make: Callable[..., Redlock], name: str, kind: str) -> None:
    """Whether another client holds the name or another task of this one."""
    client, (called, lock_of) = make(node_timeout=LIMIT / 4), KINDS[kind]
    await client.health()  # it connects before the timeout begins
    for holder in (make(), client):
        async with lock_of(holder, name):
            with told(client) as seen:
                assert await asyncio.create_task(_acquire(lock_of(client, name, label="x"), 0)) is None
            assert seen.named() == ["TimedOut"]
            (event,) = seen.of(TimedOut)
            assert (event.kind, event.label) == (called, "x")
            assert 0 <= event.waited < LIMIT


async def test_an_event_says_whether_the_acquire_had_to_wait(name: str) -> None:
    """For another client, or for another task of its own; with a lease or in vain."""
    still = Still(1, name)
    async with still.client(lease=LONG) as client, still.client(lease=LONG) as other:
        for holder in (other, client):
            lease = await holder(name).acquire(timeout=None)
            with told(client) as seen:
                one_try, waiting, in_vain = (
                    asyncio.create_task(client(name).acquire(timeout=timeout)) for timeout in (0, None, 7.0)
                )
                await turns()
                await still.until(still.clock.now() + 7.0)
                assert (await one_try, await in_vain) == (None, None)
                await lease.release()
                got = await waiting
                assert got is not None
                await got.release()
            assert [each.had_to_wait for each in seen.of(TimedOut)] == [False, True]
            assert [each.had_to_wait for each in seen.of(Acquired)] == [True]


@each_kind
@pytest.mark.parametrize("nodes", [1, 5])
async def test_a_wait_in_vain_is_told(name: str, kind: str, nodes: int) -> None:
    """The same, with the time that it took."""
    still, (called, lock_of) = Still(nodes, name), KINDS[kind]
    async with still.client(lease=LONG) as client, still.client(lease=LONG) as other:
        for holder in (other, client):
            async with lock_of(holder, name):
                with told(client) as seen:
                    waiting = asyncio.create_task(_acquire(lock_of(client, name, label="x"), 7.0))
                    await turns()
                    await still.until(still.clock.now() + 7.0)
                    assert await waiting is None
                assert seen.named() == ["TimedOut"]
                (event,) = seen.of(TimedOut)
                assert (event.kind, event.label, event.waited) == (called, "x", pytest.approx(7.0))


async def _acquire(lock: Any, timeout: float) -> Any:
    return await lock.acquire(timeout=timeout)


async def test_a_reader_is_a_kind_of_its_own(redlock: Redlock, name: str) -> None:
    """Readers and writers of one name are told apart."""
    with told(redlock) as seen:
        async with redlock.read(name):
            pass
        async with redlock.write(name):
            pass
    assert [event.kind for event in seen.of(Acquired)] == ["read", "write"]


async def test_each_entry_of_a_reentrant_lock_is_told(redlock: Redlock, name: str) -> None:
    """An inner entry asks no server, and is reported as the outer one is."""
    lock = redlock(name, reentrant=True)
    with told(redlock) as seen:
        async with lock, lock:
            pass
    assert seen.named() == ["Acquired", "Acquired", "Released", "Released"]


async def test_a_hold_passed_to_a_cancelled_task_is_not_told(redlock: Redlock, name: str) -> None:
    """The task never had a lease: an acquire that is cancelled tells nothing, and as many releases are reported as
    acquires."""
    lock = redlock(name)
    with told(redlock) as seen:
        first = await lock.acquire(timeout=None)
        second, third = (asyncio.create_task(lock.acquire(timeout=None)) for _ in range(2))
        await asyncio.sleep(0)  # both wait in the local queue
        await first.release()
        releasing = asyncio.create_task((await second).release())
        await asyncio.sleep(0)  # the hold is passed on, and the third task has not run since
        third.cancel()
        with pytest.raises(asyncio.CancelledError):
            await third
        await releasing
        assert not (await redlock.inspect(name)).holders
    assert seen.named() == ["Acquired", "Released"] * 2


async def test_tasks_of_one_process_are_told_each(redlock: Redlock, name: str) -> None:
    """A hold that is passed on within the process is a release and an acquire, as any other."""
    lock = redlock(name)

    async def work() -> None:
        async with lock:
            await asyncio.sleep(0)

    with told(redlock) as seen:
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*(work() for _ in range(5)))
    assert len(seen.of(Acquired)) == len(seen.of(Released)) == 5


async def test_a_detached_and_adopted_lease_is_told(make: Callable[..., Redlock], name: str) -> None:
    """By the client that detaches and by the one that adopts."""
    first, second = make(), make()
    with told(first) as before, told(second) as after:
        lease = await first(name).acquire(timeout=None)
        adopted = await second.adopt(await lease.detach(), label="taken over")
        await adopted.release()
    assert before.named() == ["Acquired", "Renewed", "Detached"]
    assert before.of(Detached)[0].name == name
    assert after.named() == ["Acquired", "Released"]
    assert after.of(Acquired)[0].label == "taken over"


@each_kind
async def test_a_renewal_is_told(make: Callable[..., Redlock], name: str, kind: str) -> None:
    """With its outcome."""
    client, (called, lock_of) = make(), KINDS[kind]
    async with lock_of(client, name, lease=LONG, label="long") as lease:
        with told(client) as seen:
            renew_now(lease)
            await until(lambda: seen.of(Renewed))
    (event,) = seen.of(Renewed)
    assert (event.kind, event.label, event.outcome) == (called, "long", "ok")


async def test_a_failed_renewal_and_a_failed_release_are_told(server: Server, name: str) -> None:
    """The server is stopped: the renewal fails, and the release has no majority."""
    async with Redlock(server.url, lease=LONG, node_timeout=1.0, patience=0) as client:
        lease = await client(name, label="x").acquire(timeout=None)
        server.freeze()
        with told(client) as seen:
            renew_now(lease)
            await until(lambda: seen.of(Renewed))
            await lease.release()
        server.thaw()
    assert [event.outcome for event in seen.of(Renewed)] == ["failed"]
    assert seen.named() == ["Renewed", "Released", "ReleaseFailed"]
    (failed,) = seen.of(ReleaseFailed)
    assert (failed.name, failed.label) == (name, "x")
    assert str(server.path) in failed.error


@each_kind
async def test_a_lost_lease_is_told(redlock: Redlock, name: str, kind: str) -> None:
    """With the reason of its LockLost; it is not reported as released."""
    called, lock_of = KINDS[kind]
    with told(redlock) as seen, pytest.raises(LockLost):
        async with lock_of(redlock, name, max_hold=0.05, label="x"):
            await asyncio.Event().wait()
    assert seen.named() == ["Acquired", "Lost"]
    (event,) = seen.of(Lost)
    assert (event.kind, event.label, event.reason) == (called, "x", "max_hold")
    assert event.held_for >= 0.05


async def test_a_broken_lock_is_told_by_both(make: Callable[..., Redlock], name: str) -> None:
    """The operator's client tells Broken, the holder's client Lost."""
    operator, client = make(), make()
    with told(operator) as broke, told(client) as lost:
        with pytest.raises(LockLost):
            async with client(name):
                breaking = asyncio.create_task(operator.break_lock(name))
                await asyncio.Event().wait()
        assert await breaking
        assert not await operator.break_lock(name)
    assert broke.of(Broken) == [Broken(name)]
    assert [event.reason for event in lost.of(Lost)] == ["broken"]


async def test_an_outage_is_told(server: Server, name: str) -> None:
    """An acquire that raises QuorumUnavailable tells Unavailable, not TimedOut."""
    async with aclosing(Redlock(server.url, patience=1.0, node_timeout=1.0)) as client:
        async with client(name):
            pass
        server.freeze()
        with told(client) as seen, pytest.raises(QuorumUnavailable):
            await client(name, label="x").acquire()
        server.thaw()
    assert seen.named() == ["Unavailable"]
    (event,) = seen.of(Unavailable)
    assert (event.name, event.kind, event.label) == (name, "mutex", "x")
    assert event.waited >= 0.05


async def test_an_acquire_that_is_cancelled_tells_nothing(redlock: Redlock, name: str) -> None:
    """Nor does one that would wait for itself. The next one is told."""
    async with redlock(name):
        with told(redlock) as seen:
            waiting = asyncio.create_task(_acquire(redlock(name), None))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            with pytest.raises(SelfDeadlock):
                await redlock(name).acquire()
            assert seen.named() == []
    with told(redlock) as seen:
        async with redlock(name):
            assert seen.named() == ["Acquired"]


async def test_a_release_that_finds_the_lock_taken_tells_the_loss(make: Callable[..., Redlock], name: str) -> None:
    """The client learns of the loss only from its release: LockLost, and Lost after Released."""
    client = make()
    lease = await client(name, lease=LONG, label="x").acquire(timeout=None)
    intercept_notices(client, lambda index, notice: None)  # it does not learn of the break
    assert await make().break_lock(name)
    with told(client) as seen, pytest.raises(LockLost) as caught:
        await lease.release()
    assert caught.value.reason == "broken"
    assert seen.named() == ["Released", "Lost"]
    (event,) = seen.of(Lost)
    assert (event.name, event.label, event.reason) == (name, "x", "broken")


async def test_a_client_that_closes_tells_what_it_loses(make: Callable[..., Redlock], name: str) -> None:
    """Reason "closed"."""
    client = make()
    with told(client) as seen:
        lease = await client(name).acquire(timeout=None)
        await client.aclose()
    assert not lease.held
    assert [event.reason for event in seen.of(Lost)] == ["closed"]


# -- listeners -------------------------------------------------------------------------------------------------------


async def test_unsubscribe_ends_it(redlock: Redlock, name: str) -> None:
    """A second call of it has no effect, and other listeners go on."""
    first, second = Told(), Told()
    unsubscribe = redlock.subscribe(first.all.append)
    redlock.subscribe(second.all.append)
    for _ in range(2):
        async with redlock(name):
            pass
        unsubscribe()
    assert len(first.of(Acquired)) == 1
    assert len(second.of(Acquired)) == 2


async def test_a_listener_may_unsubscribe_within_its_call(redlock: Redlock, name: str) -> None:
    """And is not called again; the listener after it is."""
    calls: list[Event] = []
    after = Told()

    def listener(event: Event) -> None:
        calls.append(event)
        unsubscribe()

    async with redlock(name):  # connected
        pass
    unsubscribe = redlock.subscribe(listener)
    redlock.subscribe(after.all.append)
    async with redlock(name):
        pass
    assert len(calls) == 1
    assert after.named() == ["Acquired", "Released"]


async def test_a_listener_that_raises_is_logged_once(
    redlock: Redlock, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The lock works, and the other listeners are called."""
    after = Told()

    def listener(event: Event) -> None:
        raise RuntimeError("a fault in the listener")

    redlock.subscribe(listener)
    redlock.subscribe(after.all.append)
    for _ in range(3):
        async with redlock(name) as lease:
            assert lease.held
    faults = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(faults) == 1
    assert "listener" in faults[0].getMessage()
    assert faults[0].exc_info is not None
    assert after.named() == ["Acquired", "Released"] * 3


async def test_a_listener_that_raises_a_cancelled_error_harms_nothing(
    redlock: Redlock, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It may read the result of a future that was cancelled. No task is cancelled by it, no connection is closed, and
    the lease is renewed."""
    after = Told()
    cancelled = asyncio.get_running_loop().create_future()
    cancelled.cancel()
    redlock.subscribe(lambda event: cancelled.result())
    redlock.subscribe(after.all.append)
    lease = await redlock(name).acquire(timeout=None)
    renew_now(lease)
    await until(lambda: after.of(Renewed))
    await lease.release()
    assert after.named() == ["Acquired", "Renewed", "Released"]
    assert not after.of(NodeDown)
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1


def test_a_listener_is_a_plain_function() -> None:
    """A coroutine function would never be awaited, and something that is no function never called."""
    client = Redlock("memory:")

    async def listener(event: Event) -> None: ...

    class Listener:
        async def __call__(self, event: Event) -> None: ...

    for wrong in (listener, Listener()):
        with pytest.raises(ConfigError, match="not awaited"):
            client.subscribe(wrong)
    with pytest.raises(ConfigError, match="a function of one event, not list"):
        client.subscribe([])  # type: ignore[arg-type]


async def test_without_a_listener_no_event_is_made(
    redlock: Redlock, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an acquire, a refusal and a release; with one, each makes an event."""
    made: list[str] = []
    for event in (Acquired, TimedOut, Released):

        def counted(self: Event, *values: Any, init: Callable[..., None] = event.__init__) -> None:
            made.append(type(self).__name__)
            init(self, *values)

        monkeypatch.setattr(event, "__init__", counted)

    async def cycle() -> None:
        async with redlock(name):
            assert await asyncio.create_task(_acquire(redlock(name), 0)) is None

    await cycle()
    assert made == []
    redlock.subscribe(lambda event: None)
    await cycle()
    assert made == ["Acquired", "TimedOut", "Released"]


async def test_a_listener_that_comes_late_hears_the_release(redlock: Redlock, name: str) -> None:
    """Of a lease that was acquired before it subscribed."""
    async with redlock(name):
        listening = told(redlock)
        seen = listening.__enter__()
    assert seen.named() == ["Released"]
    listening.__exit__(None, None, None)


async def test_an_exception_in_the_body_is_told_as_a_release(redlock: Redlock, name: str) -> None:
    """The lease was given back; what the body did is not the lock's to tell."""
    with told(redlock) as seen, pytest.raises(KeyError):
        async with redlock(name):
            raise KeyError
    assert seen.named() == ["Acquired", "Released"]
