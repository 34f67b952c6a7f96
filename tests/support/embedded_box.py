"""Embedded servers in a runtime folder of the test's own, and the programs that use them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from asynclock.stores.embedded.finding import Search
from asynclock.stores.embedded.home import Home
from asynclock.stores.embedded.searches import _searches
from tests.support.programs import LIBRARY, PYTHONPATH, QUIET, STRICT, Program

HOLD = """
    import asyncio, sys
    from asynclock import Redlock

    async def main():
        async with Redlock(sys.argv[1], connect_timeout=30) as redlock:
            lease = await redlock("job").acquire(timeout=0)
            print("held" if lease else "refused", flush=True)
            await asyncio.to_thread(sys.stdin.readline)     # until the test ends it
            if lease:
                await lease.release()

    asyncio.run(main())
"""


def processes_of(folder: Path) -> set[int]:
    """The processes with that folder in their command line: the server and its keeper."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if str(folder).encode() in (entry / "cmdline").read_bytes():
                    found.add(int(entry.name))
    return found


_SLOW = """#!/bin/sh
read line < "{fifo}"
exec "{python}" "$@"
"""


def slow_python(folder: Path) -> tuple[Path, Path]:
    """An interpreter that begins once somebody writes a line to a fifo; and that fifo."""
    slow, fifo = folder / "python", folder / "fifo"
    os.mkfifo(fifo)
    slow.write_text(_SLOW.format(fifo=fifo, python=sys.executable))
    slow.chmod(0o700)
    return slow, fifo


STARTS = """
    import sys
    from asynclock.stores.embedded.finding import Search
    from asynclock.stores.embedded.home import Home

    sys.executable = sys.argv[1]
    Search(Home("default")).work()
    sys.stdin.readline()
"""


class SlowStart:
    """A program that starts the server, at the door: the start goes on when the test says so."""

    def __init__(self, box: Box, folder: Path) -> None:
        slow, fifo = slow_python(folder)
        self.program = box.start(STARTS, str(slow))
        self._gate = fifo.open("w")  # opens once the keeper reads it

    def go_on(self) -> None:
        with self._gate:
            print("starts", file=self._gate)

    def end(self) -> None:
        self.program.kill()  # also if it is stopped
        self._gate.close()


def search_under_way(name: str = "default") -> Search | None:
    """In this process."""
    return _searches.get(str(Home(name).path))


class Box:
    """A runtime folder of the test's own, and the programs that run in it."""

    def __init__(self, runtime: Path) -> None:
        self.runtime = runtime
        self._programs: list[subprocess.Popen[str]] = []

    def folder(self, name: str = "default") -> Path:
        return self.runtime / f"asynclock-{os.getuid()}-{name}"

    def socket(self, name: str = "default") -> Path:
        return self.folder(name) / "valkey.sock"

    def start(
        self,
        text: str,
        *args: str,
        program: str = sys.executable,
        path: str = PYTHONPATH,
        cwd: Path | None = None,
        **env: str,
    ) -> subprocess.Popen[str]:
        words = ["-c", QUIET + textwrap.dedent(text), *args]
        more: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        more["env"] = {"PYTHONPATH": path, "PATH": os.defpath, "ASYNCLOCK_EMBEDDED_DIR": str(self.runtime), **env}
        more["cwd"] = cwd
        self._programs.append(
            Program(words, LIBRARY, STRICT, text=True, **more)
            if (program, path) == (sys.executable, PYTHONPATH)
            else subprocess.Popen([program, *STRICT, *words], text=True, **more)
        )
        return self._programs[-1]

    def hold(self, url: str = "embedded:", **more: Any) -> tuple[subprocess.Popen[str], str]:
        """A program that takes the lock `job`, and whether it got it; it stays until the test ends it."""
        program = self.start(HOLD, url, **more)
        return program, lines(program.stdout).readline().strip() or lines(program.stderr).read()

    def all_gone(self) -> bool:
        """Wait for the end of all processes that were started here, with server and keeper."""
        tick = threading.Event()
        for _ in range(1000):
            if not processes_of(self.runtime):
                return True
            tick.wait(0.05)  # the kernel tells only parents when a process ends
        return False

    def end(self) -> None:
        for program in self._programs:
            program.kill()
            program.communicate()
        for pid in processes_of(self.runtime):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def lines(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def leave(program: subprocess.Popen[str]) -> None:
    """Tell it to end, and wait until it has ended well."""
    _, complaints = program.communicate("\n", timeout=50)
    assert (program.returncode, complaints) == (0, "")


def gone(pid: int) -> None:
    """Wait for the end of a process that is not our child."""
    with contextlib.suppress(ProcessLookupError):
        ended = os.pidfd_open(pid)
        try:
            assert select.select([ended], [], [], 20)[0]
        finally:
            os.close(ended)


@pytest.fixture
def box(wheel: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """Ends with all its processes."""
    del wheel
    box = Box(tmp_path_factory.mktemp("run"))
    yield box
    box.end()
