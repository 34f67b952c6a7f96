"""Reading locks in a database: `inspect`, `holders`, `locked` and the commands that look need the right to read only,
write nothing, and do not wait for those who lock rows."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import aclosing, suppress
from pathlib import Path

import asyncpg
import pytest

from asynclock import ConfigError, QuorumUnavailable, Redlock
from tests.support.commands import answered
from tests.support.operators import Operated
from tests.support.programs import DATABASES, run_python
from tests.support.services.postgresql import PostgreSQL, own_postgresql
from tests.support.waiters import LIMIT, healthy, until

of_databases = pytest.mark.xdist_group("database-programs")  # one process imports the drivers for all
NO_RIGHT = "its user needs SELECT, INSERT, UPDATE and DELETE on the table"


@pytest.fixture
def database(request: pytest.FixtureRequest) -> Operated:
    """A database with a table and an operator; its name is the parameter."""
    operated: Operated = request.getfixturevalue(request.param)
    return operated


both = pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)


@both
async def test_a_user_with_select_sees_holders_and_waiters(database: Operated, name: str) -> None:
    """Without another right, by all ways to look; and it takes no lock, which it is told at once."""
    async with Redlock(database.url) as client, client(name) as lease, database.reader() as url:
        async with aclosing(Redlock(url, patience=LIMIT)) as reader:
            info = await reader.inspect(name)
            assert (info.fence, len(info.holders), info.kind) == (lease.fence, 1, "mutex")
            assert [each.name async for each in reader.holders()] == [name]
            assert await reader(name).locked()
            assert not await reader(f"{name}:free").locked()
            assert await reader.multi(f"{name}:free", name).locked()
            with pytest.raises(ConfigError, match=NO_RIGHT):
                await reader(f"{name}:free").acquire()
            assert [each.name async for each in reader.holders()] == [name]


@both
async def test_the_commands_that_look_need_select_only(database: Operated, name: str) -> None:
    """ls, inspect and top answer; health says that no lock can be taken."""
    async with Redlock(database.url) as client, client(name), database.reader() as url:
        shown = await asyncio.to_thread(answered, "ls", "--url", url, "--json")
        assert (shown.returncode, [each["name"] for each in json.loads(shown.stdout)]) == (0, [name])
        shown = await asyncio.to_thread(answered, "inspect", name, "--url", url)
        assert (shown.returncode, "HOLDER" in shown.stdout) == (0, True), shown
        health = await asyncio.to_thread(answered, "health", "--url", url)
        assert (health.returncode, NO_RIGHT in health.stdout) == (69, True), health
        top = await asyncio.to_thread(answered, "top", "--iterations", "1", "--url", url)
        assert (top.returncode, name in top.stdout, NO_RIGHT in top.stdout) == (0, True, False), top
        assert top.stdout.startswith("ok: 1 of 1 server; 1 hold"), top


@both
async def test_a_look_makes_no_table(database: Operated) -> None:
    """Neither ls of a user who may make it, nor a client whose user may not; both say who makes it."""
    shown = await asyncio.to_thread(answered, "ls", "--url", database.url)
    assert (shown.returncode, "create_schema()" in shown.stderr) == (64, True), shown
    query = f"SELECT count(*) FROM information_schema.tables WHERE table_name = '{database.table}'"
    assert await database.run(query) == 0
    async with Redlock(database.url), database.reader() as url, aclosing(Redlock(url)) as reader:
        await database.run(f"DROP TABLE {database.table}")
        with pytest.raises(ConfigError, match=r"create_schema\(\)"):
            await reader.inspect("any")


@both
async def test_a_look_waits_for_no_locked_row(database: Operated, name: str) -> None:
    """Another session has locked the row of the name, and has changed it: a look sees the last commit."""
    async with Redlock(database.url) as client, client(name) as lease, asyncio.timeout(LIMIT):
        await database.run("START TRANSACTION")
        await database.run(f"UPDATE {database.table} SET fence = 0, count = 0 WHERE resource_name = '{name}'")
        async with aclosing(Redlock(database.url)) as other:
            info = await other.inspect(name)
            assert await other(name).locked()
            assert [each.name async for each in other.holders(name)] == [name]
        await database.run("ROLLBACK")
        assert (info.fence, len(info.holders)) == (lease.fence, 1)


@both
async def test_a_client_that_only_looks_writes_nothing(database: Operated, name: str) -> None:
    """Not even in the background: nothing is removed from the table, and no statement needs a right beyond SELECT."""
    async with Redlock(database.url) as client, client(name):
        pass
    before = await database.run(f"SELECT sum(fence + update_time) FROM {database.table}")
    async with aclosing(Redlock(database.url)) as reader:
        await reader.inspect(name)
        await reader(name).locked()
        tasks = {each.get_name() for each in asyncio.all_tasks()}
    assert "asynclock removes rows" not in tasks
    assert await database.run(f"SELECT sum(fence + update_time) FROM {database.table}") == before


# -- a standby -------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[PostgreSQL, PostgreSQL]]:
    """A primary, and its standby, which is not started yet."""
    folder = Path(tempfile.mkdtemp(prefix="asynclock-pg-"))
    standby: PostgreSQL | None = None
    try:
        with own_postgresql() as primary:
            standby = primary.copy(folder)
            yield primary, standby
    finally:
        if standby is not None:
            standby.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def test_a_standby_can_be_read_and_is_used_once_it_is_promoted(
    pair: tuple[PostgreSQL, PostgreSQL], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A look says that it is a standby's; an acquire is an outage until then, and waiters get push messages later."""
    caplog.set_level("INFO", "asynclock")
    primary, standby = pair
    async with Redlock(primary.url) as client:
        lease = await client(name).acquire()
        assert lease is not None
        await asyncio.to_thread(standby.start)
        async with aclosing(Redlock(standby.url, patience=0.5)) as reader, asyncio.timeout(2 * LIMIT):
            fence = 0
            while fence != lease.fence:  # it replays what the primary has sent: the table, and then the row
                await asyncio.sleep(0.05)
                with suppress(ConfigError):
                    fence = (await reader.inspect(name)).fence
            info = await reader.inspect(name)
            assert (len(info.holders), await reader(name).locked()) == (1, True)
            assert [each.name async for each in reader.holders()] == [name]
            assert "of a standby, which may be behind its primary" in "".join(info.nodes.values())
            async with aclosing(Redlock(f"{standby.url}?asynclock_table=other")) as other:
                with pytest.raises(ConfigError, match=r"create_schema\(\)"):
                    await other.inspect(name)
            with pytest.raises(QuorumUnavailable, match="is read-only"):
                await reader(f"{name}:free").acquire()
            while "is read-only" not in (await reader.health()).reason:
                pass
            shown = await asyncio.to_thread(answered, "ls", "--url", standby.url)
            assert (shown.returncode, name in shown.stdout) == (0, True), shown
            assert "is a standby: what it shows may be behind" in shown.stderr
            assert sum("is a standby" in each for each in caplog.messages) == 3
            await client.aclose()
            assert await promote(standby)
            async with reader(f"{name}:free") as taken:
                assert taken.fence
            assert "standby" not in "".join((await reader.inspect(name)).nodes.values())
            await until(lambda: any("push messages" in each and "arrive now" in each for each in caplog.messages))


