"""A SQLite file whose path is relative, or that is deleted or replaced while clients use it. A grant or a renewal needs
the file that is at the path, since others look there."""

from __future__ import annotations

import asyncio
import re
import shutil
import sqlite3
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from asynclock import ConfigError, LockLost, QuorumUnavailable, Redlock
from asynclock.stores.sql import SQLStore
from tests.support.programs import DATABASES, Program, run
from tests.support.waiters import LIMIT, decided

of_databases = pytest.mark.xdist_group("database-programs")  # one process imports the drivers for all
LEASE = 60.0


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle connection stays open, however busy the machine is."""
    monkeypatch.setattr("asynclock.stores.sql.pool._KEPT", 10 * LIMIT)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of the process."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def granted(path: Path, name: str) -> bool:
    """Whether another process, which opens the file now, gets the lock. It gives it back."""
    program = (
        "import asyncio, sys\n"
        "from asynclock import Redlock\n"
        "async def main():\n"
        "    async with Redlock(f'sqlite:///{sys.argv[1]}') as client:\n"
        "        lease = await client(sys.argv[2]).acquire(timeout=0)\n"
        "        print('granted' if lease else 'refused')\n"
        "        if lease: await lease.release()\n"
        "asyncio.run(main())"
    )
    done = run(["-c", program, str(path), name], DATABASES)
    done.check_returncode()
    return done.stdout.strip() == "granted"


@contextmanager
def held_by_another_process(path: Path, name: str) -> Iterator[None]:
    program = (
        "import asyncio, sys\n"
        "from asynclock import Redlock\n"
        "async def main():\n"
        "    async with Redlock(f'sqlite:///{sys.argv[1]}', lease=60) as client, client(sys.argv[2]):\n"
        "        print('held', flush=True)\n"
        "        sys.stdin.read()\n"
        "asyncio.run(main())"
    )
    with Program(
        ["-c", program, str(path), name], DATABASES, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "held\n"
            yield
        finally:
            process.stdin.close()


async def let_idle(store: SQLStore) -> None:
    """Close the idle connections, as happens after two seconds."""
    for database in store._databases.values():  # noqa: SLF001
        database.connected.pool.drop_idle()


@asynccontextmanager
async def client_of(path: Path, kind: str, **options: Any) -> AsyncIterator[Redlock]:
    """By a url, which needs no driver; by a url with a driver; or with an engine of the user."""
    sqlite3.connect(path).execute("PRAGMA journal_mode = WAL").connection.close()
    if kind != "engine":
        async with Redlock(f"{kind}:///{path}", lease=LEASE, **options) as client:
            yield client
        return
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
    try:
        async with Redlock(SQLStore(engine), lease=LEASE, **options) as client:
            yield client
    finally:
        await engine.dispose()


# -- relative paths ----------------------------------------------------------------------------------------------------


@of_databases
@pytest.mark.parametrize("scheme", ["sqlite", "sqlite+aiosqlite"])
async def test_f18_a_relative_path_is_that_of_the_folder_in_which_the_store_was_made(
    scheme: str, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever folder the process is in when it connects, or connects again. The label says where it is."""
    store = SQLStore(f"{scheme}:///locks.db")
    assert store.label == f"sqlite:///{folder}/locks.db"
    (folder / "another").mkdir()
    monkeypatch.chdir(folder / "another")
    async with Redlock(store, lease=LEASE) as client, client(name):
        assert not granted(folder / "locks.db", name)
        monkeypatch.chdir("/")
        await let_idle(store)
        assert await client(name).locked()
    assert [each.name for each in folder.rglob("*.db")] == ["locks.db"]
    assert not (folder / "another/locks.db").exists()


@of_databases
async def test_f18_a_relative_path_through_a_link_is_the_file_that_the_system_opens(folder: Path, name: str) -> None:
    """Where a folder of the path is a link, `..` is the parent of its target."""
    (folder / "target/inner").mkdir(parents=True)
    (folder / "link").symlink_to(folder / "target/inner")
    async with Redlock("sqlite:///link/../locks.db", lease=LEASE) as client, client(name):
        assert not granted(folder / "target/locks.db", name)
    assert not (folder / "locks.db").exists()


