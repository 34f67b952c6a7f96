"""Fewer connections than clients would take: a pooler that gives one of its few to each session, a user with a limit,
and an engine that the program uses itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from asynclock import LockLost, QuorumUnavailable, Redlock
from asynclock.stores.sql import SQLStore, lines, pool, push, single
from asynclock.stores.sql.engines import CONNECTIONS, url_of
from tests.support.commands import examined
from tests.support.operators import Operated
from tests.support.probes import undelivered_by
from tests.support.proxy import TcpProxy
from tests.support.services.postgresql import pgbouncer
from tests.support.sql_states import database_of, idle_lines_of, read_rows
from tests.support.waiters import LIMIT, LONG, healthy, until

OPTIONS: dict[str, Any] = {"lease": LONG, "node_timeout": 5.0, "connect_timeout": 2.0, "patience": LIMIT}
TASKS = 12
FEW = "there is no further connection for this client: waiters look for their notices"


def its(bouncer: str, name: str) -> SQLStore:
    """With a table of the test's own."""
    return SQLStore(bouncer, name.replace(":", "_"))


async def work(client: Redlock, name: str, number: int) -> None:
    for each in range(2):
        async with client(f"{name}:{(number + each) % 5}", timeout=LIMIT):
            pass


async def busy(client: Redlock, name: str) -> None:
    """All tasks of a client, until they are cancelled."""
    while True:
        await asyncio.gather(*(work(client, name, number) for number in range(TASKS)))


@asynccontextmanager
async def telling(client: Redlock) -> AsyncIterator[Redlock]:
    """It, which reports no outage and no failed release meanwhile."""
    events: list[Any] = []
    client.subscribe(events.append)
    async with client:
        yield client
        await healthy(client)
    assert [each for each in events if type(each).__name__ in ("NodeDown", "ReleaseFailed")] == []


async def few(client: Redlock) -> None:
    """Return once its health says that there are too few connections; an answer may be late on a busy machine."""
    async with asyncio.timeout(LIMIT):
        while (await client.health()).nodes[0].error != FEW:
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("patient_releases")
async def test_f26_two_clients_share_a_pool_of_four(postgresql_url: str, name: str) -> None:
    """Each of their tasks has its turn, and none meets an outage, although each client would take five connections."""
    with pgbouncer(postgresql_url, "session", 4) as url:
        async with (
            asyncio.timeout(2 * LIMIT),
            telling(Redlock(its(url, name), **OPTIONS)) as one,
            telling(Redlock(its(url, name), **OPTIONS)) as two,
        ):
            await asyncio.gather(*(work(each, name, number) for each in (one, two) for number in range(TASKS)))


