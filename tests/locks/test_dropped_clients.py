"""A client without references that was never closed: it warns, and lets its connection go."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from contextvars import Context
from typing import Any

import pytest
import redis

from asynclock import Lease, Redlock
from tests.support.default_keys import key_of
from tests.support.probes import session_of
from tests.support.servers import Server
from tests.support.still_clock import turns
from tests.support.waiters import LIMIT, LONG

pytestmark = pytest.mark.both_loops("the loop keeps what it has to call")


def connections(server: Server) -> int:
    """At the server, without the one that asks."""
    with redis.Redis.from_url(server.url) as operator:
        return len(operator.client_list()) - 1


async def disconnected(server: Server) -> None:
    async with asyncio.timeout(LIMIT):
        while connections(server):
            await asyncio.sleep(0.01)


async def use(server: Server, name: str) -> None:
    async with Redlock(server.url)(name):
        pass


async def keep(server: Server, name: str) -> Lease:
    return await Redlock(server.url, lease=LONG)(name).acquire(timeout=None)


async def test_a_dropped_client_warns_and_disconnects(server: Server, name: str) -> None:
    """The warning names its node."""
    with pytest.warns(ResourceWarning, match=f"<Redlock {server.url}> was dropped"):
        await use(server, name)
        gc.collect()
    await disconnected(server)


async def test_a_client_dropped_in_another_thread_disconnects(
    server: Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A garbage collector runs in any thread. It only schedules, so the loop closes the client. The client warns also
    if the loop has done so before the finalizer goes on."""
    client, loop, closed = [Redlock(server.url)], asyncio.get_running_loop(), threading.Event()
    schedule = loop.call_soon_threadsafe

    def schedule_and_wait(*arguments: Any, context: Context | None = None) -> None:
        schedule(*arguments, context=context)
        closed.wait(LIMIT)

    async with client[0](name):
        pass
    with pytest.warns(ResourceWarning, match="was dropped"):
        monkeypatch.setattr(loop, "call_soon_threadsafe", schedule_and_wait)
        dropping = asyncio.create_task(asyncio.to_thread(lambda: (client.clear(), gc.collect())))
        await disconnected(server)
        await turns(5)
        closed.set()
        await dropping


async def test_a_dropped_client_is_closed_in_each_loop_where_warnings_are_errors(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first warning ends the finalizer. By then the loops of all its sessions know."""
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: raised.append(unraisable.exc_value))
    clients, sessions = [Redlock("memory:")], []
    used, closed = threading.Event(), threading.Event()

    async def use_it() -> None:
        async with clients[0](name):
            pass
        sessions.append(session_of(clients[0]))

    async def use_in_thread() -> None:
        await use_it()
        used.set()
        async with asyncio.timeout(LIMIT):
            while not sessions[-1].closed:
                await asyncio.sleep(0.01)
        closed.set()

    await use_it()
    thread = threading.Thread(target=asyncio.run, args=(use_in_thread(),))
    thread.start()
    await asyncio.to_thread(used.wait, LIMIT)
    clients.clear()
    gc.collect()
    async with asyncio.timeout(LIMIT):
        while not (closed.is_set() and sessions[0].closed):
            await asyncio.sleep(0.01)
    thread.join(LIMIT)
    assert [type(each) for each in raised] == [ResourceWarning]


async def test_a_lease_outlives_its_dropped_client(server: Server, name: str) -> None:
    """The lease is held, and its release works. After that the connection goes."""
    with pytest.warns(ResourceWarning, match="was dropped"):
        lease = await keep(server, name)
        gc.collect()
    await lease.extend()
    with redis.Redis.from_url(server.url) as operator:
        assert operator.exists(key_of(name))
        await lease.release()
        assert not operator.exists(key_of(name))
    await disconnected(server)


async def test_a_closed_client_is_dropped_in_silence(
    server: Server, name: str, recwarn: pytest.WarningsRecorder
) -> None:
    """As is one that was never used."""

    async def use_well() -> None:
        Redlock(server.url)
        async with Redlock(server.url) as client, client(name):
            pass

    gc.collect()
    recwarn.clear()  # of the clients of earlier tests
    await use_well()
    gc.collect()
    assert not [each for each in recwarn if "was dropped" in str(each.message)]
