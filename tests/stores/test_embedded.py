"""`embedded:`: one server per user for all of that user's processes, which ends with the last of them."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asynclock.stores.embedded import server as valkey
from tests.support.embedded_box import Box, gone, leave, processes_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")

COUNT = """
    import asyncio, sys
    from pathlib import Path
    from asynclock import Redlock

    async def main():
        counter = Path(sys.argv[2])
        async with Redlock(sys.argv[1]) as redlock:
            for _ in range(20):
                async with redlock("counter"):
                    before = int(counter.read_text())
                    await asyncio.sleep(0)
                    counter.write_text(str(before + 1))

    asyncio.run(main())
"""


def test_one_server_for_all_processes(box: Box) -> None:
    """The second process finds the server of the first."""
    first, _ = box.hold()
    running = processes_of(box.runtime)
    second, _ = box.hold()
    assert processes_of(box.runtime) == running
    assert len(running) == 2  # the server, and its keeper
    leave(first)
    leave(second)


def test_two_processes_exclude_each_other(box: Box) -> None:
    """One holds, the other is refused. After the release the next process has it."""
    first, got = box.hold()
    second, missed = box.hold()
    assert (got, missed) == ("held", "refused")
    leave(first)
    third, got = box.hold()
    assert got == "held"
    leave(second)
    leave(third)


def test_two_names_are_two_servers(box: Box) -> None:
    """embedded:a and embedded:b share nothing; embedded: and embedded:default are one."""
    a, got_a = box.hold("embedded:a")
    b, got_b = box.hold("embedded:b")
    default, got = box.hold("embedded:")
    same, missed = box.hold("embedded:default")
    assert (got_a, got_b, got, missed) == ("held", "held", "held", "refused")
    assert box.socket("a") != box.socket("b")
    assert valkey.answers(box.socket("a"))
    assert valkey.answers(box.socket("b"))
    for program in (a, b, default, same):
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
    """It stays while a process uses it, and leaves no process afterwards."""
    first, _ = box.hold()
    second, _ = box.hold()
    leave(first)
    assert valkey.answers(box.socket())
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
    for _ in range(3):
        program, got = box.hold()
        assert got == "held"
        leave(program)
    assert box.all_gone()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o755])
def test_a_folder_open_to_others_is_refused(box: Box, mode: int) -> None:
    """Another user could have put a server there."""
    box.folder().mkdir()
    box.folder().chmod(mode)
    program, said = box.hold()
    assert "ConfigError" in said
    assert str(box.folder()) in said
    program.wait(20)
    assert not processes_of(box.folder())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_foreign_folder_is_refused(box: Box) -> None:
    """A folder that another user made in a shared place is not used."""
    box.folder().mkdir(mode=0o700)
    os.chown(box.folder(), 12345, -1)
    program, said = box.hold()
    assert "ConfigError" in said
    program.wait(20)
    assert not processes_of(box.folder())


def test_a_link_to_a_folder_is_refused(box: Box) -> None:
    """A link in a shared place may lead anywhere."""
    elsewhere = box.runtime / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    box.folder().symlink_to(elsewhere)
    program, said = box.hold()
    assert "ConfigError" in said
    program.wait(20)


def test_its_files_are_private(box: Box) -> None:
    """No other user can reach the server."""
    program, _ = box.hold()
    assert box.folder().stat().st_mode & 0o077 == 0
    assert box.socket().stat().st_mode & 0o077 == 0
    leave(program)


@pytest.mark.parametrize("url", ["embedded:a/b", "embedded:..%2f", "embedded:" + "x" * 33, "embedded:a b"])
def test_names_that_are_no_file_names(box: Box, url: str) -> None:
    """ConfigError is raised when the client is made."""
    program, said = box.hold(url)
    assert "ConfigError" in said
    program.wait(20)
    assert list(box.runtime.iterdir()) == []
