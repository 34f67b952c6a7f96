"""The table of a SQL store is checked, not assumed: a migration may have made it, and anybody may change or drop it
while clients are connected (HAZARDS F24)."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Iterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy.dialects import sqlite

from asynclock import ConfigError, LockLost, QuorumUnavailable, Redlock
from asynclock.stores import lock_table
from asynclock.stores.sql import SQLStore, table_watch, transactions
from asynclock.stores.sql.lines import Line
from asynclock.stores.sql.schema import ddl
from asynclock.stores.sql.settings import Settings
from tests.support.commands import examined
from tests.support.operators import Operated
from tests.support.sql_states import database_of
from tests.support.waiters import LIMIT

OPTIONS: dict[str, Any] = {"patience": LIMIT, "lease": 60.0}


@pytest.fixture(params=["postgresql", "mariadb"])
def operated(request: pytest.FixtureRequest) -> Operated:
    """A table on each server."""
    found: Operated = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client looks at its table a few times a second, and not each minute."""
    monkeypatch.setattr(table_watch, "PAUSE", 0.1)
    monkeypatch.setattr(table_watch, "_LEAST", 0.0)


async def refusal(url: str) -> str:
    """The ConfigError of a client that enters."""
    with pytest.raises(ConfigError) as raised:
        async with Redlock(url, **OPTIONS):
            pass
    return str(raised.value)


def mending(said: str) -> list[str]:
    """The statements in an error."""
    found = re.search(r"run: (.*?)(?: \(docs/|$)", said)
    assert found is not None, said
    return found[1].split("; ")


async def grants(url: str | SQLStore, name: str) -> None:
    async with Redlock(url, **OPTIONS) as client, client(name):
        pass


# -- a table that was made wrong ---------------------------------------------------------------------------------------

MARIADB = {
    "key": ("DROP PRIMARY KEY", "no primary key"),
    "prefix": ("DROP PRIMARY KEY, ADD UNIQUE (resource_name(10))", "of the whole text of all rows"),
    "two columns": ("DROP PRIMARY KEY, ADD UNIQUE (resource_name, count)", "no primary key"),
    "collation": (
        "MODIFY resource_name VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci NOT NULL",
        "collation utf8mb4_general_ci",
    ),
    "accents": (
        "MODIFY resource_name VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_unicode_nopad_ci NOT NULL",
        "different names are one name",
    ),
    "characters": (
        "MODIFY resource_name VARCHAR(255) CHARACTER SET latin1 COLLATE latin1_bin NOT NULL",
        "cannot say all names",
    ),
    "length": (
        "MODIFY resource_name VARCHAR(100) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL",
        "room for 100 characters",
    ),
    "text": (
        "DROP PRIMARY KEY, MODIFY resource_name TEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL UNIQUE",
        "resource_name has the type text",
    ),
    "engine": ("ENGINE = Aria", "engine is Aria"),
    "fence": ("MODIFY fence INTEGER NOT NULL", "fence has the type int"),
    "times": ("MODIFY expires_at FLOAT", "expires_at has the type float"),
    "state": ("MODIFY state TEXT", "state has room for 65535"),
    "default": ("MODIFY state LONGTEXT DEFAULT ''", "state has a default"),
    "not null": ("MODIFY expires_at DOUBLE NOT NULL", "expires_at is NOT NULL"),
    "unique": ("ADD UNIQUE another (create_time)", "another unique index, another on create_time"),
}


@pytest.mark.parametrize(("change", "fault"), MARIADB.values(), ids=MARIADB)
async def test_f24_a_table_of_mariadb_that_cannot_exclude(
    change: str, fault: str, mariadb: Operated, name: str
) -> None:
    """A ConfigError before the first lock says what is wrong. The statements in it mend the table."""
    await SQLStore(mariadb.url).create_schema()
    await mariadb.run(f"ALTER TABLE {mariadb.table} {change}")
    said = await refusal(mariadb.url)
    assert fault in said
    for statement in mending(said):
        await mariadb.run(statement)
    await grants(mariadb.url, name)


