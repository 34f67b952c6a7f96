"""A SQLite file as the store of many processes of one machine."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import threading
import time
from pathlib import Path

import pytest

from asynclock import ConfigError, Redlock
from asynclock._clock import now
from asynclock.stores.sql import SQLStore, machine_clock
from asynclock.stores.sql.file_lines import _FORKS, Inline, _driven
from asynclock.stores.sql.files import is_network, type_of
from asynclock.stores.sql.lines import Line
from asynclock.stores.sql.rows import CLOCK, Row
from tests.support.programs import COMMANDS, DATABASES, Program, run, run_python
from tests.support.sql_states import read_rows
from tests.support.waiters import LIMIT, until

of_databases = pytest.mark.xdist_group("database-programs")  # one process imports the drivers for all


@pytest.fixture
def file(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/locks.db"


WORKER = """
import asyncio, os, sys
from asynclock import Redlock
async def main(url, name, shared):
    async with Redlock(url, lease=3.0, patience=20) as client:
        while True:
            async with client(name) as lease:
                with open(shared, "a") as file:
                    file.write(f"{lease.fence} {os.getpid()} in\\n")
                    file.flush()
                    await asyncio.sleep(0.001)
                    lease.ensure_held()
                    file.write(f"{lease.fence} {os.getpid()} out\\n")
asyncio.run(main(*sys.argv[1:]))
"""


@of_databases
async def test_processes_share_a_file_and_may_be_killed(file: str, name: str, tmp_path: Path) -> None:
    """4 processes take turns; each is killed in turn, at any moment. No two are inside, and the fences rise."""
    shared = tmp_path / "shared"
    started = [Program(["-c", WORKER, file, name, str(shared)], DATABASES, stderr=subprocess.PIPE) for _ in range(4)]
    try:
        await until(lambda: shared.exists() and len(shared.read_text().splitlines()) > 20)
        for process in started:
            before = len(shared.read_text().splitlines())
            process.kill()
            process.wait()
            if process is not started[-1]:
                await until(lambda before=before: len(shared.read_text().splitlines()) > before + 4)  # type: ignore[misc]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    lines = [each.split() for each in shared.read_text().splitlines()]
    fences = [int(fence) for fence, _, what in lines if what == "in"]
    assert fences == sorted(set(fences))
    inside = None
    for fence, pid, what in lines:
        if what == "out":
            assert inside == (fence, pid)  # nobody came in meanwhile
        inside = (fence, pid) if what == "in" else None


FORKED = """
import asyncio, os, signal, subprocess, sys, warnings
from asynclock import Redlock

warnings.simplefilter("ignore", DeprecationWarning)  # a fork of a process with threads
OTHER = '''
import asyncio, sys
from asynclock import Redlock
async def main():
    async with Redlock(sys.argv[1]) as other:
        print("granted" if await other("job").acquire(timeout=0) else "refused")
asyncio.run(main())
'''
client, loop = Redlock(sys.argv[1], lease=20), asyncio.new_event_loop()
ready, closed = os.pipe(), os.pipe()

async def use():
    async with client("another"):
        pass

async def child():
    await use()
    os.write(ready[1], b"1")
    os.read(closed[0], 1)
    lease = await client("job").acquire()
    other = [sys.executable, "-c", OTHER, sys.argv[1]]
    done = await asyncio.to_thread(subprocess.run, other, stdout=subprocess.PIPE)  # a loop that stands still warns
    print(done.stdout.decode().strip(), flush=True)
    await lease.release()
    await client.aclose()

loop.run_until_complete(use())
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    asyncio.new_event_loop().run_until_complete(child())
    os._exit(0)
os.read(ready[0], 1)
loop.run_until_complete(client.aclose())
loop.close()
os.write(closed[1], b"1")
assert os.waitpid(pid, 0)[1] == 0
"""


@of_databases
def test_a_forked_child_excludes_others_after_its_parent_has_closed(file: str) -> None:
    """The library of SQLite in the child does not take the locks of the parent for its own. If it did, the parent would
    delete the log of the child, and nobody would see what the child commits."""
    assert run_python(FORKED, file, preload=DATABASES) == "refused\n"


def test_a_fork_waits_for_the_transaction_that_runs(tmp_path: Path) -> None:
    """Then the connection is closed, and the next transaction opens it again."""
    (tmp_path / "locks.db").touch()
    inline = Inline(str(tmp_path / "locks.db"))
    inline.opened().execute("CREATE TABLE t (x)")
    order, running = list[str](), threading.Event()

    async def transaction(line: Line) -> None:
        await line.run("BEGIN IMMEDIATE; INSERT INTO t VALUES (1)")
        running.set()
        time.sleep(0.05)
        await line.run("COMMIT")
        order.append("committed")

    thread = threading.Thread(target=_driven, args=(transaction, inline))
    thread.start()
    assert running.wait(LIMIT)
    _FORKS.before()
    order.append("fork")
    _FORKS.after()
    thread.join()
    assert order == ["committed", "fork"]
    assert inline.opened().execute("SELECT x FROM t").fetchall() == [(1,)]
    inline.close()


def test_a_fork_waits_for_a_connection_that_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that began in the middle of a close would find the file locked for ever."""
    order: list[str] = []
    closing, forking = threading.Event(), threading.Event()

    class Slow(sqlite3.Connection):
        def close(self) -> None:
            closing.set()
            assert forking.wait(LIMIT)
            time.sleep(0.05)  # the fork would come meanwhile
            super().close()
            order.append("closed")

    connect = sqlite3.connect
    (tmp_path / "locks.db").touch()
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **options: connect(*args, **options, factory=Slow))
    inline = Inline(str(tmp_path / "locks.db"))
    inline.opened()
    thread = threading.Thread(target=inline.close)
    thread.start()
    assert closing.wait(LIMIT)
    forking.set()
    _FORKS.before()
    order.append("fork")
    _FORKS.after()
    thread.join(LIMIT)
    assert order == ["closed", "fork"]