def test_f18_a_relative_path_in_an_engine_is_a_config_error() -> None:
    """Its connections may open it in any folder. In memory there is no path."""
    for url in ("sqlite+aiosqlite:///locks.db", "sqlite+aiosqlite:///file:locks.db?uri=true"):
        with pytest.raises(ConfigError, match=re.escape("locks.db is a relative path")):
            SQLStore(create_async_engine(url))
    for url in ("sqlite+aiosqlite://", "sqlite+aiosqlite:////a/locks.db", "sqlite+aiosqlite:///file:/a/b.db?uri=true"):
        SQLStore(create_async_engine(url))


# -- files that are replaced -------------------------------------------------------------------------------------------


def delete(path: Path) -> None:
    """With what is beside it."""
    for each in path.parent.glob("locks.db*"):
        each.unlink()


def rename(path: Path) -> None:
    """With what is beside it."""
    (path.parent / "old").mkdir()
    for each in path.parent.glob("locks.db*"):
        each.rename(path.parent / "old" / each.name)


def replace(path: Path) -> None:
    shutil.copyfile(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def delete_wal(path: Path) -> None:
    Path(f"{path}-wal").unlink()


def delete_both(path: Path) -> None:
    delete_wal(path)
    Path(f"{path}-shm").unlink()


@of_databases
@pytest.mark.parametrize(
    ("kind", "change"),
    [(kind, change) for kind in ("sqlite", "engine") for change in (delete, rename, replace, delete_wal, delete_both)]
    + [("sqlite+aiosqlite", replace)],
)
async def test_f18_a_grant_needs_the_file_at_the_path(kind: str, change: Any, tmp_path: Path, name: str) -> None:
    """An acquire through a connection to another file is an outage that says so. The next one goes where all look. That
    is not promised without the -wal: SQLite may fail until each process has closed the file."""
    path = tmp_path / "locks.db"
    async with client_of(path, kind) as client:
        async with client(name):
            pass
        change(path)
        with pytest.raises(QuorumUnavailable, match=r"replaced|deleted"):
            await client(name).acquire(timeout=0)
        if change not in (delete_wal, delete_both):
            async with client(name):
                assert not granted(path, name)


async def test_f18_a_client_that_only_looks_finds_the_new_file(tmp_path: Path, name: str) -> None:
    """After an error that says that there is another file."""
    path = tmp_path / "locks.db"
    async with client_of(path, "sqlite") as client, asyncio.timeout(LIMIT):
        async with client(name):
            pass
        delete(path)
        with pytest.raises(QuorumUnavailable, match="deleted"):
            await client.inspect(name)
        async with Redlock(f"sqlite:///{path}") as other, other(name):
            while True:
                with suppress(QuorumUnavailable):
                    assert (await client.inspect(name)).holders
                    break
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("change", [delete, rename])
async def test_f18_a_renewal_needs_the_file_at_the_path(change: Any, tmp_path: Path, name: str) -> None:
    """A holder learns at its next renewal that its lease is lost, and why."""
    path = tmp_path / "locks.db"
    async with client_of(path, "sqlite") as client, asyncio.timeout(LIMIT):
        with pytest.raises(LockLost) as caught:
            async with client(name, lease=3):
                change(path)
                await asyncio.Event().wait()
        told = f"{caught.value} {caught.value.errors}"
        assert re.search("was (replaced|deleted)", told), told


async def test_f18_a_waiter_gets_no_lock_in_a_file_that_was_replaced(tmp_path: Path, name: str) -> None:
    """Neither from a holder of its process, nor from one of another: it waits in the file at the path."""
    path = tmp_path / "locks.db"
    url = f"sqlite:///{path}"
    store, another = SQLStore(url), SQLStore(url)
    async with Redlock(store, lease=6) as holds, Redlock(store, lease=6) as near, Redlock(another, lease=6) as far:
        lease = await holds(name).acquire(timeout=None)
        waiting = [asyncio.create_task(client(name).acquire(timeout=None)) for client in (near, far)]
        await until_async(lambda: count_waiters(holds, name), 2)
        rename(path)
        async with Redlock(url, lease=LEASE) as other:
            async with other(name):
                with suppress(LockLost):  # its client may have noticed it already
                    await lease.release()
                await until_async(lambda: count_waiters(other, name), 2)
                assert not any(each.done() for each in waiting)
            for each in asyncio.as_completed(waiting, timeout=LIMIT):
                await (await each).release()


async def count_waiters(client: Redlock, name: str) -> int:
    return sum(each.tasks for each in (await client.inspect(name)).waiters)


async def until_async(ask: Callable[[], Awaitable[int]], number: int) -> None:
    async with asyncio.timeout(LIMIT):
        while await ask() < number:
            await asyncio.sleep(0.02)


async def test_f18_a_new_file_has_its_own_clock(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose connection was idle meanwhile goes by that clock, too."""
    path = tmp_path / "locks.db"
    store = SQLStore(f"sqlite:///{path}")
    async with Redlock(store, lease=LEASE) as client:
        async with client(name):
            pass
        await let_idle(store)
        path.unlink()
        hour_ago = time.time() - 3600
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda: hour_ago)
            other = Redlock(f"sqlite:///{path}", lease=LEASE)
            lease = await other(name).acquire(timeout=None)
        assert await decided(lambda: client(name).acquire(timeout=3)) is None
        async with other:
            await lease.release()


@of_databases
async def test_f18_connections_of_a_pool_may_have_another_file_open(tmp_path: Path, name: str) -> None:
    """Those that an engine had before the store was made are not used."""
    path = tmp_path / "locks.db"
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
    async with engine.connect() as connection:
        await connection.exec_driver_sql("CREATE TABLE t (x)")
    path.unlink()
    async with Redlock(SQLStore(engine), lease=LEASE) as client, client(name):
        assert not granted(path, name)
    await engine.dispose()


@of_databases
@pytest.mark.parametrize("mode", ["wal", "delete"])
async def test_f18_connections_of_a_pool_may_have_other_logs_open(mode: str, tmp_path: Path, name: str) -> None:
    """Those with which the program itself opened -wal and -shm, before others replaced these two. It may have made the
    connections before the file had them."""
    path = tmp_path / "locks.db"
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
    async with Redlock(SQLStore(engine)) as client, client(name):
        pass
    await engine.dispose()
    sqlite3.connect(path).execute(f"PRAGMA journal_mode = {mode}").connection.close()
    connections = [await engine.connect() for _ in range(3)]
    sqlite3.connect(path).execute("PRAGMA journal_mode = WAL").connection.close()
    for each in connections:
        await each.exec_driver_sql("SELECT * FROM asynclock")
        await each.close()
    delete_both(path)
    with held_by_another_process(path, name):
        async with Redlock(SQLStore(engine), lease=LEASE) as client:
            assert await client(name).acquire(timeout=0) is None
    await engine.dispose()


@of_databases
async def test_f18_a_locked_file_does_not_keep_the_program_from_connecting(tmp_path: Path, name: str) -> None:
    """With its own engine. Nor does such a connection keep a lock from being granted later."""
    path = tmp_path / "locks.db"
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}", connect_args={"timeout": 0})
    store = SQLStore(engine)
    async with Redlock(store, lease=LEASE) as client:
        async with client(name):
            pass
        await let_idle(store)
        await engine.dispose()
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            async with engine.connect():
                pass
            other.execute("COMMIT")
        async with client(name):
            assert not granted(path, name)
    await engine.dispose()


@of_databases
async def test_f18_a_link_may_be_switched(tmp_path: Path, name: str) -> None:
    """As a deployment does it: from then on its clients use the file to which it leads."""
    path, old, new = (tmp_path / each for each in ("locks.db", "old.db", "new.db"))
    old.touch()
    path.symlink_to(old)
    async with Redlock(f"sqlite:///{path}", lease=LEASE) as client:
        async with client(name):
            assert Path(f"{old}-wal").exists()
        new.touch()
        (tmp_path / "link").symlink_to(new)
        (tmp_path / "link").replace(path)
        with pytest.raises(QuorumUnavailable, match="replaced"):
            await client(name).acquire(timeout=0)
        async with client(name):
            assert not granted(new, name)