_COLLATION = "CREATE COLLATION c_{0} (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
POSTGRESQL = {
    "key": ("ALTER TABLE {0} DROP CONSTRAINT {0}_pkey", "no primary key"),
    "deferred": (
        "ALTER TABLE {0} DROP CONSTRAINT {0}_pkey, ADD PRIMARY KEY (resource_name) DEFERRABLE",
        "is DEFERRABLE",
    ),
    "partial": (
        "ALTER TABLE {0} DROP CONSTRAINT {0}_pkey; CREATE UNIQUE INDEX ON {0} (resource_name) WHERE count > 0",
        "of the whole text of all rows",
    ),
    "two columns": ("ALTER TABLE {0} DROP CONSTRAINT {0}_pkey, ADD PRIMARY KEY (resource_name, count)", "on resource_"),
    "collation": (
        f"{_COLLATION}; ALTER TABLE {{0}} ALTER resource_name TYPE text COLLATE c_{{0}}",
        "the collation c_",
    ),
    "length": ("ALTER TABLE {0} ALTER resource_name TYPE varchar(100)", "room for 100 characters"),
    "fence": ("ALTER TABLE {0} ALTER fence TYPE integer", "fence has the type integer"),
    "times": ("ALTER TABLE {0} ALTER expires_at TYPE real", "expires_at has the type real"),
    "not null": ("ALTER TABLE {0} ALTER state SET NOT NULL", "state is NOT NULL"),
    "default": ("ALTER TABLE {0} ALTER state SET DEFAULT ''", "state has a default"),
}


@pytest.mark.parametrize(("change", "fault"), POSTGRESQL.values(), ids=POSTGRESQL)
async def test_f24_a_table_of_postgresql_that_cannot_exclude(
    change: str, fault: str, postgresql: Operated, name: str
) -> None:
    """The same."""
    await SQLStore(postgresql.url).create_schema()
    for statement in change.format(postgresql.table).split("; "):
        await postgresql.run(statement)
    said = await refusal(postgresql.url)
    assert fault in said
    for statement in mending(said):
        await postgresql.run(statement)
    await grants(postgresql.url, name)
    if "COLLATION" in change:
        await postgresql.run(f"DROP COLLATION c_{postgresql.table}")


SQLITE = {
    "key": ("PRIMARY KEY (resource_name)", "CHECK (true)", "no primary key"),
    "collation": ("resource_name TEXT", "resource_name TEXT COLLATE NOCASE", "different names are one name"),
    "spaces": ("resource_name TEXT", "resource_name TEXT COLLATE RTRIM", "different names are one name"),
    "key's collation": ("KEY (resource_name)", "KEY (resource_name COLLATE NOCASE)", "of the whole text of all rows"),
    "numbers": ("resource_name TEXT", "resource_name STRING", "resource_name has the type numeric"),
    "fence": ("fence BIGINT", "fence TEXT", "fence has the type text"),
    "column": ("keep_until REAL,", "", "no column keep_until"),
    "further": ("state TEXT,", "state TEXT, tenant TEXT NOT NULL,", "tenant needs a value"),
}


@pytest.mark.parametrize("scheme", ["sqlite", "sqlite+aiosqlite"])
@pytest.mark.parametrize(("part", "instead", "fault"), SQLITE.values(), ids=SQLITE)
async def test_f24_a_table_of_sqlite_that_cannot_exclude(
    part: str, instead: str, fault: str, scheme: str, tmp_path: Path, name: str
) -> None:
    """The same. SQLite changes no column, so most tables must be made anew."""
    statement = ddl(sqlite.dialect(), lock_table())
    assert part in statement
    with closing(sqlite3.connect(tmp_path / "locks.db", isolation_level=None)) as file:
        file.execute(statement.replace(part, instead))
        url = f"{scheme}:///{tmp_path}/locks.db"
        said = await refusal(url)
        assert fault in said
        if "drop it" in said:
            file.execute("DROP TABLE asynclock")
        for mend in mending(said):
            file.execute(mend)
    await grants(url, name)


