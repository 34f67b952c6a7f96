"""The SQL stores: set-up, the table, notices, and what several processes and loops share."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool, StaticPool

from asynclock import ConfigError, Redlock
from asynclock.rules.model import Entry, State
from asynclock.stores.sql import SQLStore, inbox
from asynclock.stores.sql.lines import Line
from asynclock.stores.sql.rows import FLOOR, Row
from asynclock.stores.sql.schema import ddl
from tests.support.operators import alone
from tests.support.programs import DATABASES, run_python
from tests.support.services.postgresql import pgbouncer
from tests.support.sql_states import database_of, read_rows, write_state
from tests.support.waiters import LIMIT, until

of_databases = pytest.mark.xdist_group("database-programs")  # one process imports the drivers for all
PAGE = (Path(__file__).parents[2] / "docs" / "stores" / "sql.md").read_text()


@pytest.fixture
def file(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/locks.db"


@pytest.fixture(params=["postgresql", "mariadb", "sqlite"])
def url(request: pytest.FixtureRequest, name: str) -> str:
    """A table of the test's own, on each database."""
    if request.param == "sqlite":
        return str(request.getfixturevalue("file"))
    table = re.sub(r"\W", "_", name)
    return f"{request.getfixturevalue(request.param + '_url')}?asynclock_table={table}"


# -- set-up ------------------------------------------------------------------------------------------------------------


def test_the_page_shows_the_statements_that_make_the_table() -> None:
    """Of each database, apart from spaces."""
    shown = ["".join(each.split()) for each in re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)]
    assert shown == ["".join(ddl(each.dialect()).split()) for each in (postgresql, mysql, sqlite)]


@of_databases
def test_the_snippets_of_the_page_run() -> None:
    """Each in an interpreter of its own, without a warning."""
    for snippet in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        assert ("fencing token" in run_python(snippet, preload=DATABASES)) == ("asyncio.run" in snippet)


async def test_c13_a_database_that_is_not_there_is_a_config_error(postgresql_url: str, mariadb_url: str) -> None:
    """The server says so; no retry would help."""
    for server in (postgresql_url, mariadb_url):
        with pytest.raises(ConfigError, match="nowhere"):
            async with Redlock(server.rpartition("/")[0] + "/nowhere"):
                pass


