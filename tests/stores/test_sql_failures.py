"""What a client of a SQL store does when its server, its connections or another client fail."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from typing import Any

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from asynclock import QuorumUnavailable, Redlock
from asynclock.events import NodeDown, NodeUp
from asynclock.stores.sql import SQLStore, engines, listening
from asynclock.stores.sql.lines import AsyncmyLine, AsyncpgLine
from tests.support.probes import acquisitions_of, doubts_of, nodes_of, waits_for_notice
from tests.support.services.mariadb import MariaDB, own_mariadb
from tests.support.services.postgresql import PostgreSQL, own_postgresql
from tests.support.sql_states import idle_lines_of
from tests.support.waiters import LIMIT, LONG, decided, healthy, reconnected, until


@pytest.fixture(scope="module")
def server() -> Iterator[PostgreSQL]:
    """A server of the module's own. A test leaves it running."""
    with own_postgresql() as server:
        yield server


@pytest.fixture(scope="module")
def mariadb() -> Iterator[MariaDB]:
    with own_mariadb() as server:
        yield server


@contextmanager
def frozen(server: PostgreSQL) -> Iterator[None]:
    """The server and all its connections stand still. A process of the server may end before its signal comes."""
    stopped = server.group

    def send(number: signal.Signals) -> None:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    send(signal.SIGSTOP)
    try:
        yield
    finally:
        send(signal.SIGCONT)


async def test_a_killed_server_is_down_and_comes_back(server: PostgreSQL, name: str) -> None:
    """An acquire says what is wrong; the client tells NodeDown and NodeUp; a waiter is served once it is back."""
    events: list[Any] = []
    async with Redlock(server.url, patience=LIMIT) as client:
        client.subscribe(events.append)
        async with client(name):
            pass
        server.stop()
        with pytest.raises(QuorumUnavailable):
            await client(name).acquire(timeout=0)
        waiting = asyncio.create_task(client(name).acquire(timeout=None))
        await until(lambda: any(isinstance(each, NodeDown) for each in events))
        server.start()
        async with asyncio.timeout(LIMIT):
            lease = await waiting
            await lease.release()
        await until(lambda: any(isinstance(each, NodeUp) for each in events))


async def test_entering_in_an_outage_ends_with_the_patience(server: PostgreSQL, name: str) -> None:
    """Also of a client that was in use before the server died, and that has noticed it: the connection that listens was
    closed."""
    client = Redlock(server.url, patience=1)
    async with client(name):
        pass
    server.stop()
    try:
        await until(lambda: nodes_of(client)[0].error is not None)
        async with asyncio.timeout(LIMIT):
            with pytest.raises(QuorumUnavailable):
                await client.__aenter__()
    finally:
        server.start()
        await client.aclose()


async def test_holds_outlive_a_restart_of_the_server(server: PostgreSQL, name: str) -> None:
    """The table is on disk: the holder keeps its lease, and another client is refused."""
    async with Redlock(server.url, patience=LIMIT) as client, Redlock(server.url) as other:
        lease = await client(name).acquire(timeout=None)
        server.stop(signal.SIGINT)  # not as after a crash: this server does not write its log to disk
        server.start()
        async with asyncio.timeout(LIMIT):
            await lease.extend()
            while not (await other.health()).ok:
                await asyncio.sleep(0.01)
            assert await decided(lambda: other(name).acquire(timeout=LIMIT / 10)) is None
        await lease.release()


async def test_c10_a_server_that_stands_still_costs_one_timeout(server: PostgreSQL, name: str) -> None:
    """An acquire fails within its node timeout. What was under way leaves no hold behind."""
    async with aclosing(Redlock(server.url, patience=0, connect_timeout=LIMIT, node_timeout=2.0)) as client:
        await healthy(client)
        async with client(name):
            pass
        with frozen(server):
            async with asyncio.timeout(LIMIT):
                with pytest.raises(QuorumUnavailable, match="did not answer"):
                    await client(name).acquire(timeout=0)
        async with asyncio.timeout(LIMIT):
            while (await client.inspect(name)).holders:
                await asyncio.sleep(0.01)


async def test_c3_an_acquire_that_arrives_after_its_undo_is_refused(server: PostgreSQL, name: str) -> None:
    """The connection of the acquire stands still at the server until the client has closed it, and has undone the
    acquire over another one."""
    store = SQLStore(server.url)
    options: Any = {"patience": 0, "connect_timeout": LIMIT, "node_timeout": 2.0, "lease": LIMIT * 2}
    async with aclosing(Redlock(store, **options)) as client:
        await healthy(client)
        async with client(name):
            pass
        driver = store_driver(store)
        stopped = driver.get_server_pid()
        os.kill(stopped, signal.SIGSTOP)
        try:
            with pytest.raises(QuorumUnavailable):
                await client(name).acquire(timeout=0)
            driver.terminate()  # as the store does after its limit of 5 s
            async with asyncio.timeout(LIMIT):
                while not doubts_of(client):
                    await asyncio.sleep(0.01)
                await client.inspect(name)  # after the undo
        finally:
            os.kill(stopped, signal.SIGCONT)
        await asyncio.sleep(0.2)  # for what may not happen
        assert not (await client.inspect(name)).holders