async def test_f24_a_table_of_another_program_is_not_used(postgresql: Operated) -> None:
    """Nor is a view. The error names the option."""
    await postgresql.run(f"CREATE TABLE {postgresql.table} (id integer PRIMARY KEY, resource_name text)")
    await postgresql.run(f"GRANT ALL ON {postgresql.table} TO {postgresql.user}")
    said = await refusal(postgresql.url)
    assert "no column owner, node_info, count, fence" in said
    assert "asynclock_table=" in said
    await postgresql.run(f"DROP TABLE {postgresql.table}")
    await postgresql.run(f"CREATE VIEW {postgresql.table} AS SELECT 1 AS fence")
    await postgresql.run(f"GRANT ALL ON {postgresql.table} TO {postgresql.user}")
    assert "is no table" in await refusal(postgresql.url)
    await postgresql.run(f"DROP VIEW {postgresql.table}")


async def test_f24_a_number_that_the_server_counts_is_no_fence(mariadb: Operated) -> None:
    """MariaDB leaves it in place of the token in its answer to an INSERT."""
    await SQLStore(mariadb.url).create_schema()
    await mariadb.run(f"ALTER TABLE {mariadb.table} ADD id BIGINT NOT NULL AUTO_INCREMENT UNIQUE")
    assert "id is AUTO_INCREMENT" in await refusal(mariadb.url)


async def test_f24_health_and_doctor_name_the_fault(operated: Operated) -> None:
    """And what to do. So does `create_schema`."""
    await SQLStore(operated.url).create_schema()
    key = f"CONSTRAINT {operated.table}_pkey" if "postgresql" in operated.url else "PRIMARY KEY"
    await operated.run(f"ALTER TABLE {operated.table} DROP {key}")
    async with aclosing(Redlock(operated.url)) as client, asyncio.timeout(LIMIT):
        while "is not connected yet" in (health := await client.health()).reason:
            pass  # to connect, a busy machine may need more than its second
    assert not health.ok
    assert "no primary key" in health.reason
    code, found = examined((), ASYNCLOCK_URLS=operated.url)
    assert code == 2
    assert "vote" not in found
    assert "no primary key" in found["table"]["what"]
    assert mending(health.reason)[0] in found["table"]["advice"]
    with pytest.raises(ConfigError, match="no primary key"):
        await SQLStore(operated.url).create_schema()


async def test_f24_doctor_warns_of_triggers(operated: Operated) -> None:
    """They run in each op. A user who may see them learns their names; to others it is a note."""
    await SQLStore(operated.url).create_schema()
    table = operated.table
    if "mariadb" in operated.url:
        assert "triggers" in examined((), ASYNCLOCK_URLS=operated.url)[1]["unchecked"]["what"]
        await operated.run(f"GRANT TRIGGER ON locks.{table} TO {operated.user}@'%'")
        await operated.run(f"CREATE TRIGGER t_{table} BEFORE UPDATE ON {table} FOR EACH ROW SET NEW.node_info = 'x'")
    else:
        await operated.run(f"CREATE RULE t_{table} AS ON DELETE TO {table} DO ALSO NOTHING")
    _, found = examined((), ASYNCLOCK_URLS=operated.url)
    assert found["triggers"]["severity"] == "warning"
    assert f"t_{table}" in found["triggers"]["what"]


async def no_rows_of(operated: Operated) -> None:
    """From now on UPDATE changes no row of its table."""
    table, body = operated.table, "RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'"
    await operated.run(f"CREATE FUNCTION nothing_{table}() {body}")
    calls = f"EXECUTE FUNCTION nothing_{table}()"
    await operated.run(f"CREATE TRIGGER t BEFORE UPDATE ON {table} FOR EACH ROW {calls}")


async def test_f24_a_trigger_that_leaves_writes_out_lets_nobody_in(
    postgresql: Operated, tmp_path: Path, name: str
) -> None:
    """A statement that writes no row is no error of the server. Each of two clients was told that it had the lock."""
    file = tmp_path / "locks.db"
    urls = [postgresql.url, f"sqlite:///{file}"]
    for url in urls:
        async with Redlock(url) as client, client(name):
            pass  # its row is there
    await no_rows_of(postgresql)
    with closing(sqlite3.connect(file)) as session:
        session.execute("CREATE TRIGGER t BEFORE UPDATE ON asynclock BEGIN SELECT RAISE(IGNORE); END")
    for url in urls:
        async with Redlock(url, patience=LIMIT) as client:
            with pytest.raises(QuorumUnavailable, match="a trigger or a rule of the table leaves it out"):
                await client(name).acquire(timeout=0.5)


