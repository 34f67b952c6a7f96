"""`embedded:`: one server per user for all of that user's processes, which ends with the last of them."""

from __future__ import annotations

import os
import signal
import socket
import sys
import sysconfig
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from textwrap import dedent
from zipfile import ZipFile

import pytest

from asynclock import ConfigError, Redlock
from asynclock.stores.embedded import server as valkey
from tests.support.embedded_box import HOLD, Box, gone, leave, lines, processes_of
from tests.support.programs import PYTHONPATH, REPO

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")

COUNT = """
    import asyncio, sys
    from pathlib import Path
    from asynclock import Redlock

    async def main():
        counter = Path(sys.argv[2])
        async with Redlock(sys.argv[1], connect_timeout=30) as redlock:
            for _ in range(20):
                async with redlock("counter"):
                    before = int(counter.read_text())
                    await asyncio.sleep(0)
                    counter.write_text(str(before + 1))

    asyncio.run(main())
"""


def test_two_processes_exclude_each_other(box: Box) -> None:
    """They use one server: the second process finds that of the first. One holds, the other is refused. After the
    release the next process has the name."""
    first, got = box.hold()
    running = processes_of(box.runtime)
    second, missed = box.hold()
    assert (got, missed) == ("held", "refused")
    assert processes_of(box.runtime) == running
    assert len(running) == 2  # the server, and its keeper
    leave(first)
    third, got = box.hold()
    assert got == "held"
    leave(second)
    leave(third)


ZIPPED = """
    import sys

    sys.path[:0] = sys.argv[2:]  # the zip file, and the packages that asynclock needs

    import asynclock
    assert asynclock.__file__.startswith(sys.argv[2]), asynclock.__file__
"""


def test_the_package_in_a_zip_file(box: Box, tmp_path: Path) -> None:
    """It reads its scripts there, and the process that keeps the server finds it there, too: the interpreter of neither
    knows the package by itself."""
    zipped = tmp_path / "app.zip"
    with ZipFile(zipped, "w") as file:
        for path in (REPO / "asynclock").rglob("*"):
            if path.suffix in (".py", ".lua"):
                file.write(path, path.relative_to(REPO))
    bare = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    packages = sysconfig.get_path("purelib"), sysconfig.get_path("platlib")
    program = box.start(dedent(ZIPPED) + dedent(HOLD), "embedded:", str(zipped), *packages, program=str(bare), path="")
    assert lines(program.stdout).readline().strip() == "held", lines(program.stderr).read()
    leave(program)


