"""`asynclock run` as process 1 of a container: it reaps orphans, passes signals on, and is never suspended."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import HOLDS, Begin, Terminal, python
from tests.support.example_programs import wait_for
from tests.support.servers import Server

PROCESS_1 = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""Starts a command as process 1 of its own pid namespace, as the engine of containers does. Needs root."""

_PRCTL = "import ctypes, os, sys; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)"  # PR_SET_CHILD_SUBREAPER
SUBREAPER = [sys.executable, "-c", f"{_PRCTL}; os.execv(sys.argv[1], sys.argv[1:])"]
"""Starts a command that gets the orphans among its descendants, as process 1 does. Any user may."""

ORPHANS = """
import subprocess
made = [subprocess.check_output(['sh', '-c', 'sleep 0.2 >&- & echo $!'], text=True).strip() for _ in range(6)]
limit = time.monotonic() + 20
while (left := [pid for pid in made if os.path.exists('/proc/' + pid)]) and time.monotonic() < limit:
    time.sleep(0.01)
say('zombies: %d' % len(left))
sys.exit(3)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process ids of containers are Linux")


def needs_namespaces() -> None:
    """Skip the test where this user can make no pid namespace."""
    if subprocess.run([*PROCESS_1, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root: unshare --pid")


@pytest.mark.parametrize("under", [PROCESS_1, SUBREAPER], ids=["process 1", "subreaper"])
def test_orphans_of_the_command_are_reaped(server: Server, name: str, begin: Begin, under: list[str]) -> None:
    """While the command runs. Its own exit code still counts."""
    if under is PROCESS_1:
        needs_namespaces()
    running = begin("run", name, "--", *python(ORPHANS), on=server, under=under)
    assert running.line() == "zombies: 0", running.all_said()
    assert running.code() == 3


_LEAVES_ONE = "pid = os.fork() or os.execvp('sleep', ['sleep', '1000']); print(pid, flush=True)"
INHERITS = [sys.executable, "-c", f"{_PRCTL}; {_LEAVES_ONE}; os.execv(sys.argv[1], sys.argv[1:])"]
"""A child that is there before asynclock is, as another one is that `docker exec` has left."""


def test_orphans_are_reaped_while_it_waits(server: Server, name: str, begin: Begin) -> None:
    """There is no command yet. The lock is not free for an hour, and a health check leaves a process each second."""
    cli = server.cli()
    begin("run", name, "--", *HOLDS, on=server).holds()
    waiter = begin("run", name, "--", "true", on=server, under=INHERITS)
    orphan = int(waiter.line())
    try:
        while not any(cli.zcard(key) for key in cli.keys("*queue")):
            assert waiter.process.poll() is None
            time.sleep(0.01)
    finally:
        os.kill(orphan, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{orphan}").exists(), "it is a zombie")
    assert waiter.process.poll() is None


TERMINATES = """
def end(*_):
    say('SIGTERM')
    sys.exit(30)
signal.signal(signal.SIGTERM, end)
os.kill(1, signal.SIGTERM)
while True: signal.pause()
"""


def test_process_1_passes_signals_on(server: Server, name: str, begin: Begin) -> None:
    """The kernel drops a signal to process 1 that has no handler. `docker stop` reaches the command, which ends as it
    wants to; and the name is free."""
    needs_namespaces()
    running = begin("run", name, "--", *python(TERMINATES), on=server, under=PROCESS_1)
    assert running.line() == "SIGTERM", running.all_said()
    assert running.code() == 30
    assert server.cli().exists(name, f"lock:{name}") == 0


READS = """
say('holds')
while (line := sys.stdin.readline().strip()) != 'end': say('read', line)
"""


def test_ctrl_z_does_not_suspend_a_container(server: Server, name: str) -> None:
    """No shell would continue the command, and it would keep the lock for ever."""
    needs_namespaces()
    script = f'exec {shlex.join(PROCESS_1)} "$@"'
    terminal = Terminal(server, "run", name, "--", *python(READS), script=script)
    terminal.shows("holds")
    terminal.types("\x1a")
    terminal.types("again\n")
    terminal.shows("read again")
    terminal.types("end\n")
    assert os.waitstatus_to_exitcode(terminal.state()) == 0
    terminal.end()