async def test_f24_names_in_another_order_are_a_warning(
    postgresql: Operated, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They exclude. But a client that looks for its notices may not find them."""
    await SQLStore(postgresql.url).create_schema()
    await postgresql.run(f'ALTER TABLE {postgresql.table} ALTER resource_name TYPE text COLLATE "en-x-icu"')
    await grants(postgresql.url, name)
    assert "not in the order of their bytes" in caplog.text
    assert examined((), ASYNCLOCK_URLS=postgresql.url)[1]["collation"]["severity"] == "warning"


async def test_all_holders_are_listed_where_other_names_are_between_them(
    postgresql: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of another collation, and on several pages."""
    monkeypatch.setattr(transactions, "PAGE", 2)
    await SQLStore(postgresql.url).create_schema()
    await postgresql.run(f'ALTER TABLE {postgresql.table} ALTER resource_name TYPE text COLLATE "en-x-icu"')
    async with Redlock(postgresql.url, **OPTIONS) as client:
        held = [await client(each).acquire(timeout=None) for each in ["job:a", "Job:b", "job:c", "job:d", "Job:e"]]
        assert {each.name async for each in client.holders("job:")} == {"job:a", "job:c", "job:d"}
        for lease in held:
            await lease.release()


async def test_f24_the_first_lock_after_the_table_was_mended(postgresql: Operated, name: str) -> None:
    """A client that was refused goes on by itself."""
    await SQLStore(postgresql.url).create_schema()
    await postgresql.run(f"ALTER TABLE {postgresql.table} ADD further INTEGER NOT NULL")
    async with aclosing(Redlock(postgresql.url, **OPTIONS)) as client:
        with pytest.raises(ConfigError, match="further"):
            await client(name).acquire()
        await postgresql.run(f"ALTER TABLE {postgresql.table} DROP further")
        await granted_soon(client, name)


async def granted_soon(client: Redlock, name: str) -> None:
    """Returns once the client gets the lock again. It gives it back."""
    async with asyncio.timeout(LIMIT):
        while True:
            try:
                async with client(name):
                    return
            except (ConfigError, QuorumUnavailable):
                await asyncio.sleep(0.02)


# -- a table that is changed while clients use it ----------------------------------------------------------------------


def without_key(operated: Operated) -> str:
    key = f"CONSTRAINT {operated.table}_pkey" if "postgresql" in operated.url else "PRIMARY KEY"
    return f"ALTER TABLE {operated.table} DROP {key}"


async def told(client: Redlock, name: str) -> str:
    """The ConfigError that an acquire raises soon."""
    async with asyncio.timeout(LIMIT):
        while True:
            try:
                async with client(name):
                    pass
            except ConfigError as error:
                return str(error)
            except QuorumUnavailable:
                pass
            await asyncio.sleep(0.02)


async def test_f24_a_key_that_is_dropped_under_a_client(mariadb: Operated, name: str, often: None) -> None:
    """MariaDB reports no error. A look at the table finds it: no lock is granted any more. Once the key is there again,
    the client goes on by itself."""
    del often
    async with Redlock(mariadb.url, **OPTIONS) as client:
        await mariadb.run(without_key(mariadb))
        said = await told(client, name)
        assert "no primary key" in said
        assert not (await client.health()).ok
        await mariadb.run(mending(said)[0])
        await granted_soon(client, name)


async def test_f24_a_schema_error_is_followed_by_a_look(postgresql: Operated, name: str) -> None:
    """PostgreSQL refuses ON CONFLICT without a key. The client need not wait for the next minute."""
    async with Redlock(postgresql.url, **{**OPTIONS, "patience": 1}) as client:
        await postgresql.run(without_key(postgresql))
        assert "no primary key" in await told(client, name)


async def test_f24_a_waiter_learns_that_the_table_cannot_exclude(mariadb: Operated, name: str, often: None) -> None:
    """It does not wait until its time is over."""
    del often
    async with Redlock(mariadb.url, **OPTIONS) as client, Redlock(mariadb.url, **OPTIONS) as other:
        lease = await other(name).acquire(timeout=None)
        waiting = asyncio.ensure_future(client(name).acquire(timeout=None))
        while not (await other.inspect(name)).waiters:
            await asyncio.sleep(0.01)
        await mariadb.run(without_key(mariadb))
        with pytest.raises(ConfigError, match="no primary key"):
            await asyncio.wait_for(waiting, LIMIT)
        await lease.release()


async def test_f24_a_renewal_needs_a_table_that_excludes(mariadb: Operated, name: str, often: None) -> None:
    """A holder loses its lease in time, and learns why."""
    del often
    async with Redlock(mariadb.url, **OPTIONS) as client, asyncio.timeout(LIMIT):
        with pytest.raises(LockLost) as caught:
            async with client(name, lease=6):
                await mariadb.run(without_key(mariadb))
                await asyncio.Event().wait()
        assert "no primary key" in f"{caught.value} {caught.value.errors}"


async def test_f24_a_release_reaches_a_table_that_cannot_exclude(mariadb: Operated, name: str, often: None) -> None:
    """So the name is free once the table is mended, however long the lease is."""
    del often
    async with Redlock(mariadb.url, **OPTIONS) as client:
        lease = await client(name).acquire(timeout=None)
        assert lease
        await mariadb.run(without_key(mariadb))
        await told(client, f"{name}:other")
        await lease.release()
        await mariadb.is_free()


# -- a table that is gone ----------------------------------------------------------------------------------------------


@pytest.fixture(params=["postgresql", "mariadb", "sqlite", "sqlite+aiosqlite"])
def dropped(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Any]]:
    """A url, and a function that drops the table."""
    if not request.param.startswith("sqlite"):
        operated: Operated = request.getfixturevalue(request.param)
        yield operated.url, lambda: operated.run(f"DROP TABLE {operated.table}")
        return

    async def drop() -> None:
        with closing(sqlite3.connect(tmp_path / "locks.db", timeout=LIMIT)) as file:
            file.execute("DROP TABLE asynclock")

    yield f"{request.param}:///{tmp_path}/locks.db", drop