@pytest.mark.parametrize("way", ["working folder", "PYTHONPATH"])
def test_the_keeper_imports_no_file_of_the_user(box: Box, tmp_path: Path, way: str) -> None:
    """Files beside the program, whose names are those of modules, would run there."""
    ran = tmp_path / "ran"
    for name in ("redis", "logging", "asyncio", "fcntl", "subprocess", "threading", "pathlib", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write({name!r})\n")
    if way == "PYTHONPATH":
        program, _ = box.hold(PYTHONPATH=os.pathsep.join([PYTHONPATH, str(tmp_path)]))
    else:
        program, _ = box.hold(cwd=tmp_path)
    assert not ran.exists()
    leave(program)


NAMES = """
    import asyncio, sys
    from contextlib import AsyncExitStack
    from asynclock import Redlock

    async def main():
        leases = []
        async with AsyncExitStack() as stack:
            for url in "embedded:a", "embedded:b", "embedded:", "embedded:default":
                client = await stack.enter_async_context(Redlock(url, connect_timeout=30))
                leases.append(await client("job").acquire(timeout=0))
                print("held" if leases[-1] else "refused", flush=True)
            await asyncio.to_thread(sys.stdin.readline)

    asyncio.run(main())
"""


def test_two_names_are_two_servers(box: Box) -> None:
    """embedded:a and embedded:b share nothing; embedded: and embedded:default are one."""
    program = box.start(NAMES)
    said = lines(program.stdout)
    assert [said.readline().strip() for _ in range(4)] == ["held", "held", "held", "refused"]
    assert box.socket("a") != box.socket("b")
    assert valkey.answers(box.socket("a"))
    assert valkey.answers(box.socket("b"))
    leave(program)


def test_many_start_at_once(box: Box, tmp_path: Path) -> None:
    """Processes race for the first start: there is one server, and not a count is lost."""
    counter = tmp_path / "counter"
    counter.write_text("0")
    for program in [box.start(COUNT, "embedded:", str(counter)) for _ in range(4)]:
        leave(program)
    assert counter.read_text() == "80"
    assert box.all_gone()


def test_gone_with_the_last(box: Box) -> None:
    """It stays while a process uses it, and leaves no process afterwards. Meanwhile its files are private."""
    first, _ = box.hold()
    second, _ = box.hold()
    leave(first)
    assert valkey.answers(box.socket())
    assert box.folder().stat().st_mode & 0o077 == 0
    assert box.socket().stat().st_mode & 0o077 == 0
    leave(second)
    assert box.all_gone()


def test_gone_after_kill_9_of_the_last(box: Box) -> None:
    """A process that is killed leaves no server behind."""
    first, _ = box.hold()
    first.kill()
    assert box.all_gone()


def test_it_outlives_kill_9_of_the_process_that_started_it(box: Box) -> None:
    """The starter is a user like the others."""
    first, _ = box.hold()
    second, _ = box.hold()
    first.kill()
    first.wait()
    assert valkey.answers(box.socket())
    third, missed = box.hold()
    assert missed == "refused"  # the dead one's lease has not run out: its server is still the same
    leave(second)
    leave(third)


@pytest.mark.parametrize("which", ["server", "keeper"])
def test_a_new_server_after_kill_9_of_the_old(box: Box, which: str) -> None:
    """A process that comes after a server was killed gets a new one."""
    first, _ = box.hold()
    (keeper,) = (pid for pid in processes_of(box.runtime) if b".keeper" in Path(f"/proc/{pid}/cmdline").read_bytes())
    (server,) = processes_of(box.runtime) - {keeper}
    os.kill(server if which == "server" else keeper, signal.SIGKILL)
    gone(server)
    second, got = box.hold()
    assert got == "held"
    assert valkey.answers(box.socket())
    leave(second)
    first.kill()
    assert box.all_gone()


def plain_file(path: Path) -> None:
    path.write_text("not a socket")


def dead_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize("leave_behind", [plain_file, dead_socket])
def test_stale_socket_files_are_survived(box: Box, leave_behind: Callable[[Path], None]) -> None:
    """Files that a crash left on the disk are removed."""
    box.folder().mkdir(mode=0o700)
    leave_behind(box.socket())
    program, got = box.hold()
    assert got == "held"
    leave(program)
    assert box.all_gone()


def test_again_after_the_end(box: Box) -> None:
    """Its folder, left over, is used by the next start."""
    for _ in range(2):
        program, got = box.hold()
        assert got == "held"
        leave(program)
    assert box.all_gone()


# -- what is refused: before any process begins, so these tests need none of their own ---------------------------------


async def refused(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """No server is started in that folder."""
    monkeypatch.setenv("ASYNCLOCK_EMBEDDED_DIR", str(box.runtime))
    async with aclosing(Redlock("embedded:")) as redlock:
        with pytest.raises(ConfigError, match=str(box.folder())):
            await redlock("job").acquire(timeout=0)
    assert not processes_of(box.runtime)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o755])
async def test_a_folder_open_to_others_is_refused(box: Box, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user could have put a server there."""
    box.folder().mkdir()
    box.folder().chmod(mode)
    await refused(box, monkeypatch)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
async def test_a_foreign_folder_is_refused(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that another user made in a shared place is not used."""
    box.folder().mkdir(mode=0o700)
    os.chown(box.folder(), 12345, -1)
    await refused(box, monkeypatch)


async def test_a_link_to_a_folder_is_refused(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link in a shared place may lead anywhere."""
    elsewhere = box.runtime / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    box.folder().symlink_to(elsewhere)
    await refused(box, monkeypatch)


@pytest.mark.parametrize("url", ["embedded:a/b", "embedded:..%2f", "embedded:" + "x" * 33, "embedded:a b"])
def test_names_that_are_no_file_names(url: str) -> None:
    """ConfigError is raised when the client is made."""
    with pytest.raises(ConfigError, match="an embedded server's name"):
        Redlock(url)
