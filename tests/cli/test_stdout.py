"""A stdout that cannot be written: its reader has gone, or its disk is full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

import pytest

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
