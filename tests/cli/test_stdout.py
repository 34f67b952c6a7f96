"""A stdout that cannot be written: its reader has gone, or its disk is full."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from asynclock import Redlock
from tests.support.commands import answered, environment
from tests.support.programs import COMMANDS, Program
from tests.support.servers import Server

COMMANDS_THAT_PRINT = pytest.mark.parametrize(
    "command",
    [
        ["health"],
        ["health", "--json"],
        ["ls"],
        ["inspect", "a"],
        ["doctor", "--trust-restarts"],
        ["doctor", "--json"],
    ],
    ids=" ".join,
)


HELP = pytest.mark.parametrize("command", [["--help"], ["--version"], ["run", "--help"]], ids=" ".join)


def ended(command: Sequence[str], server: Server, stdout: int) -> tuple[int, list[str]]:
    """Run it as a process with that stdout. Its exit code, and its lines on stderr."""
    words, env = ["-m", "asynclock", *command], environment(server)
    with Program(words, COMMANDS, env=env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE) as process:
        _, said = process.communicate(timeout=50)
    return process.returncode, said.decode().splitlines()


def without_reader(command: Sequence[str], server: Server) -> tuple[int, list[str]]:
    """As in `asynclock ... | true`."""
    reads, writes = os.pipe()
    os.close(reads)
    try:
        return ended(command, server, writes)
    finally:
        os.close(writes)


@COMMANDS_THAT_PRINT
def test_a_reader_that_has_gone_is_no_error(server: Server, command: list[str]) -> None:
    """The exit code is that of the command, and stderr is as it would be."""
    done = answered(*command, on=server)
    assert without_reader(command, server) == (done.returncode, done.stderr.splitlines())


def test_top_ends_when_its_reader_has_gone(server: Server) -> None:
    """Without --iterations, too: nobody would see what it shows."""
    assert without_reader(["top"], server) == (0, [])
    assert without_reader(["top", "--json"], server) == (0, [])


@COMMANDS_THAT_PRINT
def test_a_full_disk_is_an_error(server: Server, command: list[str]) -> None:
    """One line on stderr says so, and the exit code is not that of an answer that was delivered."""
    with open("/dev/full", "wb") as full:
        code, said = ended(command, server, full.fileno())
    assert code == 74
    assert said == ["asynclock: stdout cannot be written: No space left on device"]


@HELP
def test_help_has_no_reader(server: Server, command: list[str]) -> None:
    """As the answers of commands."""
    assert without_reader(command, server) == (0, [])


@HELP
def test_help_on_a_full_disk(server: Server, command: list[str]) -> None:
    """The same."""
    with open("/dev/full", "wb") as full:
        code, said = ended(command, server, full.fileno())
    assert (code, said) == (74, ["asynclock: stdout cannot be written: No space left on device"])


def test_a_line_of_the_demo_has_no_reader() -> None:
    """The demo goes on, and has the exit code of its verdict."""
    program = "from asynclock.cli.demo.picture import print_line; print_line('a', False); print_line('b', False)"
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run([sys.executable, "-c", program], stdout=writes, stderr=subprocess.PIPE, check=False)
    os.close(writes)
    assert (done.returncode, done.stderr) == (0, b"")


def in_shell(line: str, server: Server, **env: str) -> tuple[int, str, str]:
    """Run a line of a shell, in which $asynclock is the program. Its exit code, its stdout and its stderr."""
    known = environment(server, asynclock=f"{sys.executable} -m asynclock", **env)
    done = subprocess.run(["sh", "-c", line], env=known, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_descriptors_that_are_closed(server: Server) -> None:
    """No traceback, and nothing of stderr on the stdout of the command."""
    code, _, said = in_shell("exec $asynclock break a <&-", server)
    assert (code, said.count("\n")) == (64, 1)
    assert in_shell("exec $asynclock top --iterations 1 >&-", server) == (0, "", "")
    assert in_shell("exec $asynclock 2>&-", server) == (64, "", "")
    told = in_shell("exec $asynclock run --json a -- echo done 2>&-", server)
    assert told == (0, "done\n", "")


async def test_characters_that_the_terminal_lacks(server: Server, name: str) -> None:
    """The note of another program is shown with its characters escaped."""
    async with Redlock(server.url) as client, client(name, metadata="日"):
        ls = asyncio.to_thread(in_shell, "exec $asynclock ls", server, PYTHONIOENCODING="latin-1")
        code, shown, said = await ls
    assert (code, said) == (0, "")
    assert "\\u65e5" in shown
