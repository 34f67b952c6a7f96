"""Mistakes that only the user can solve: a SQL store says so at once, and what to do."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from asynclock import ConfigError, QuorumUnavailable, Redlock
from asynclock.rules.model import ACQUIRE, Op, Verb
from asynclock.stores import store_for
from asynclock.stores.sql import SQLStore
from tests.support.commands import examined
from tests.support.programs import DATABASES, run_python
from tests.support.services.mariadb import own_mariadb
from tests.support.sql_states import administered
from tests.support.still_clock import turns
from tests.support.waiters import LIMIT


@pytest.mark.parametrize(
    "url",
    [
        *("sqlite:///a.db?asynclock_tabel=locks", "sqlite:///a.db?table=locks", "sqlite:///a.db?prefix=x&timeout="),
        *("sqlite+aiosqlite:///a.db?timeout=5", "sqlite:///a.db?asynclock_table=", "sqlite:///a.db?asynclock_table"),
        *("postgresql://db/a?asynclock_tabel=x", "mariadb://db/a?ssl_ca=b&asynclock_tabel", "mysql://h?asynclock_t=1"),
        "postgresql://db/a?asynclock_table=b&asynclock_table=c",
    ],
)
def test_an_option_that_would_be_ignored_is_refused(url: str) -> None:
    """Two clients would use two tables, and would not exclude each other."""
    odd = "|".join(each.partition("=")[0] for each in url.partition("?")[2].split("&"))
    with pytest.raises(ConfigError, match=f"the wrong option '({odd})'.*asynclock_table"):
        store_for(url)


@pytest.mark.parametrize(
    ("url", "right"),
    [("postgres://me:kilowatt@db/a", "postgresql://"), ("postgres+psycopg://db", "postgresql+psycopg://")],
)
def test_the_url_of_a_hosting_service_gets_the_right_scheme(url: str, right: str) -> None:
    """SQLAlchemy does not take it either."""
    with pytest.raises(ConfigError, match=re.escape(f"write {right}") + "$"):
        Redlock(url)


def test_an_engine_needs_a_store() -> None:
    """The message names it."""
    with pytest.raises(ConfigError, match=re.escape("Redlock(SQLStore(engine))")):
        Redlock(create_async_engine("sqlite+aiosqlite:///a.db"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("path", "reason"), [("none/a.db", "there is no folder {}/none"), ("", "{} is a folder")])
async def test_a_file_that_cannot_be_opened_names_its_folder(path: str, reason: str, tmp_path: Path) -> None:
    """SQLite says only that it cannot."""
    with pytest.raises(ConfigError, match=re.escape(reason.format(tmp_path))):
        async with Redlock(f"sqlite:///{tmp_path / path}"):
            pass


@pytest.mark.parametrize(
    ("option", "database", "hint"),
    [
        ("sslmode=require", "postgresql", "asyncpg refuses the option 'sslmode' .*ssl=require"),
        ("ssl=kilowatt", "postgresql", "the option 'ssl' .*ssl=require"),
        ("command_timeout=kilowatt&ssl=disable", "postgresql", "the option 'command_timeout' of the url"),
        ("watts=kilowatt", "postgresql", "asyncpg refuses the option 'watts'"),
        ("ssl=kilowatt", "mariadb", "the option 'ssl' .*ssl_ca"),
        ("connect_timeout=kilowatt", "mariadb", "asyncmy refuses the option 'connect_timeout'"),
        ("watts=kilowatt", "mariadb", "asyncmy refuses the option 'watts'"),
        ("ssl_ca=/absent/kilowatt", "mariadb", "the program cannot read the file of the option 'ssl_ca'"),
        (f"ssl_ca={__file__}", "mariadb", "the file of the option 'ssl_ca' has no certificate"),
    ],
)
async def test_an_option_that_the_driver_refuses_is_a_config_error(
    option: str, database: str, hint: str, request: pytest.FixtureRequest
) -> None:
    """At once. It names the option, and shows no value, which may be secret."""
    url = request.getfixturevalue(f"{database}_url")
    began = time.monotonic()
    with pytest.raises(ConfigError, match=hint) as caught:
        async with Redlock(f"{url}?{option}", patience=60):
            pass
    assert "kilowatt" not in f"{caught.value} {caught.value.__cause__!r} {caught.value.__context__!r}"
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("file", "fault"), [("/absent/root.crt", "cannot read the file of"), (__file__, "has no certificate")]
)
async def test_a_file_that_the_environment_names_is_a_config_error(
    file: str, fault: str, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncpg has no option for it. It says only that there is no such file, and not which."""
    monkeypatch.setenv("PGSSLROOTCERT", file)
    with pytest.raises(ConfigError, match=fault) as caught:
        async with Redlock(f"{postgresql_url}?ssl=verify-full", patience=LIMIT):
            pass
    assert "$PGSSLROOTCERT" in str(caught.value)


@pytest.fixture
async def reader(
    postgresql_url: str, mariadb_url: str, name: str, request: pytest.FixtureRequest
) -> AsyncIterator[str]:
    """The url of a user who may only read the table."""
    table = re.sub(r"\W", "_", name)[-60:].strip("_")
    url, user = (postgresql_url, "postgres@") if request.param == "postgresql" else (mariadb_url, "asynclock@")
    await SQLStore(url, table).create_schema()
    await run(url, f"CREATE USER u_{table}", f"GRANT SELECT ON {table} TO u_{table}")
    yield f"{url.replace(user, f'u_{table}@')}?asynclock_table={table}"
    await run(url, f"DROP TABLE {table}", f"DROP USER u_{table}")


