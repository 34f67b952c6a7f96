"""A listener that raises KeyboardInterrupt or SystemExit: the name is free, and no waiter misses its turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from asynclock import Redlock
from asynclock.events import Acquired, Event, Released
from asynclock.protocol.acquisition import Acquisition
from tests.support.probes import acquisitions_of
from tests.support.servers import Server
from tests.support.waiters import LIMIT, LONG, until


@pytest.fixture
async def event_loop_errors() -> AsyncIterator[list[BaseException]]:
    """The errors that come out of callbacks of the loop."""
    loop, errors = asyncio.get_running_loop(), list[BaseException]()
    loop.set_exception_handler(lambda loop, context: errors.append(context["exception"]))
    yield errors
    loop.set_exception_handler(None)


class Stop(BaseException):
    """As KeyboardInterrupt, which would end the test run."""


async def test_a_listener_that_stops_the_program_leaves_no_key(
    make: Callable[..., Redlock], name: str, event_loop_errors: list[BaseException]
) -> None:
    """At Acquired its BaseException reaches the caller, who gets no lease, and the name is free at once. At Released it
    comes out of the loop, after the next task has got its turn."""
    client = make(lease=LONG)

    def stop(event: Event) -> None:
        if isinstance(event, Acquired | Released):
            raise Stop

    unsubscribe = client.subscribe(stop)
    async with asyncio.timeout(LIMIT):
        with pytest.raises(Stop):
            await client(name).acquire()
        unsubscribe()
        lease = await client(name).acquire(timeout=None)
        waiting = asyncio.create_task(client(name).acquire(timeout=None))
        await until(lambda: bool(acquisitions_of(client)))
        unsubscribe = client.subscribe(lambda event: stop(event) if isinstance(event, Released) else None)
        await lease.release()
        last = await waiting
        unsubscribe()
        await last.release()
    assert [type(each) for each in event_loop_errors] == [Stop, Stop]  # of the first caller's release, too


async def test_an_interrupt_in_the_local_queue_ends_its_claim(
    server: Server, name: str, event_loop_errors: list[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A KeyboardInterrupt comes as the time of a task is up that waits behind another one: the task does not wait for
    ever."""

    def interrupted(self: Acquisition) -> None:
        raise Stop

    async with asyncio.timeout(LIMIT), Redlock(server.url) as other, Redlock(server.url) as client, other(name):
        asks = asyncio.create_task(client(name).acquire(timeout=None))
        await until(lambda: bool(acquisitions_of(client)))
        monkeypatch.setattr(Acquisition, "_refuse", interrupted)
        with pytest.raises(Stop):
            await client(name).acquire(timeout=0.2)
        asks.cancel()
        await asyncio.wait({asks})
    assert [type(each) for each in event_loop_errors] == [Stop]
