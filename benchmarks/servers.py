"""Real servers: from the embedded wheel, each on a unix socket of its own; and those that the tests start."""

from __future__ import annotations

import contextlib
import importlib
import math
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from asynclock.stores.embedded import server as valkey

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Server:
    """One server process."""

    path: Path
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def cpu(self) -> float:
        """The CPU seconds that it has used; NaN on systems other than Linux."""
        # The clock id of another process, as clock_getcpuclockid(3) makes it; /proc counts in steps of 10 ms only.
        return time.clock_gettime((~self.process.pid << 3) | 2) if sys.platform == "linux" else math.nan

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def running(count: int) -> Iterator[list[Server]]:
    """Start `count` fresh servers, and kill them afterwards."""
    with tempfile.TemporaryDirectory(prefix="asynclock-bench-") as folder:
        paths = [Path(folder) / f"s{index}.sock" for index in range(count)]
        processes = [valkey.start(path) for path in paths]
        try:
            for path, process in zip(paths, processes, strict=True):
                valkey.wait_ready(path, process)
            yield [Server(path, process) for path, process in zip(paths, processes, strict=True)]
        finally:
            valkey.stop(processes)


def of_the_tests() -> Mapping[str, Callable[[contextlib.ExitStack], Sequence[str]]]:
    """The servers of `services.py`, by name. Raises BadParameter where what the tests need is not installed."""
    try:
        services = importlib.import_module("benchmarks.services")
    except ModuleNotFoundError as error:
        raise typer.BadParameter(
            f"servers of other stores need {error.name}: pip install -e '.[bench,test]', or name urls of your own"
        ) from None
    stores: Mapping[str, Callable[[contextlib.ExitStack], Sequence[str]]] = services.STORES
    return stores
