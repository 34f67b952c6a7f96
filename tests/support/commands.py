"""The command line as processes of their own: what `asynclock ...` does to them, and what they leave behind."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import pytest
from typer.testing import CliRunner

from asynclock.cli import app
from tests.support.programs import COMMANDS, PATIENT, PYTHONPATH, Program, run
from tests.support.servers import Server

START = [sys.executable, "-m", "asynclock"]
HOLDS = ["sh", "-c", "echo holds; cat"]
"""A command that says when it runs, and ends with its stdin."""

_CONNECT = "4"
"""$ASYNCLOCK_CONNECT_TIMEOUT: on a busy machine a connect takes more than 1 s. A database has 5 s for all."""

_CONNECTS = "10"
"""The same where several servers start up and are asked at once: that takes 4 s beside two busy loops."""

_ANSWER = "5"
"""$ASYNCLOCK_NODE_TIMEOUT of a command that only asks several servers: each of those that live is to answer."""

Begin: TypeAlias = Callable[..., "Running"]
"""The fixture `begin`: starts `asynclock ...` and ends it after the test."""


def environment(servers: Sequence[Server] | Server = (), **more: str) -> dict[str, str]:
    """Of a machine on which the urls of these servers are set."""
    known = [servers] if isinstance(servers, Server) else servers
    own = {key: value for key, value in os.environ.items() if not key.startswith("ASYNCLOCK_")}
    own |= {"PYTHONPATH": PYTHONPATH, "COLUMNS": "200", "TERM": "dumb", "ASYNCLOCK_CONNECT_TIMEOUT": _CONNECT}
    if len(known) > 1:
        own["ASYNCLOCK_NODE_TIMEOUT"] = PATIENT
    return own | {"ASYNCLOCK_URLS": ",".join(each.url for each in known)} | more


def answered(*args: str, on: Sequence[Server] | Server = (), **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command that asks the servers, in this process: a process of its own costs 0.5 s of CPU. Not for `run`,
    which needs the signals and the file descriptors of a process. The examples of docs/cli.md run each command as a
    process."""
    hidden: dict[str, str | None] = {key: None for key in os.environ if key.startswith("ASYNCLOCK_")}
    if isinstance(on, Sequence) and len(on) > 1:
        more = {"ASYNCLOCK_NODE_TIMEOUT": _ANSWER, "ASYNCLOCK_CONNECT_TIMEOUT": _CONNECTS, **more}
    env = hidden | environment(on, **more)  # may start the servers, which end with the thread that starts them

    def invoke() -> subprocess.CompletedProcess[str]:
        result = CliRunner().invoke(app, args, env=env, catch_exceptions=False)
        return subprocess.CompletedProcess(args, result.exit_code, result.stdout, result.stderr)

    with ThreadPoolExecutor(1) as thread:  # a test may have an event loop in its own thread
        return thread.submit(invoke).result(timeout=50)


def asynclock(*args: str, on: Sequence[Server] | Server = (), **more: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end, as a process. stdin is no terminal."""
    return run(["-m", "asynclock", *args], COMMANDS, env=environment(on, **more), stdin=subprocess.DEVNULL)


def json_of(done: subprocess.CompletedProcess[str]) -> Any:
    """What it printed with --json: one line."""
    assert done.stdout.count("\n") == 1, done.stdout + done.stderr
    return json.loads(done.stdout)


def examined(on: Sequence[Server] | Server, *options: str, **env: str) -> tuple[int, dict[str, Any]]:
    """Run doctor: the exit code, and the findings by the name of their check. The node_timeout is one that servers on a
    busy machine keep, unless the options have another one."""
    patient = () if "--node-timeout" in options else ("--node-timeout", "2s")
    done = answered("doctor", "--json", *patient, *options, on=on, **env)
    answer = json_of(done)
    assert answer["severity"] == ("ok", "warning", "error")[done.returncode]
    for each in answer["findings"]:
        assert each["what"].endswith((".", "?")) or each["check"] == "reachable"
        assert each["risk"]
        assert each["advice"]
    return done.returncode, {each["check"]: each for each in answer["findings"]}


class Running:
    """A command that runs beside the test."""

    def __init__(self, args: Sequence[str], env: dict[str, str], under: Sequence[str] = ()) -> None:
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process: subprocess.Popen[str] = (
            subprocess.Popen([*under, *START, *args], env=env, text=True, **pipes)
            if under
            else Program(["-m", "asynclock", *args], COMMANDS, env=env, text=True, **pipes)
        )

    def line(self) -> str:
        """The next line of stdout; "": it was closed by all processes that had it."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def said(self) -> str:
        """The next line of stderr."""
        assert self.process.stderr is not None
        return self.process.stderr.readline().strip()

    def all_said(self) -> str:
        """All lines of stderr, after its end."""
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def holds(self) -> Running:
        """Return once its command, which must be HOLDS, runs."""
        assert self.line() == "holds", self.process.communicate()[1]
        return self

    def let_go(self) -> None:
        """The command of HOLDS ends."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def code(self) -> int:
        """Wait for its exit code."""
        return self.process.wait(timeout=50)

    def end(self) -> None:
        self.process.kill()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.process.wait()


class Terminal:
    """A terminal with `asynclock` in its foreground, as a shell starts it; or with a shell that runs a script."""

    def __init__(self, server: Server, *args: str, script: str = "") -> None:
        self.pid, self.screen = pty.fork()
        if not self.pid:
            command = ["sh", "-c", script, "sh", *START, *args] if script else [*START, *args]
            os.execvpe(command[0], command, environment(server))
        self._read = b""

    def types(self, text: str) -> None:
        os.write(self.screen, text.encode())

    def shows(self, text: str) -> None:
        """Wait until it does."""
        while text.encode() not in self._read:
            try:
                self._read += os.read(self.screen, 4096)
            except OSError:  # Linux says so after the last process has ended
                pytest.fail(f"it ended after {self._read!r}")

    def rest(self) -> str:
        """All that it has shown, after its end."""
        try:
            while more := os.read(self.screen, 4096):
                self._read += more
        except OSError:
            pass
        return self._read.decode()

    def state(self) -> int:
        """Wait until it ends or is stopped."""
        return os.waitpid(self.pid, os.WUNTRACED)[1]

    def end(self) -> None:
        os.close(self.screen)  # hangs up


def python(program: str, *args: str) -> list[str]:
    """A command that is a Python program. `say` writes a line at once, in a signal handler, too: a `print` that
    interrupts another `print` is a RuntimeError of their buffer."""
    say = "def say(*words): os.write(sys.stdout.fileno(), (' '.join(words) + chr(10)).encode())"
    head = f"import os, signal, sys, time\n{say}\n"
    return [sys.executable, "-c", head + textwrap.dedent(program), *args]