async def test_a_table_that_may_not_be_made_is_a_config_error(postgresql_url: str, name: str) -> None:
    """It says what to do; once the owner has made it, the client needs no more rights than those on rows."""
    table = re.sub(r"\W", "_", name)
    import asyncpg

    admin = await asyncpg.connect(postgresql_url)
    async with alone(admin):
        await admin.execute(f"CREATE USER u_{table}; REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    mine = postgresql_url.replace("postgres@", f"u_{table}@")
    with pytest.raises(ConfigError, match="create_schema"):
        async with Redlock(SQLStore(mine, table)):
            pass
    owner = SQLStore(postgresql_url, table)
    await owner.create_schema()
    await owner.create_schema()  # harmless
    await admin.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO u_{table}")
    await admin.close()
    async with Redlock(SQLStore(mine, table)) as client, client(name):
        pass


async def test_many_clients_make_the_table_at_once(url: str, name: str) -> None:
    """The first use of a database."""

    async def use(number: int) -> None:
        async with Redlock(url, patience=LIMIT) as client, client(f"{name}:{number}"):
            pass

    async with asyncio.timeout(LIMIT):
        await asyncio.gather(*(use(number) for number in range(6)))


# -- names and rows ----------------------------------------------------------------------------------------------------


async def test_d8_odd_names(url: str) -> None:
    """They are different locks, and are listed as they are."""
    odd = ["a", "a ", "A", "a%", "a_", "ä", "a\x00b", "b" * 5000, "b" * 5000 + "c", "'; DROP TABLE x; --", "😀"]
    async with Redlock(url, metadata="m\x00") as client, Redlock(url) as other:
        leases = [await client(each).acquire(timeout=0) for each in odd]
        assert all(leases)
        assert [await other(each).acquire(timeout=0) for each in odd] == [None] * len(odd)
        assert {holder.name async for holder in other.holders()} == set(odd)
        assert {holder.name async for holder in other.holders("b" * 4000)} == {"b" * 5000, "b" * 5000 + "c"}
        await client.release_all()
        assert [holder async for holder in other.holders()] == []


async def test_a_plain_row_shows_its_holder(url: str, name: str) -> None:
    """To operators who read the table."""
    store = SQLStore(url)
    async with Redlock(store) as client, client(name) as lease:
        rows, now = await read_rows(store, [name])
        row = rows[name]
        assert (row.holds, row.fence, row.state) == (1, lease.fence, None)
        assert str(os.getpid()) in row.node_info
        assert row.expires_at == pytest.approx(now + 30, abs=5)


async def test_rows_of_free_names_are_removed_and_fences_never_fall(url: str, name: str) -> None:
    """Also where the clock of the client that acquires next is an hour behind."""
    store = SQLStore(url)
    async with Redlock(store, fence_memory=60) as client:
        async with client(name) as lease:
            first = lease.fence
        (database,) = store._databases.values()  # noqa: SLF001
        table = store._settings.table  # noqa: SLF001
        async with database.connected.pool.line() as line:  # time passes
            await line.fetch(
                f"UPDATE {table} SET keep_until = 1, fence = fence + 3600000000 WHERE resource_name = :n", {"n": name}
            )
        removed = await turns(store)
        rows, _ = await read_rows(store)
        assert name not in rows
        assert removed >= 1
        async with client(name) as lease:
            assert lease.fence > first + 3600000000


async def test_f8_a_name_with_only_a_tombstone_begins_above_the_floor(url: str, name: str) -> None:
    """Its row has no counter: that was removed, and the floor stands for it."""
    store, floor = SQLStore(url), 2**52
    async with Redlock(store) as client:
        now = (await read_rows(store))[1]
        await write_state(store, name, State(undone=(Entry("a late acquire", now + 60),)))
        database = database_of(store)
        await database.connected.repeated(
            partial(database.dialect.insert, row=Row(FLOOR, fence=floor, keep_until=None), now=1.0)
        )
        async with client(name) as lease:
            assert lease.fence > floor


async def turns(store: SQLStore) -> int:
    """Two turns of the cleaner, of which the first one raises the floor; the number of rows that they removed."""
    removed, (database,) = 0, store._databases.values()  # noqa: SLF001
    table = store._settings.table  # noqa: SLF001
    assert database.cleaning is not None
    for _ in range(2):
        async with database.connected.pool.line() as line:
            await line.fetch(f"UPDATE {table} SET expires_at = 0 WHERE resource_name = :n", {"n": "asynclock~cleaner"})
        removed += await database.cleaning.turn()
    return removed


async def test_the_table_of_a_program_with_many_names_does_not_grow_for_ever(url: str, name: str) -> None:
    """Two turns, 10 s apart at most, remove more rows than it leaves in that time."""
    store, many = SQLStore(url), 1200
    async with Redlock(store) as client, client(f"{name}:1") as lease:
        (database,) = store._databases.values()  # noqa: SLF001

        async def leave(begin: int, line: Line) -> None:
            for number in range(begin, begin + 100):
                await database.dialect.insert(line, Row(f"{name}:{number:04d}", fence=lease.fence + number), 1.0)

        for begin in range(0, many, 100):  # a busy machine ends no long transaction in time
            await database.connected.repeated(partial(leave, begin))
        assert await turns(store) <= many  # a slow program has had a turn of its own before
        rows, _ = await read_rows(store)
        assert [each for each in rows if each.startswith(name)] == [f"{name}:1"]
        assert lease.held


# -- notices -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bouncer(postgresql_url: str) -> Iterator[str]:
    """Its connections belong to a client for one transaction only."""
    with pgbouncer(postgresql_url) as url:
        yield url


async def test_behind_a_pooler_waiters_look_for_their_notices(bouncer: str, postgresql_url: str, name: str) -> None:
    """Clients with push messages and clients without serve each other, in order of arrival."""
    urls = [bouncer, postgresql_url, bouncer, postgresql_url]
    clients = [Redlock(url, patience=LIMIT) for url in urls]
    order: list[int] = []

    async def work(number: int) -> None:
        async with clients[number](name, fair=True):
            order.append(number)

    async with asyncio.timeout(LIMIT):
        lease = await clients[0](name, fair=True).acquire(timeout=None)
        tasks = []
        for number in range(4):
            tasks.append(asyncio.create_task(work(number)))
            while sum(each.tasks for each in (await clients[1].inspect(name)).waiters) < number + 1:
                await asyncio.sleep(0.01)
        await lease.release()
        await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3]
    for client in clients:
        await client.aclose()


async def test_a_pooler_changes_connections_under_load(bouncer: str, name: str) -> None:
    """More tasks than connections of the pool: each op is a transaction, and none needs a statement of another."""
    async with Redlock(bouncer, patience=LIMIT) as client:

        async def work(number: int) -> None:
            for _ in range(3):
                async with client(f"{name}:{number % 7}"):
                    pass

        async with asyncio.timeout(LIMIT), asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(work(number))