async def test_c3_an_adoption_that_is_written_after_its_undo_leaves_the_hold_to_others(
    server: PostgreSQL, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection of the adoption stands still between its read and its write. The undo finds nothing to remove, and
    yet the write changes nothing when the connection goes on."""
    fetch, stopped = AsyncpgLine.fetch, list[Any]()

    async def fetch_and_stop(line: AsyncpgLine, sql: str, params: Mapping[str, Any] = {}) -> Any:
        found = await fetch(line, sql, params)
        if not stopped and any(str(each).endswith(name) for each in params.values()):
            stopped.append(line.driver)
            os.kill(line.driver.get_server_pid(), signal.SIGSTOP)
        return found

    store = SQLStore(server.url)
    async with (
        Redlock(server.url, lease=LIMIT * 2) as giver,
        aclosing(Redlock(store, patience=0, connect_timeout=LIMIT, node_timeout=2.0, lease=LIMIT * 2)) as taker,
    ):
        await healthy(taker)

        async def detached(name: str) -> str:
            return await (await giver(name).acquire(timeout=None)).detach()

        await (await taker.adopt(await detached(f"{name}:first"))).release()  # its statements are prepared by now
        handle = await detached(name)
        monkeypatch.setattr(AsyncpgLine, "fetch", fetch_and_stop)
        try:
            with pytest.raises(QuorumUnavailable):
                await taker.adopt(handle)
            pid = stopped[0].get_server_pid()
            stopped[0].terminate()  # as the store does after its limit of 5 s
            async with asyncio.timeout(LIMIT):
                await taker.inspect(name)  # after the undo
        finally:
            os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(0.2)  # for what may not happen
        monkeypatch.undo()
        async with asyncio.timeout(LIMIT):
            await (await giver.adopt(handle)).release()


def store_driver(store: SQLStore) -> Any:
    """The connection that the next op uses."""
    (database,) = store._databases.values()  # noqa: SLF001
    return database.connected.pool._idle[-1][0].driver  # type: ignore[attr-defined]  # noqa: SLF001


async def test_a_server_that_stands_still_is_down_with_words(
    server: PostgreSQL, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statement, and then a connect, have no answer in time. The connection that listens asks later."""
    monkeypatch.setattr(listening, "WATCH", LONG)
    client_of = Redlock(server.url, patience=0, connect_timeout=LIMIT / 2, node_timeout=LIMIT, lease=3 * LIMIT)
    async with client_of as client:
        events: list[Any] = []
        client.subscribe(events.append)
        async with client(name):
            pass
        with frozen(server):
            with pytest.raises(QuorumUnavailable, match=r"127\.0\.0\.1.* did not (end|answer)"):
                await client(name).acquire(timeout=0)
        (down,) = [each.error for each in events if isinstance(each, NodeDown)]
        assert re.search("did not end a statement within 5 s", down)


async def test_a_connect_without_an_answer_says_so(server: PostgreSQL) -> None:
    """Within its own limit, which is less than that of a transaction."""
    engine = engines.engine_of(engines.url_of(server.url), 0.3, pooler=False)
    source = engines.EngineSource(engine, 0.3, own=True)
    with frozen(server):
        with pytest.raises(TimeoutError, match=r"did not answer a connect within 0\.3 s"):
            await source.connect()
    await source.aclose()


async def test_the_connection_that_listens_comes_back(server: PostgreSQL, name: str) -> None:
    """The server closes all connections of a waiter: it listens again, and is served."""
    async with Redlock(server.url) as holds, Redlock(server.url, lease=600.0, max_lease=600.0) as waits:
        lease = await holds(name).acquire(timeout=None)
        waiting = asyncio.create_task(waits(name).acquire(timeout=None))
        await until(lambda: [waits_for_notice(each) for each in acquisitions_of(waits)] == [True])
        (node,) = nodes_of(waits)
        admin = await asyncpg.connect(server.url)
        back = asyncio.create_task(reconnected(node))
        await admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
        await admin.close()
        await back
        async with asyncio.timeout(LIMIT):
            await lease.release()
            await (await waiting).release()


async def test_an_idle_connection_that_the_server_closed_is_not_used(mariadb_url: str, name: str) -> None:
    """An acquire by one statement on it would be ambiguous."""
    store = SQLStore(mariadb_url)
    async with Redlock(store, patience=0, connect_timeout=LIMIT) as client:
        async with client(name):
            pass
        lines = idle_lines_of(store)
        for line in lines:
            await kill(mariadb_url, line.driver.thread_id())
        await until(lambda: all(line.is_closed for line in lines))
        lease = await client(name).acquire(timeout=0)
        assert lease
        await lease.release()


async def kill(url: str, connection: int) -> None:
    """The server ends that connection."""
    engine = create_async_engine(url.replace("mariadb:", "mariadb+asyncmy:"))
    async with engine.connect() as admin:
        await admin.exec_driver_sql(f"KILL {connection}")
    await engine.dispose()


async def test_a_client_that_stands_still_in_a_transaction_stops_nobody_for_long(server: PostgreSQL, name: str) -> None:
    """It has locked the row. The server ends its transaction after 3 s."""
    store = SQLStore(server.url)
    async with Redlock(store) as client:
        async with client(name):
            pass
        idle = await asyncpg.connect(server.url)
        await idle.execute("BEGIN; SET LOCAL idle_in_transaction_session_timeout = 500")
        await idle.fetch("SELECT 1 FROM asynclock WHERE resource_name = $1 FOR UPDATE", name)
        async with asyncio.timeout(LIMIT), client(name):
            pass
        idle.terminate()


async def test_deadlocks_are_repeated(mariadb: MariaDB, server: PostgreSQL, name: str) -> None:
    """Clients that lock several names at once, in any order, all get them."""
    for url in (mariadb.url, server.url):
        async with Redlock(url) as one, Redlock(url) as two:
            names = [f"{name}:{number}" for number in range(4)]

            async def work(client: Redlock, names: list[str]) -> None:
                for _ in range(5):
                    async with client.multi(*names):
                        pass

            async with asyncio.timeout(LIMIT), asyncio.TaskGroup() as group:
                for client, order in ((one, names), (two, names[::-1]), (one, names[1:]), (two, names[:2])):
                    group.create_task(work(client, order))


async def test_a_killed_mariadb_comes_back(mariadb: MariaDB, name: str) -> None:
    """The same as with PostgreSQL."""
    async with Redlock(mariadb.url, patience=LIMIT) as client:
        async with client(name):
            pass
        mariadb.stop()
        with pytest.raises(QuorumUnavailable):
            await client(name).acquire(timeout=0)
        mariadb.start()
        async with asyncio.timeout(LIMIT), client(f"{name}:after"):  # it may have forgotten the release of the first
            pass


async def test_an_idle_client_does_not_notice_a_restart(mariadb: MariaDB, name: str) -> None:
    """The server has closed the connections in its pool. The next acquire takes new ones, and does not fail."""
    store, now = SQLStore(mariadb.url), asyncio.get_running_loop().time
    async with Redlock(store, patience=0, connect_timeout=LIMIT, node_timeout=5.0) as client:
        names = [f"{name}:{number}" for number in range(20)]
        leases = await asyncio.gather(*[client(each).acquire(timeout=0) for each in names])
        await client.release_all()
        await until(lambda: [until <= now() for _, until in store_idle(store)] == [True])  # the last one stays open
        mariadb.stop(signal.SIGTERM)  # one that is killed forgets the releases of the last second
        mariadb.start()
        leases = [await client(each).acquire(timeout=0) for each in names]
        assert all(leases)
        await client.release_all()


def store_idle(store: SQLStore) -> Any:
    """The connections that are kept out of the pool of SQLAlchemy for a while."""
    (database,) = store._databases.values()  # noqa: SLF001
    return database.connected.pool._idle  # noqa: SLF001


async def test_b1_entering_that_is_cancelled_leaves_nothing(server: PostgreSQL, mariadb: MariaDB, name: str) -> None:
    """At whatever moment, even if the driver loses the cancel: neither a task nor a connection is left."""
    before = asyncio.all_tasks()
    for url in (server.url, mariadb.url):
        for tenths in range(0, 60, 6):  # of a millisecond
            client = Redlock(url)
            entering = asyncio.create_task(client.__aenter__())
            await asyncio.wait({entering}, timeout=tenths / 10_000)
            entering.cancel()
            await asyncio.wait({entering})
            await client.aclose()
            assert asyncio.all_tasks() == before
        async with Redlock(url) as client, client(name) as lease:
            assert lease.held


async def test_a_connect_that_is_cancelled_leaves_no_connection_in_the_middle_of_a_statement(
    mariadb: MariaDB, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when a client closes: SQLAlchemy's pool would log a traceback about it."""
    sent = asyncio.Event()

    class Watched(AsyncmyLine):
        async def fetch(self, *args: Any) -> Any:
            sent.set()
            return await super().fetch(*args)

    monkeypatch.setattr(engines, "AsyncmyLine", Watched)
    engine = engines.engine_of(engines.url_of(mariadb.url), LIMIT, pooler=False)
    source = engines.EngineSource(engine, LIMIT, own=True)
    connecting = asyncio.create_task(source.connect())
    await sent.wait()
    connecting.cancel()
    await asyncio.wait({connecting})
    assert connecting.cancelled()
    await source.aclose()
    assert not caplog.records
