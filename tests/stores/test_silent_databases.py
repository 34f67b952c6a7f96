"""A database that went silent, and a client that closes or a program that ends (HAZARDS F2). The programs are real
processes, since the end of a process is what counts: its threads and sockets are part of it."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from asynclock import Redlock
from asynclock.stores.sql import SQLStore, limits, pool
from asynclock.stores.sql.drivers import creator_of
from tests.support.programs import DATABASES, PYTHONPATH, Program
from tests.support.proxy import TcpProxy
from tests.support.sql_states import idle_lines_of
from tests.support.waiters import LIMIT, until

of_databases = pytest.mark.xdist_group("database-programs")  # one process imports the drivers for all
DRIVERS = {"postgresql": "postgresql+asyncpg", "mariadb": "mariadb+asyncmy", "mysql": "mysql+asyncmy"}

HOLDER = """
import asyncio, os, sys, threading, time
from asynclock import Redlock

def sockets():
    return sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket") for fd in os.listdir("/proc/self/fd")
               if os.path.lexists(f"/proc/self/fd/{fd}"))

async def main(url, closes, renew):
    before = sockets()
    if "+" in url:
        from sqlalchemy.ext.asyncio import create_async_engine
        from asynclock.stores.sql import SQLStore
        client = Redlock(SQLStore(create_async_engine(url, pool_pre_ping=True)), lease=30, patience=20)
    else:
        client = Redlock(url, lease=30, renew=renew, patience=20)
    leases = await asyncio.gather(*(client(f"silent:{os.getpid()}:{n}").acquire(timeout=None) for n in range(6)))
    print("holds", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    if closes == "closes":
        began = time.monotonic()
        await client.aclose()
        print(f"closed {time.monotonic() - began}", flush=True)
        for _ in range(20):
            await asyncio.sleep(0)
        names = [each.name for each in threading.enumerate() if "asynclock" in each.name]
        print(f"left {names} {0 if '+' in url else sockets() - before}", flush=True)

asyncio.run(main(*sys.argv[1:4]))
"""

SHORT = """
import asyncio, sys
from asynclock import Redlock

async def main():
    async with Redlock(sys.argv[1], renew="thread", lease=30, connect_timeout=9) as client, client(sys.argv[2]):
        pass

asyncio.run(main())
"""


@pytest.fixture(params=["postgresql", "mariadb"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
async def network(url: str) -> AsyncIterator[TcpProxy]:
    async with TcpProxy(urlsplit(url).port or 0) as proxy:
        yield proxy


def through(network: TcpProxy, url: str) -> str:
    return url.replace(f":{urlsplit(url).port}", f":{network.port}")


def of_driver(url: str) -> str:
    scheme, _, rest = url.partition(":")
    return f"{DRIVERS[scheme]}:{rest}"


def silence(network: TcpProxy) -> None:
    """No packet passes any more, and no connection is closed. New ones are accepted, and carry nothing."""
    network.drop_replies = network.drop_requests = True


def program(text: str, *args: str) -> Program:
    return Program(
        ["-c", text, *args],
        DATABASES,
        env={"PYTHONPATH": PYTHONPATH, "PATH": "/usr/bin:/bin"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@of_databases
@pytest.mark.parametrize("closes", ["closes", "ends"])
@pytest.mark.parametrize("renew", ["thread", "loop", "of an engine"])
async def test_f2_a_program_ends_over_a_silent_database(url: str, network: TcpProxy, closes: str, renew: str) -> None:
    """Its client closes in 3 s, with its threads and sockets; without a close `asyncio.run` ends. An engine of the
    user keeps its own connections."""
    address, how = through(network, url), "thread" if renew == "thread" else "True"
    if renew == "of an engine":
        address = of_driver(address)
    process = program(
        HOLDER.replace("renew=renew", f"renew={how!r}" if how == "thread" else "renew=True"), address, closes, how
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(LIMIT):
            assert await asyncio.to_thread(process.stdout.readline) == b"holds\n"
        silence(network)
        out, err = await asyncio.to_thread(process.communicate, b"\n", LIMIT)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, err.decode()
    assert b"Traceback" not in err
    assert b"never retrieved" not in err
    if closes == "closes":
        closed, left = out.decode().splitlines()
        assert float(closed.split()[1]) < 3 + LIMIT / 10  # the machine may be busy
        assert left == "left [] 0"


async def test_f2_a_client_of_a_silent_database_logs_no_traceback(
    url: str, network: TcpProxy, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection that it keeps is closed over a network that carries nothing any more."""
    client = Redlock(SQLStore(through(network, url)))
    async with client(name):
        pass
    silence(network)
    await client.aclose()
    assert "Traceback" not in caplog.text


async def test_f2_a_connection_that_comes_back_after_the_close_is_closed(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow server answers the last statement only after the pool of SQLAlchemy was closed."""
    store = SQLStore(url)
    client = Redlock(store)
    async with client(name):
        pass
    drivers = [line.driver for line in idle_lines_of(store)]
    monkeypatch.setattr(pool, "CLOSING", 0.0)  # of all that the pool waits for before that
    await client.aclose()
    await until(lambda: all(is_closed(driver) for driver in drivers))


def is_closed(driver: Any) -> bool:
    """Whether the connection of asyncpg or asyncmy is closed."""
    return bool(driver.is_closed() if hasattr(driver, "is_closed") else limits.is_cut(driver))


@of_databases
async def test_a3_short_programs_with_a_thread_print_nothing(postgresql_url: str, name: str) -> None:
    """The thread of each is told to stop while it connects."""
    running = [program(SHORT, postgresql_url, f"{name}:{number}") for number in range(4)]
    try:
        said = [await asyncio.to_thread(each.communicate, timeout=2 * LIMIT) for each in running]
    finally:
        for each in running:
            each.kill()
    assert said == [(b"", b"")] * 4


@pytest.mark.parametrize("own", [True, False])
async def test_f2_an_idle_connection_that_was_cut_is_not_logged(
    url: str, network: TcpProxy, name: str, own: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLAlchemy would log an error with a traceback for a broken connection that goes back to its pool."""
    monkeypatch.setattr(pool, "_KEPT", 0.3)
    engine = None if own else create_async_engine(of_driver(through(network, url)))
    with caplog.at_level(logging.WARNING):
        async with Redlock(through(network, url) if engine is None else SQLStore(engine)) as client:
            async with client(name):
                pass
            network.freeze()
            await asyncio.sleep(0.6)  # the connection is given back meanwhile
            network.cut()
            async with client(name):
                pass
        if engine is not None:
            await engine.dispose()
    assert [each.getMessage() for each in caplog.records if each.name.startswith("sqlalchemy")] == []


async def test_f2_a_call_that_ignores_its_cancel_is_cut_and_left_behind() -> None:
    """As a driver that asks the server to end its statement. The caller goes on when its time is up, and the call ends
    when its connection is gone."""
    connection, ended = asyncio.Event(), asyncio.Event()

    async def call() -> None:
        while not connection.is_set():
            try:
                await connection.wait()
            except asyncio.CancelledError:
                continue
        ended.set()

    async with asyncio.timeout(LIMIT):
        with pytest.raises(TimeoutError):
            await limits.limited(call(), 0.01)
        assert not ended.is_set()
        with pytest.raises(TimeoutError):
            await limits.limited(call(), 0.01, cut=connection.set)
        await ended.wait()


async def test_a3_a_connect_that_is_cancelled_leaves_no_error(postgresql_url: str) -> None:
    """In whichever turn of the event loop the cancel comes: asyncio logs no exception that was never retrieved."""
    at, logged = urlsplit(postgresql_url), list[str]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: logged.append(context["message"]))
    connect = creator_of("asyncpg", LIMIT)
    assert connect is not None
    turns, cancelled = 0, True
    while cancelled:
        task = asyncio.ensure_future(connect(host=at.hostname, port=at.port, user=at.username, database="postgres"))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        try:
            await (await task).close()
        except asyncio.CancelledError:
            turns += 1 + turns // 20  # on a busy machine a connect takes thousands of turns, and nearly all are alike
        else:
            cancelled = False
        del task
        for _ in range(5):  # the transport calls connection_lost in a later turn
            await asyncio.sleep(0)
        gc.collect(1)  # they are young
    assert turns > 5
    assert logged == []