async def run(url: str, *statements: str) -> None:
    """As the owner."""
    engine = create_async_engine(
        url.replace("postgresql:", "postgresql+asyncpg:").replace("mariadb:", "mariadb+asyncmy:")
    )
    async with engine.begin() as connection:
        for statement in statements:
            await connection.exec_driver_sql(statement)
    await engine.dispose()


@pytest.mark.parametrize("reader", ["postgresql", "mariadb"], indirect=True)
async def test_a_user_who_may_only_read_is_a_config_error(reader: str, name: str) -> None:
    """At once, with the rights that it needs."""
    with pytest.raises(ConfigError, match="SELECT, INSERT, UPDATE and DELETE"):
        async with Redlock(reader, patience=LIMIT) as client, client(name):
            pass


async def test_a_file_that_may_not_be_written_is_a_config_error(tmp_path: Path, name: str) -> None:
    """Also where that begins while the client has it open."""
    store = SQLStore(f"sqlite:///{tmp_path}/locks.db")
    async with Redlock(store, patience=LIMIT) as client:
        async with client(name):
            pass
        (database,) = store._databases.values()  # noqa: SLF001
        async with database.connected.pool.line() as line:
            await line.run("PRAGMA query_only = 1")
        with pytest.raises(ConfigError, match="write rights on the file, and on its folder"):
            await client(name).acquire()


@pytest.mark.parametrize("reader", ["postgresql"], indirect=True)
async def test_a_server_that_is_read_only_is_an_outage(reader: str, postgresql_url: str, name: str) -> None:
    """A standby may become master. The next op asks over another connection."""
    _, user, table = re.split(r"//|@.*=", reader)
    await run(
        postgresql_url, f"GRANT ALL ON {table} TO {user}", f"ALTER USER {user} SET default_transaction_read_only = on"
    )
    async with aclosing(Redlock(reader, patience=1)) as client, asyncio.timeout(LIMIT):
        said = ""
        while "it is a standby" not in said:  # on a busy machine the last question may have no answer
            with pytest.raises(QuorumUnavailable) as raised:
                await client(name).acquire()
            said = str(raised.value)
        await run(postgresql_url, f"ALTER USER {user} RESET default_transaction_read_only")
        async with client(name):
            pass


async def test_a_binary_log_of_statements_is_a_config_error(name: str) -> None:
    """With the remedy. MariaDB refuses each write of a transaction with READ COMMITTED. `doctor` finds it."""
    with own_mariadb("--log-bin", "--binlog-format=STATEMENT") as server:
        with pytest.raises(ConfigError, match="SET GLOBAL binlog_format = MIXED"):
            async with Redlock(server.url, patience=LIMIT) as client, client(name):
                pass
        code, found = examined((), ASYNCLOCK_URLS=server.url)
        assert code == 2
        assert "log" in found
        assert "vote" not in found
        await run(server.url, "SET GLOBAL binlog_format = MIXED")
        async with Redlock(server.url) as client, client(name):
            pass


FULL = """
import asyncio, resource, sys
from asynclock import QuorumUnavailable, Redlock

async def main():
    async with Redlock(sys.argv[1], lease=60) as client:
        leases = []
        resource.setrlimit(resource.RLIMIT_FSIZE, (28_000, resource.RLIM_INFINITY))
        for number in range(1000):
            try:
                # Long names fill the file soon: a busy machine may not release many locks in the time of a close.
                leases.append(await client(f"{number:0200}", renew=False).acquire(timeout=0))
            except QuorumUnavailable as error:
                print(error)
                break
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        async with client("lock"):
            print("granted")

asyncio.run(main())
"""


@pytest.mark.xdist_group("database-programs")
@pytest.mark.parametrize("scheme", ["sqlite", "sqlite+aiosqlite"])
def test_f3_a_disk_that_takes_no_more_is_an_outage_that_says_so(scheme: str, tmp_path: Path) -> None:
    """SQLite ends such a transaction itself. That its rollback fails then is not what the user reads. It goes on once
    the disk takes more."""
    said = run_python(FULL, f"{scheme}:///{tmp_path}/locks.db", preload=DATABASES).splitlines()
    assert "disk I/O error" in said[0]
    assert said[-1] == "granted"


@pytest.mark.parametrize("state", ["kilowatt", '{"v": 99}'], ids=["damaged", "newer"])
@pytest.mark.parametrize("service", ["postgresql", "mariadb", "sqlite"])
async def test_an_acquire_of_a_row_that_cannot_be_read_leaves_nothing_to_undo(
    service: str, state: str, name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Nothing was written, so no release follows. It could not be carried out either."""

    class Noting(SQLStore):
        begun: list[Verb]

        def decide(self, prefix: str, op: Op, answer: Any) -> Any:
            self.begun.append(op.verb)
            return super().decide(prefix, op, answer)

    url = f"sqlite:///{tmp_path / 'locks'}" if service == "sqlite" else request.getfixturevalue(f"{service}_url")
    store = Noting(url)
    store.begun = []
    async with Redlock(store, prefix="", patience=LIMIT, connect_timeout=LIMIT) as client:
        async with client(name):
            pass
        async with administered(url) as admin:
            await admin.execute(
                text("UPDATE asynclock SET state = :state WHERE resource_name = :name"), {"state": state, "name": name}
            )
        store.begun.clear()
        with pytest.raises(ConfigError, match="the row"):
            await client.semaphore(name, 2).acquire(timeout=0)
        await turns()
        assert store.begun == [ACQUIRE]