async def test_f24_a_table_that_is_dropped_is_made_again(dropped: Any, name: str) -> None:
    """The acquire that finds it out gets the lock."""
    url, drop = dropped
    async with Redlock(url, **OPTIONS) as client:
        async with client(name):
            pass
        await drop()
        async with client(name):
            pass


async def test_f24_a_holder_learns_that_the_table_was_dropped(dropped: Any, name: str) -> None:
    """As soon as a client has made it again: not with its next renewal, 20 s later."""
    url, drop = dropped
    async with Redlock(url, **OPTIONS) as client, asyncio.timeout(LIMIT):
        with pytest.raises(LockLost):
            async with client(name):
                await drop()
                await granted_soon(client, f"{name}:other")
                await asyncio.Event().wait()


async def test_f24_an_idle_client_makes_the_table_again(postgresql: Operated, name: str, often: None) -> None:
    """Nobody asks for a lock. Its look at the table finds it out."""
    del often
    async with Redlock(postgresql.url, **OPTIONS) as client, asyncio.timeout(LIMIT):
        await postgresql.run(f"DROP TABLE {postgresql.table}")
        while await postgresql.run(f"SELECT to_regclass('{postgresql.table}')") is None:
            await asyncio.sleep(0.02)
        async with client(name):
            pass


async def test_f24_a_table_that_may_not_be_made_again_is_a_config_error(postgresql: Operated, name: str) -> None:
    """With what to do. Once its owner has made it, the client goes on."""
    async with Redlock(postgresql.url, **OPTIONS) as client:
        async with client(name):
            pass
        await postgresql.run(f"DROP TABLE {postgresql.table}")
        await postgresql.run(f"REVOKE CREATE ON SCHEMA public FROM {postgresql.user}")
        assert "create_schema" in await told(client, name)
        await postgresql.run(f"GRANT CREATE ON SCHEMA public TO {postgresql.user}")
        await granted_soon(client, name)