async def promote(standby: PostgreSQL) -> bool:
    """Returns once it is a primary."""
    connection = await asyncpg.connect(standby.url)
    promoted = await connection.fetchval("SELECT pg_promote()")
    await connection.close()
    return bool(promoted)


# -- a file ----------------------------------------------------------------------------------------------------------

READER = """
    import asyncio, os, sys
    from contextlib import aclosing
    from asynclock import ConfigError, Redlock

    async def main(url: str, name: str) -> None:
        async with aclosing(Redlock(url)) as client:
            try:
                info = await client.inspect(name)
                listed = [each.name async for each in client.holders()]
                print(info.fence, len(info.holders), await client(name).locked(), listed)
                await client(name + ":free").acquire()
            except ConfigError as error:
                print(error)

    import asynclock.stores.sql
    import aiosqlite
    if os.geteuid() == 0:
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
    asyncio.run(main(*sys.argv[1:]))
"""
"""A process of a user who may read the file only: it looks, and tries to lock."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that other users may read."""
    made = Path(tempfile.mkdtemp(prefix="asynclock-sqlite-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@of_databases
async def test_a_file_that_may_only_be_read_can_be_looked_at(folder: Path, name: str) -> None:
    """While a client has it open. To take a lock is a ConfigError at once."""
    url = f"sqlite:///{folder}/locks.db"
    async with Redlock(url) as client, client(name) as lease:
        writable(folder, False)
        seen, refused = (await asyncio.to_thread(run_python, READER, url, name, preload=DATABASES)).splitlines()
        writable(folder, True)
        assert seen == f"{lease.fence} 1 True ['{name}']"
        assert "write rights on the file, and on its folder" in refused


@of_databases
@pytest.mark.parametrize("mode", [0o755, 0o777], ids=["folder-of-others", "folder-for-all"])
async def test_a_reader_leaves_no_files_beside_a_file_that_nobody_has_open(folder: Path, name: str, mode: int) -> None:
    """They would belong to it, and the clients that write could not use them. The error says when it can be read."""
    url = f"sqlite:///{folder}/locks.db"
    async with Redlock(url) as client, client(name):
        pass
    await until(lambda: [each.name for each in folder.iterdir()] == ["locks.db"])  # its thread may end after the client
    writable(folder, False)
    folder.chmod(mode)
    (refused,) = (await asyncio.to_thread(run_python, READER, url, name, preload=DATABASES)).splitlines()
    writable(folder, True)
    assert "no client has it open: read it while a client has" in refused
    assert [each.name for each in folder.iterdir()] == ["locks.db"]


def writable(folder: Path, may: bool) -> None:
    """For others than root, who may always."""
    for each in folder.iterdir():
        each.chmod(0o644 if may else 0o444)
    folder.chmod(0o755 if may else 0o555)


async def test_a_look_makes_no_file(tmp_path: Path) -> None:
    """ls of a path that is wrong says so."""
    shown = await asyncio.to_thread(answered, "ls", "--url", f"sqlite:///{tmp_path}/typo.db")
    assert (shown.returncode, "typo.db has no table asynclock" in shown.stderr) == (64, True), shown
    assert list(tmp_path.iterdir()) == []


async def test_a_look_does_not_wait_for_a_writer_of_the_file(tmp_path: Path, name: str) -> None:
    """Another process is in the middle of a transaction."""
    url = f"sqlite:///{tmp_path}/locks.db"
    async with Redlock(url) as client, client(name), aclosing(Redlock(url)) as other, asyncio.timeout(LIMIT):
        writer = sqlite3.connect(tmp_path / "locks.db", isolation_level=None)
        writer.execute("BEGIN EXCLUSIVE")
        writer.execute("UPDATE asynclock SET count = 0")
        assert await other(name).locked()
        assert len((await other.inspect(name)).holders) == 1
        writer.execute("ROLLBACK")
        writer.close()


# -- a table that another session has locked ---------------------------------------------------------------------------


@both
async def test_health_and_a_look_over_a_locked_table_say_so(database: Operated, name: str) -> None:
    """A new client, and one that was connected before."""
    async with Redlock(database.url) as before, before(name):
        async with database.unreadable():
            async with aclosing(Redlock(database.url)) as client:
                for each in (client, before):
                    async with asyncio.timeout(LIMIT):  # to connect, a busy machine may need more than its second
                        while "is not connected yet" in (health := await each.health()).reason:
                            pass
                    assert not health.ok
                    assert "another session" in health.reason
                    assert "not connected" not in health.reason
                with pytest.raises(QuorumUnavailable, match="another session"):
                    await client.inspect(name)
        await healthy(before)


async def test_health_over_a_locked_file_says_so(tmp_path: Path) -> None:
    """At the first use of a client, and of the file."""
    path = tmp_path / "locks.db"
    writer = sqlite3.connect(path, isolation_level=None)
    for mode in ("delete", "wal"):
        writer.execute(f"PRAGMA journal_mode = {mode}")
        writer.execute("BEGIN EXCLUSIVE")
        async with aclosing(Redlock(f"sqlite:///{path}")) as client:
            async with asyncio.timeout(LIMIT):  # to connect, a busy machine may need more than its second
                while "is not connected yet" in (reason := (await client.health()).reason):
                    pass
            assert "another session has locked" in reason
            assert "not connected" not in reason
            writer.execute("ROLLBACK")
            async with asyncio.timeout(LIMIT):
                while not (await client.health()).ok:
                    pass
    writer.close()