@pytest.mark.parametrize("url", ["mariadb", "sqlite"], indirect=True)
async def test_a_hand_over_by_looks_takes_a_quarter_of_a_second(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most: while a client waits, its pauses between looks do not grow beyond that. If they did, ten looks would
    take minutes here."""
    assert inbox.WAITING == 0.25
    monkeypatch.setattr(inbox, "FIRST", 1.0)
    monkeypatch.setattr(inbox, "HOLDING", 3600.0)
    looks, take = 0, inbox.Inbox._take  # noqa: SLF001

    async def counted(self: inbox.Inbox, tag: str) -> None:
        nonlocal looks
        looks += bool(self._waiting)
        await take(self, tag)

    monkeypatch.setattr(inbox.Inbox, "_take", counted)
    long: Any = {"lease": 600.0, "max_lease": 600.0}
    async with Redlock(url, **long) as holds, Redlock(url, **long) as waits, asyncio.timeout(LIMIT):
        lease = await holds(name).acquire(timeout=None)
        waiting = asyncio.create_task(waits(name).acquire(timeout=None))
        await until(lambda: looks == 10)
        await lease.release()
        await (await waiting).release()


# -- loops, forks, engines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["postgresql+asyncpg://a/b", "mysql+asyncmy://a/b"])
def test_an_engine_that_lends_one_connection_to_all_is_a_config_error(url: str) -> None:
    """Another transaction would be committed, or rolled back, with that of the program."""
    with pytest.raises(ConfigError, match=r"StaticPool.* give it another pool"):
        SQLStore(create_async_engine(url, poolclass=StaticPool))


async def test_an_engine_of_the_user_is_used_as_it_is(postgresql_url: str, name: str) -> None:
    """And works on after the client has closed."""
    engine = create_async_engine(postgresql_url.replace("postgresql:", "postgresql+asyncpg:"), pool_size=2)
    async with Redlock(SQLStore(engine)) as client, Redlock(SQLStore(engine)) as other:
        lease = await client(name).acquire(timeout=None)
        waiting = asyncio.create_task(other(name).acquire(timeout=None))
        async with asyncio.timeout(LIMIT):
            while not (await client.inspect(name)).waiters:
                await asyncio.sleep(0.01)
        await lease.release()
        async with asyncio.timeout(LIMIT):
            await (await waiting).release()
    async with engine.connect() as connection:
        assert (await connection.exec_driver_sql("SELECT 1")).scalar() == 1
    await engine.dispose()


async def test_another_driver_and_an_engine_of_sqlite(file: str, name: str) -> None:
    """Through SQLAlchemy."""
    engine = create_async_engine(file.replace("sqlite:", "sqlite+aiosqlite:"), poolclass=NullPool)
    async with Redlock(SQLStore(engine)) as client, Redlock(file.replace("sqlite:", "sqlite+aiosqlite:")) as other:
        async with client(name):
            assert await other(name).acquire(timeout=0) is None
        async with other(name):
            pass
    await engine.dispose()


@of_databases
def test_c8_each_loop_and_each_child_has_connections_of_its_own(url: str, name: str) -> None:
    """A client that was used in one loop is used in the next one, and in a forked child."""
    run_python(
        """
        import asyncio, os, sys
        from asynclock import Redlock
        redlock = Redlock(sys.argv[1], connect_timeout=20)  # the machine may be busy
        async def once(name):
            async with redlock(name):
                pass
        async def forks(name):
            async with redlock(name):
                pid = os.fork()
                if pid == 0:
                    return
            _, status = await asyncio.to_thread(os.waitpid, pid, 0)
            assert status == 0, status
            await redlock.aclose()
        async def twice(name):
            await once(name)
            await redlock.aclose()
        asyncio.run(twice(sys.argv[2]))
        asyncio.run(twice(sys.argv[2]))
        pid = os.fork()
        if pid == 0:
            asyncio.run(twice(sys.argv[2]))
            sys.stdout.flush()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        asyncio.run(twice(sys.argv[2]))
        """,
        url,
        name,
        preload=DATABASES,
    )


async def test_a_second_loop_needs_an_engine_of_its_own(postgresql_url: str, name: str) -> None:
    """An engine belongs to one loop."""
    engine = create_async_engine(postgresql_url.replace("postgresql:", "postgresql+asyncpg:"))
    store = SQLStore(engine)

    async def in_another_loop() -> None:
        async with Redlock(store) as client, client(name):
            pass

    async with Redlock(store) as client, client(name):
        with pytest.raises(ConfigError, match="belongs to one"):
            await asyncio.to_thread(asyncio.run, in_another_loop())
    await engine.dispose()