@pytest.mark.parametrize("scheme", ["sqlite", "sqlite+aiosqlite"])
async def test_f24_a_file_that_is_deleted_is_made_again(scheme: str, tmp_path: Path, name: str) -> None:
    """With its table, by the client that finds it out."""
    async with Redlock(f"{scheme}:///{tmp_path}/locks.db", **OPTIONS) as client:
        async with client(name):
            pass
        for each in tmp_path.glob("locks.db*"):
            each.unlink()
        await granted_soon(client, name)


async def test_f24_a_key_that_is_dropped_while_the_table_is_checked(
    mariadb: Operated, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right behind the question for it. A look of the same moment finds that, and the check that ends afterwards does
    not hide it until the next look, a minute later."""
    store, fault = SQLStore(mariadb.url), Settings.fault

    async def before_the_change(self: Settings, line: Line) -> ConfigError | None:
        found = await fault(self, line)
        monkeypatch.undo()
        await mariadb.run(without_key(mariadb))
        await database_of(store).look_at_table()
        return found

    async with Redlock(store, **OPTIONS) as client:
        async with client(name):
            pass
        monkeypatch.setattr(Settings, "fault", before_the_change)
        await mariadb.run(f"DROP TABLE {mariadb.table}")
        assert "no primary key" in await told(client, name)


# -- what a role may not read ------------------------------------------------------------------------------------------


@pytest.fixture
async def blind(postgresql: Operated, postgresql_url: str) -> Any:
    """The url of a role that may not read what there is of columns and indexes, its table, and a connection of the
    owner."""
    base = f"d_{postgresql.table}"
    await postgresql.run(f"CREATE DATABASE {base}")
    url = re.sub(r"/postgres(?=$|\?)", f"/{base}", postgresql.url)
    owner = await asyncpg.connect(re.sub(r"/postgres$", f"/{base}", postgresql_url))
    try:
        await owner.execute(f"GRANT CREATE ON SCHEMA public TO {postgresql.user}")
        await SQLStore(url).create_schema()
        for table in ("pg_index", "pg_collation"):
            await owner.execute(f"REVOKE SELECT ON pg_catalog.{table} FROM PUBLIC")
        yield url, postgresql.table, owner
    finally:
        await owner.close()
        await postgresql.run(f"DROP DATABASE {base} WITH (FORCE)")


async def test_f24_what_a_role_may_not_read_is_left_out(
    blind: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With one line in the log, however often it is checked. But two inserts show that there is no key."""
    url, table, owner = blind
    store = SQLStore(url)
    for _ in range(2):
        await grants(store, name)
    (line,) = [each.getMessage() for each in caplog.records if "does not show" in each.getMessage()]
    assert "columns, indexes" in line
    await owner.execute(f"ALTER TABLE {table} DROP CONSTRAINT {table}_pkey")
    assert "no primary key" in await refusal(url)
    assert not await owner.fetchval(f"SELECT count(*) FROM {table} WHERE resource_name ILIKE '%key:%'")


async def test_a_client_that_closes_while_it_prepares_the_table_leaves_no_connection(
    postgresql: Operated, postgresql_url: str, name: str
) -> None:
    """Another session has locked the table. The preparation ends with the client, and connects no more."""
    await grants(postgresql.url, name)
    locking = await asyncpg.connect(postgresql_url)
    await locking.execute(f"BEGIN; LOCK TABLE {postgresql.table} IN ACCESS EXCLUSIVE MODE")
    client = Redlock(postgresql.url, **OPTIONS)
    asking = asyncio.create_task(client(name).acquire())
    await postgresql.waits()
    asking.cancel()
    await asyncio.wait({asking})
    await client.aclose()
    await locking.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    async with asyncio.timeout(LIMIT):
        while await postgresql.connections():
            await asyncio.sleep(0.02)


async def test_f24_a_table_that_cannot_be_made_is_told_in_one_sentence(postgresql: Operated, name: str) -> None:
    """Who makes it, and how: not which rights on it are missing."""
    await postgresql.run(f"REVOKE CREATE ON SCHEMA public FROM {postgresql.user}")
    with pytest.raises(ConfigError, match=r"^\S+ \(table \S+\) has no table .* cannot be made .*docs/stores/sql\.md$"):
        async with Redlock(postgresql.url, **OPTIONS) as client, client(name):
            pass
