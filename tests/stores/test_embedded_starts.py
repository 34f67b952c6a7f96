"""An embedded server that does not start: the error says why."""

from __future__ import annotations

import shutil
import sys
from contextlib import aclosing
from pathlib import Path

import pytest

from asynclock import ConfigError, QuorumUnavailable, Redlock
from asynclock.stores.embedded import finding
from asynclock.stores.embedded import server as valkey
from asynclock.stores.embedded.home import Home
from tests.support.embedded_box import Box

real_binary = valkey.binary

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")


@pytest.fixture
def script(box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """It takes the place of the server for the clients of this process."""
    path = tmp_path / "server"
    path.touch(mode=0o700)
    monkeypatch.setenv("ASYNCLOCK_EMBEDDED_DIR", str(box.runtime))
    monkeypatch.setattr(valkey, "binary", lambda: str(path))
    return path


async def complaint() -> str:
    async with aclosing(Redlock("embedded:", connect_timeout=60)) as client:
        with pytest.raises((ConfigError, QuorumUnavailable)) as caught:
            await client("job").acquire(timeout=50)
        return str(caught.value)


async def test_a_server_that_ends_says_why(script: Path) -> None:
    """What it prints is in the error."""
    script.write_text(f'#!/bin/sh\nexec "{real_binary()}" "$@" --maxmemory nonsense\n')
    said = await complaint()
    assert "did not start (exit code 1): " in said
    assert "argument must be a memory value" in said


async def test_a_server_that_crashes(script: Path) -> None:
    """A signal counts as its exit code, as in a shell."""
    script.write_text("#!/bin/sh\necho cannot go on >&2\nkill -SEGV $$\n")
    assert "did not start (exit code 139): cannot go on" in await complaint()


def test_a_keeper_that_is_killed_while_its_server_starts(box: Box, script: Path, tmp_path: Path) -> None:
    """As by the OOM killer. That is no error of the user: the search starts another one."""
    killed = tmp_path / "killed"
    script.write_text(
        f'#!/bin/sh\n[ -e "{killed}" ] || {{ touch "{killed}"; kill -9 $PPID; sleep 60; }}\n'
        f'exec "{real_binary()}" "$@"\n'
    )
    assert finding.Search(Home("default")).work() == box.socket()
    assert killed.exists()


def test_a_keeper_that_is_killed_again_and_again(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says so."""
    monkeypatch.setattr(finding, "LIMIT", 0.5)
    script.write_text("#!/bin/sh\nkill -9 $PPID\nsleep 60\n")
    with pytest.raises(ConnectionError, match="starts the embedded server was ended by SIGKILL: check"):
        finding.Search(Home("default")).work()


async def test_a_server_that_says_why_it_does_not_answer(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on without an answer."""
    monkeypatch.setattr(finding, "START_LIMIT", 20.0)
    script.write_text("#!/bin/sh\necho waits for a disk >&2\nexec sleep 600\n")
    assert "the embedded server did not answer within 20 s: waits for a disk" in await complaint()


async def test_a_keeper_that_fails_says_why(box: Box, script: Path) -> None:
    """Also where the server could not even be executed."""
    script.unlink()
    said = await complaint()
    assert "No such file or directory" in said
    assert str(box.folder() / "log") in said


def test_a_folder_that_is_deleted_while_the_server_starts(box: Box, script: Path, tmp_path: Path) -> None:
    """The server cannot listen there. That is no error of the user: it starts in the new folder."""
    deleted, folder = tmp_path / "deleted", box.folder()
    script.write_text(
        f'#!/bin/sh\n[ -e "{deleted}" ] || {{ touch "{deleted}"; rm -r "{folder}"; exit 1; }}\n'
        f'exec "{real_binary()}" "$@"\n'
    )
    assert finding.Search(Home("default")).work() == box.socket()
    assert deleted.exists()


@pytest.mark.usefixtures("script")
def test_a_folder_that_is_deleted_during_a_search(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search goes on with the new folder at once."""
    monkeypatch.setattr(valkey, "binary", real_binary)
    make, deleted = Home.make, list[Path]()

    def make_and_delete(home: Home) -> Path:
        folder = make(home)
        if not deleted:
            deleted.append(folder)
            shutil.rmtree(folder)
        return folder

    monkeypatch.setattr(Home, "make", make_and_delete)
    assert finding.Search(Home("default")).work() == box.socket()
    assert deleted == [box.folder()]


def test_the_end_of_a_log_is_short(tmp_path: Path) -> None:
    """An error shows the last lines only."""
    log = tmp_path / "log"
    log.write_text("".join(f"line {each}\n\n" for each in range(1000)) + "x" * 500 + "\n")
    assert valkey.last_lines(log) == " | ".join([*(f"line {each}" for each in range(996, 1000)), "x" * 500])
    log.write_text("y" * 10_000)
    assert valkey.last_lines(log) == "y" * 600


def test_the_end_of_a_log_is_printable(tmp_path: Path) -> None:
    """Escape sequences in it move no cursor."""
    log = tmp_path / "log"
    log.write_bytes(b"\x1b[2Jgone\xff\n")
    assert valkey.last_lines(log) == "\\x1b[2Jgone\ufffd"


def test_a_log_that_does_not_exist(tmp_path: Path) -> None:
    """Somebody has deleted it."""
    assert valkey.last_lines(tmp_path / "log") == ""
