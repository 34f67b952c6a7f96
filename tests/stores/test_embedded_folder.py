"""The folder of an embedded server: where it is, and what happens when somebody else deletes it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asynclock import ConfigError, Redlock
from asynclock.stores.embedded import server as valkey
from asynclock.stores.embedded.home import Home
from tests.support.embedded_box import Box, gone, leave, lines, processes_of
from tests.support.waiters import LIMIT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")


# -- where it is -------------------------------------------------------------------------------------------------------


def test_an_empty_variable_is_one_that_is_not_set(box: Box, tmp_path: Path) -> None:
    """`ASYNCLOCK_EMBEDDED_DIR=`, as compose writes `${X:-}`: programs in two working folders use one server."""
    name = f"t{os.getpid()}"
    here, there = tmp_path / "a", tmp_path / "b"
    here.mkdir()
    there.mkdir()
    try:
        first, got = box.hold(f"embedded:{name}", cwd=here, ASYNCLOCK_EMBEDDED_DIR="")
        second, missed = box.hold(f"embedded:{name}", cwd=there, ASYNCLOCK_EMBEDDED_DIR="")
        assert (got, missed) == ("held", "refused")
        leave(first)
        leave(second)
    finally:
        shutil.rmtree(f"/tmp/asynclock-{os.getuid()}-{name}", ignore_errors=True)


@pytest.mark.parametrize("relative", ["locks", ".", "~/locks", " "])
def test_a_relative_folder_is_refused(relative: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be another folder, and another server, in each working folder. ConfigError when the client is made."""
    monkeypatch.setenv("ASYNCLOCK_EMBEDDED_DIR", relative)
    with pytest.raises(ConfigError, match="give an absolute path"):
        Redlock("embedded:")


def folder_for(path: int) -> str:
    """A folder in which the path of the socket has so many bytes, some of them in one letter."""
    rest = len(f"/\u00e9/asynclock-{os.getuid()}-default/valkey.sock".encode())
    return "/\u00e9" + "x" * (path - rest)


def test_a_socket_path_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """ConfigError when the client is made; it says which variable to set."""
    monkeypatch.setenv("ASYNCLOCK_EMBEDDED_DIR", folder_for(108))
    with pytest.raises(
        ConfigError, match=r"has 108 bytes, .* allows 107: set ASYNCLOCK_EMBEDDED_DIR to a shorter folder"
    ):
        Redlock("embedded:")


def test_the_longest_socket_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not refused."""
    monkeypatch.setenv("ASYNCLOCK_EMBEDDED_DIR", folder_for(107))
    assert len(os.fsencode(Home("default").socket)) == 107


# -- when it is deleted ------------------------------------------------------------------------------------------------

GUARD = """
    import asyncio, sys
    from asynclock import LockLost, Redlock

    async def main():
        async with Redlock("embedded:", connect_timeout=30) as redlock:
            try:
                async with redlock("job"):
                    print("held", flush=True)
                    await asyncio.Event().wait()
            except LockLost:
                print("lost", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            lease = await redlock("other").acquire()
            print("goes on", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            await lease.release()

    asyncio.run(main())
"""


def whole_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def plain_files(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()


def file(name: str) -> Callable[[Path], None]:
    def delete(folder: Path) -> None:
        (folder / name).unlink()

    return delete


DELETIONS = {
    "the whole folder": whole_folder,
    "plain files": plain_files,
    **{name: file(name) for name in ("alive", "users", "valkey.sock")},
}


@pytest.mark.parametrize("delete", DELETIONS.values(), ids=DELETIONS)
def test_the_server_of_a_deleted_folder_ends(box: Box, delete: Callable[[Path], None]) -> None:
    """Whoever comes next gets a new server, and the holder on the old one loses its lease at once: without that both
    would hold the name for as long as they like. It goes on with the new server, and both exclude a third one."""
    holder = box.start(GUARD)
    said = lines(holder.stdout)
    assert said.readline().strip() == "held"
    old = processes_of(box.runtime)
    delete(box.folder())
    assert said.readline().strip() == "lost"
    for pid in old:
        gone(pid)
    second, got = box.hold()
    assert got == "held"
    lines(holder.stdin).write("\n")
    lines(holder.stdin).flush()
    assert said.readline().strip() == "goes on"
    third, missed = box.hold()
    assert missed == "refused"
    for program in second, third:
        leave(program)
    assert valkey.answers(box.socket())  # the first one still uses it
    holder.communicate("\n", timeout=50)
    assert box.all_gone()


def test_the_end_of_an_old_server_leaves_the_new_one(box: Box) -> None:
    """A keeper that is stopped while its folder is deleted, and a new server is made there, deletes nothing of it
    later. (Else each newcomer gets "does not answer" for as long as the new one has users.)"""
    first, _ = box.hold()
    old = processes_of(box.runtime)
    (keeper,) = (pid for pid in old if b".keeper" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(keeper, signal.SIGSTOP)
    shutil.rmtree(box.folder())
    second, got = box.hold()
    assert got == "held"
    os.kill(keeper, signal.SIGCONT)
    for pid in old:
        gone(pid)
    third, missed = box.hold()
    assert missed == "refused"
    for program in second, third:
        leave(program)
    first.kill()
    assert box.all_gone()


def test_files_in_use_do_not_grow_old(box: Box) -> None:
    """What cleans /tmp deletes files that nobody has used for days. The keeper looks after those of a server that runs
    for so long."""
    program, _ = box.hold()
    used = [box.folder() / name for name in ("alive", "users", "valkey.sock")]
    long_ago = time.time() - 10 * 24 * 3600
    for path in used:
        os.utime(path, (long_ago, long_ago))
    tick, until = threading.Event(), time.monotonic() + LIMIT
    while any(min(path.stat().st_mtime, path.stat().st_atime) < time.time() - 3600 for path in used):
        assert time.monotonic() < until
        tick.wait(0.05)  # nobody tells when a time of a file changes
    leave(program)