async def test_b2_the_wall_clock_may_jump(file: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour forward or back, in one process: the name stays held, and the fences rise."""
    async with Redlock(file) as client:
        lease = await client(name).acquire(timeout=None)
        assert lease
        fence = lease.fence
        for jump in (3600.0, -3600.0):
            real = time.time
            monkeypatch.setattr(time, "time", lambda jump=jump, real=real: real() + jump)
            async with Redlock(file) as other:
                assert await other(name).acquire(timeout=0) is None
                assert (await other.inspect(name)).holders[0].remaining == pytest.approx(30, abs=5)
        await lease.release()
        async with Redlock(file) as other, other(name) as lease:
            assert lease.fence > fence


async def test_b2_time_goes_on_after_a_boot(file: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another boot id: the time begins where the file was last written, although the wall clock is behind."""
    store = SQLStore(file)
    async with Redlock(store) as client, client(name):
        _, before = await read_rows(store)
    monkeypatch.setattr("asynclock.stores.sql.database.boot", lambda: "another boot")
    monkeypatch.setattr(time, "time", lambda: 1_000_000.0)
    again = SQLStore(file)
    async with Redlock(again):
        _, now = await read_rows(again)
    assert before - 1 < now < before + 60


async def test_b2_a_wall_clock_that_is_adjusted_is_no_boot(
    file: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system without a boot id has only the moment of the boot, which moves with that clock by parts of a second. The
    clock of the file stays what it was."""
    monkeypatch.setattr(machine_clock, "_BOOT_ID", tmp_path / "none")
    stored = list[Row]()
    for moment in (1_700_000_004.9, 1_700_000_005.1, 1_700_000_004.8):
        monkeypatch.setattr(time, "time", lambda moment=moment: now() + moment)
        store = SQLStore(file)
        async with Redlock(store) as client, client(name):
            stored.append((await read_rows(store))[0][CLOCK])
    assert stored == stored[:1] * 3


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /mnt/share rw,relatime - nfs4 server:/share rw
31 30 0:41 / /mnt/share/local\\040disk rw - xfs /dev/sdb1 rw
32 22 0:42 / /home/me/remote rw - fuse.sshfs me@host: rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/var/lib/locks.db", "ext4", False),
        ("/mnt/share/locks.db", "nfs4", True),
        ("/mnt/shared/locks.db", "ext4", False),
        ("/mnt/share/local disk/locks.db", "xfs", False),
        ("/home/me/remote/a/locks.db", "fuse.sshfs", True),
    ],
)
def test_a_file_on_a_network_file_system_is_known(path: str, kind: str, network: bool) -> None:
    """By the table of mounts."""
    assert type_of(Path(path), MOUNTS) == kind
    assert is_network(kind) == network


def test_a_file_on_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the store is made."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text("22 1 8:1 / / rw - cifs //server/share rw\n")
    monkeypatch.setattr("asynclock.stores.sql.files._MOUNTS", mounts)
    with pytest.raises(ConfigError, match="cifs"):
        Redlock(f"sqlite:///{tmp_path}/locks.db")


# -- the command line --------------------------------------------------------------------------------------------------


@of_databases
async def test_the_command_line(file: str, name: str) -> None:
    """run, ls, inspect and break work, and doctor ends without a traceback."""

    async def command(*words: str) -> tuple[int | None, str]:
        env = {**os.environ, "ASYNCLOCK_URLS": file}
        done = await asyncio.to_thread(run, ["-m", "asynclock", *words], (*COMMANDS, *DATABASES), env=env)
        told = done.stdout + done.stderr
        assert "Traceback" not in told
        return done.returncode, told

    assert (await command("run", name, "--", "true"))[0] == 0
    async with Redlock(file) as client:
        lease = await client(name).acquire(timeout=None)
        (_, held), (_, shown), _ = await asyncio.gather(command("ls"), command("inspect", name), command("doctor"))
        assert name in held
        assert str(os.getpid()) in shown
        assert (await command("break", name, "--yes"))[0] == 0
        async with asyncio.timeout(LIMIT):
            assert await lease.wait_lost()


async def test_a_table_may_have_any_name(file: str, name: str) -> None:
    """SQLite says in words what is wrong. A name with one of them was taken for a file that is locked."""
    async with Redlock(f"{file}?asynclock_table=locked_and_busy") as client, client(name, timeout=LIMIT) as lease:
        assert lease.held


def test_an_old_library_is_a_config_error(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a syntax error in each acquire."""
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    with pytest.raises(ConfigError, match=r"SQLite 3\.35 or later is needed"):
        SQLStore(file)