async def test_f26_four_clients_share_a_pool_of_four(
    postgresql_url: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first one is busy, has all of them, and listens. It gives up all but one for the clients that come later, and
    all look for their notices, which is told."""
    monkeypatch.setattr(push, "_ROOM", 0.2)
    monkeypatch.setattr(pool, "_KEPT", 0.2)
    with pgbouncer(postgresql_url, "session", 4) as url:
        first = its(url, name)
        async with asyncio.timeout(2 * LIMIT), AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(telling(Redlock(first, **OPTIONS)))]
            await until(lambda: database_of(first).pushes)  # on a busy machine the first try may be late
            working = asyncio.create_task(busy(clients[0].multi, name))  # transactions, over all of its connections
            clients += [await stack.enter_async_context(Redlock(its(url, name), **OPTIONS)) for _ in range(3)]
            await asyncio.gather(*(work(each, name, number) for each in clients[1:] for number in range(2)))
            working.cancel()
            await asyncio.wait({working})
            assert not database_of(first).pushes
            lease = await clients[0](name).acquire()
            waiting = asyncio.create_task(clients[3](name).acquire(timeout=LIMIT))
            while lease is not None and not (await clients[1].inspect(name)).waiters:
                await asyncio.sleep(0.01)
            assert lease is not None
            await lease.release()
            assert await waiting
            for each in clients:
                await few(each)
    assert any(FEW in each for each in caplog.messages)


async def test_f26_a_waiter_is_woken_although_its_client_ceases_to_listen(
    postgresql_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has sent its ticket as one that gets push messages. Once a message comes again, it is one of those."""
    monkeypatch.setattr(push, "_ROOM", 0.2)
    with pgbouncer(postgresql_url, "session", 3) as url:
        store = its(url, name)
        async with (
            asyncio.timeout(2 * LIMIT),
            Redlock(its(postgresql_url, name), **OPTIONS) as other,
            Redlock(store, **OPTIONS) as client,
        ):
            await until(lambda: database_of(store).pushes)  # on a busy machine the first try may be late
            lease = await other(name).acquire()
            waiting = asyncio.create_task(client(name).acquire())
            while lease is not None and not (await other.inspect(name)).waiters:
                await asyncio.sleep(0.01)
            assert lease is not None
            assert database_of(store).pushes
            engine = create_async_engine(url_of(url))
            monkeypatch.setattr(push, "_PAUSES", (0.1, 0.1))
            async with engine.connect() as taken:
                await taken.exec_driver_sql("SELECT 1")
                await until(lambda: not database_of(store).pushes)
                await lease.release()
                assert await waiting
            await engine.dispose()
            await until(lambda: database_of(store).pushes)


async def test_f26_a_holder_learns_at_once_of_a_break_although_its_client_ceases_to_listen(
    postgresql_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at its next renewal only. Also where it has acquired after that."""
    monkeypatch.setattr(push, "_ROOM", 0.2)
    monkeypatch.setattr(push, "_PAUSES", (LONG, LONG))  # it does not listen again
    options = {**OPTIONS, "lease": 180, "max_lease": 180}
    with pgbouncer(postgresql_url, "session", 3) as url:
        store, theirs = its(url, name), its(postgresql_url, name)
        async with (
            asyncio.timeout(2 * LIMIT),
            Redlock(theirs, **options) as other,
            Redlock(store, **options) as client,
        ):
            await until(lambda: database_of(store).pushes)  # on a busy machine the first try may be late
            before = await client(name).acquire(timeout=None)
            acquired = (await read_rows(theirs, [name]))[0][name].expires_at or 0.0
            engine = create_async_engine(url_of(url))
            async with engine.connect() as taken:
                await taken.exec_driver_sql("SELECT 1")
                await until(lambda: not database_of(store).pushes)
                async with asyncio.timeout(LIMIT):  # the client has reconnected, and has renewed its hold
                    while ((await read_rows(theirs, [name]))[0][name].expires_at or 0.0) <= acquired:
                        await asyncio.sleep(0.01)
                after = await client(f"{name}:after").acquire(timeout=None)
                for lease in (before, after):
                    assert await other.break_lock(lease.name)
                    async with asyncio.timeout(LIMIT):  # the next renewal is later
                        assert await lease.wait_lost()
                    with pytest.raises(LockLost) as caught:
                        lease.ensure_held()
                    assert caught.value.reason == "broken"
            await engine.dispose()


async def test_f26_fewer_connections_than_clients(postgresql_url: str, name: str) -> None:
    """The error names what each client needs, and so does doctor. Once another client has closed, it works."""
    with pgbouncer(postgresql_url, "session", 1) as url:
        late = Redlock(its(url, name), **{**OPTIONS, "connect_timeout": 3.0, "patience": 6.0})
        async with Redlock(its(url, name), **OPTIONS):
            with pytest.raises(QuorumUnavailable) as caught:
                await late(name).acquire(timeout=0)
            code, found = await asyncio.to_thread(examined, (), ASYNCLOCK_URLS=url)
        assert "has accepted the login, and carries out no statement" in str(caught.value)
        assert "each client, which is each event loop of each process, needs one of its connections" in str(
            caught.value
        )
        assert code == 2
        assert found["reachable"]["advice"][1:-1] in str(caught.value)
        async with asyncio.timeout(LIMIT), late(name, timeout=LIMIT):
            found = {"connections": {}}  # a connect of doctor may take too long on a busy machine
            while "connections" in found:
                code, found = await asyncio.to_thread(examined, (), ASYNCLOCK_URLS=postgresql_url)
        await late.aclose()
        found = {}  # the same
        async with asyncio.timeout(LIMIT):
            while "connections" not in found:
                code, found = await asyncio.to_thread(examined, (), ASYNCLOCK_URLS=url)
        assert "1 connection" in found["connections"]["what"]


async def test_f26_idle_connections_are_given_back(postgresql: Operated, monkeypatch: pytest.MonkeyPatch) -> None:
    """After many ops at the same time one is left, beside the one that listens."""
    monkeypatch.setattr(pool, "_KEPT", 0.3)
    async with Redlock(postgresql.url, **OPTIONS) as client:
        seen = 0
        while seen < CONNECTIONS:
            working = [asyncio.create_task(work(client.multi, "a", number)) for number in range(TASKS)]
            seen = max(seen, len(await postgresql.connections()))
            await asyncio.gather(*working)
        async with asyncio.timeout(LIMIT):
            while len(await postgresql.connections()) > 1:
                await asyncio.sleep(0.02)
        async with client("a"):
            pass


@pytest.mark.usefixtures("patient_releases")
async def test_f26_a_user_with_one_connection(postgresql: Operated) -> None:
    """Without a pooler the server refuses a second one. The client looks for its notices, and says so."""
    await postgresql.run(f"ALTER ROLE {postgresql.user} CONNECTION LIMIT 1")
    client = Redlock(postgresql.url, **{**OPTIONS, "connect_timeout": 10.0})
    async with telling(client), asyncio.timeout(LIMIT):
        await asyncio.gather(*(work(client, "a", number) for number in range(TASKS)))
        await few(client)


async def test_f26_an_engine_that_is_used_up_at_the_start(
    postgresql: Operated, caplog: pytest.LogCaptureFixture
) -> None:
    """The client says so, and not that the database is down. It works once the program gives a connection back."""
    engine = create_async_engine(url_of(postgresql.url.partition("?")[0]), pool_size=2, max_overflow=0)
    options = {**OPTIONS, "connect_timeout": 3.0}  # a new connection does not take longer on a busy machine
    client = Redlock(SQLStore(engine, postgresql.table), **options)
    events: list[Any] = []
    client.subscribe(events.append)
    used_up = "all 2 connections of the engine are in use, mostly by the program; raise its pool_size"
    async with engine.connect():
        async with engine.connect():
            assert used_up in (await client.health()).reason
            with pytest.raises(QuorumUnavailable, match=used_up):
                await client("a").acquire(timeout=4)
        async with asyncio.timeout(LIMIT), client("a", timeout=LIMIT):
            pass
    assert not [each for each in events if type(each).__name__ == "NodeDown"]
    assert sum("no connection is left for locks" in each for each in caplog.messages) == 1
    await client.aclose()
    await engine.dispose()


async def test_f26_an_engine_that_is_used_up_while_a_client_uses_it(
    postgresql: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node is not down. A caller whose time is over before that of a connect learns the reason, too."""
    monkeypatch.setattr(pool, "_KEPT", 0.1)
    engine = create_async_engine(url_of(postgresql.url.partition("?")[0]), pool_size=2, max_overflow=0)
    options = {**OPTIONS, "connect_timeout": 2.0, "patience": 0.1}
    async with telling(Redlock(SQLStore(engine, postgresql.table), **options)) as client:
        async with client("a"):
            pass
        async with engine.connect(), engine.connect():
            for timeout in (0.1, None):
                with pytest.raises(QuorumUnavailable, match="all 2 connections of the engine are in use"):
                    await client("a").acquire(timeout=timeout)
    await engine.dispose()


async def test_statements_are_prepared_once_where_no_pooler_shares_the_session(postgresql: Operated) -> None:
    """The driver connects as if there were one."""
    store = SQLStore(postgresql.url.partition("?")[0], postgresql.table)
    async with Redlock(store, **OPTIONS) as client:
        for _ in range(2):
            async with client("a"):
                pass
        (line,) = idle_lines_of(store)
        assert (await line.fetch("SELECT count(*) FROM pg_prepared_statements"))[0][0] > 1


async def test_f6_a_statement_that_nobody_can_cancel(postgresql: Operated, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network loses the cancel. The server ends the statement by its limit, and the undo finds nothing, or all."""
    monkeypatch.setitem(lines.SET_UP, "statement_timeout", "2s")
    asleep = f"SELECT count(*) FROM pg_stat_activity WHERE usename = '{postgresql.user}' AND wait_event = 'PgSleep'"
    port = urlsplit(postgresql.url).port or 0
    async with (
        asyncio.timeout(2 * LIMIT),
        TcpProxy(port) as network,
        Redlock(
            postgresql.url.replace(f":{port}/", f":{network.port}/"),
            **{**OPTIONS, "patience": 0, "connect_timeout": 5.0},
        ) as client,
    ):
        async with client("other"):
            pass
        for module in (pool, single):
            monkeypatch.setattr(module, "LIMIT", 0.5)
        await _sleep_in(postgresql, "slow")
        acquiring = asyncio.create_task(client("slow").acquire(timeout=0))
        while not await postgresql.run(asleep):
            await asyncio.sleep(0.01)
        network.drop_requests = True
        with pytest.raises(QuorumUnavailable):
            await acquiring
        while await postgresql.run(asleep):
            await asyncio.sleep(0.01)
        network.freeze()
        network.drop_requests = False
        await postgresql.run(f"DROP TRIGGER sleep ON {postgresql.table}")
        await client.health()
        await until(lambda: not undelivered_by(client))
        assert await postgresql.held() == 0
    await postgresql.run(f"DROP FUNCTION {postgresql.user}_sleep")


async def _sleep_in(operated: Operated, name: str) -> None:
    """A statement that writes the row of that name takes a minute."""
    await operated.run(
        f"CREATE FUNCTION {operated.user}_sleep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF NEW.resource_name LIKE '%{name}' THEN PERFORM pg_sleep(60); END IF; RETURN NULL; END $$"
    )
    await operated.run(
        f"CREATE TRIGGER sleep AFTER INSERT OR UPDATE ON {operated.table} FOR EACH ROW "
        f"EXECUTE FUNCTION {operated.user}_sleep()"
    )
