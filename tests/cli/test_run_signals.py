"""`asynclock run` and signals: they reach the command, or end the wait; and a terminal is the command's."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.support.commands import HOLDS, Begin, Terminal, python
from tests.support.servers import Server

FORWARDED = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2]
EXITS = """
received = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2]
for number in received:
    signal.signal(number, lambda number, frame: (say(signal.Signals(number).name), received.remove(number)))
say('holds')
while received: time.sleep(1)
sys.exit(30)
"""


def test_each_signal_reaches_the_command(server: Server, name: str, begin: Begin) -> None:
    """What the command makes of it counts."""
    running = begin("run", name, "--", *python(EXITS), on=server).holds()
    for number in FORWARDED:
        running.process.send_signal(number)
        assert running.line() == number.name, running.process.communicate()[1]
    assert running.code() == 30
    assert server.cli().exists(name, f"lock:{name}") == 0


def test_a_signal_reaches_the_whole_group(server: Server, name: str, begin: Begin) -> None:
    """Also what the command started; the exit code is 128+n."""
    both = "sh -c 'echo holds; exec sleep 1000' & wait"
    running = begin("run", name, "--", "sh", "-c", both, on=server).holds()
    running.process.send_signal(signal.SIGTERM)
    assert running.code() == 128 + signal.SIGTERM
    assert running.line() == ""  # `sleep` had this pipe, too


def test_each_signal_ends_the_wait(server: Server, name: str, begin: Begin) -> None:
    """The command does not run; no ticket is left, so that others are not held up."""
    cli = server.cli()
    begin("run", name, "--", *HOLDS, on=server).holds()
    waiters = {number: begin("run", name, "--", "echo", "ran", on=server) for number in FORWARDED}
    while sum(cli.zcard(key) for key in cli.keys("*queue")) < len(waiters):
        assert all(waiter.process.poll() is None for waiter in waiters.values())
        time.sleep(0.01)
    for number, waiter in waiters.items():
        waiter.process.send_signal(number)
        assert waiter.code() == 128 + number
        assert waiter.line() == ""
    assert not cli.keys("*tickets")


def test_kill_9_ends_the_command(server: Server, name: str, begin: Begin) -> None:
    """At once, with all that it started; the lease ends by time."""
    running = begin("run", name, "--json", "--", *HOLDS, on=server).holds()
    assert '"started"' in running.said()
    running.process.kill()
    assert running.line() == ""  # nobody has the pipe any more
    assert server.cli().exists(name, f"lock:{name}") == 1


READS = """
signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler waits for a read that a signal came just before
say('holds')
while (line := sys.stdin.readline().strip()) != 'end': say('read', line)
"""

WAITS = """
say('holds')
while True: signal.pause()
"""
"""One that reads may see that its terminal is gone before it gets the signal, and end with an error of its own."""


def test_the_command_has_the_terminal(server: Server, name: str) -> None:
    """It reads from it, and Ctrl-C reaches it."""
    terminal = Terminal(server, "run", name, "--", *python(READS))
    terminal.shows("holds")
    terminal.types("something\n")
    terminal.shows("read something")
    terminal.types("\x03")
    assert os.waitstatus_to_exitcode(terminal.state()) == 128 + signal.SIGINT
    terminal.end()


def test_ctrl_c_ends_a_script(server: Server, name: str) -> None:
    """As it does without asynclock: the shell does not go on with the next line."""
    terminal = Terminal(server, "run", name, "--", *python(READS), script='"$@"; echo goes on')
    terminal.shows("holds")
    terminal.types("\x03")
    assert os.waitstatus_to_exitcode(terminal.state()) in (-signal.SIGINT, 128 + signal.SIGINT)
    assert "goes on" not in terminal.rest()
    terminal.end()


def test_ctrl_z_stops_both(server: Server, name: str) -> None:
    """The shell takes over; `fg` goes on with the command while the lease is held."""
    terminal = Terminal(server, "run", name, "--", *python(READS))
    terminal.shows("holds")
    terminal.types("\x1a")
    assert os.WIFSTOPPED(terminal.state())
    os.kill(terminal.pid, signal.SIGCONT)
    terminal.types("again\n")
    terminal.shows("read again")
    terminal.types("end\n")
    assert os.waitstatus_to_exitcode(terminal.state()) == 0
    terminal.end()


def test_ctrl_z_stops_a_script(server: Server, name: str) -> None:
    """The shell that runs it as a job sees that it has stopped, and `fg` continues all of it."""
    shell = 'set -m; sh -c \'"$@"; echo goes on\' sh "$@"; echo stopped $?; fg; echo ended $?'
    terminal = Terminal(server, "run", name, "--", *python(READS), script=shell)
    terminal.shows("holds")
    terminal.types("\x1a")
    terminal.shows(f"stopped {128 + signal.SIGTSTP}")
    terminal.types("again\n")
    terminal.shows("read again")
    terminal.types("end\n")
    terminal.shows("goes on")
    terminal.shows("ended 0")
    assert os.waitstatus_to_exitcode(terminal.state()) == 0
    terminal.end()


def test_a_stopped_command_ends_with_its_terminal(server: Server, name: str) -> None:
    """The terminal is closed after a Ctrl-Z, within the lease: the command gets SIGHUP, and the lock is released."""
    terminal = Terminal(server, "run", name, "--", *python(WAITS))
    terminal.shows("holds")
    terminal.types("\x1a")
    assert os.WIFSTOPPED(terminal.state())
    terminal.end()
    assert os.waitstatus_to_exitcode(terminal.state()) == 128 + signal.SIGHUP
    assert server.cli().exists(name, f"lock:{name}") == 0


def test_a_command_that_was_stopped_too_long_does_not_go_on(server: Server, name: str, tmp_path: Path) -> None:
    """Another owner holds the name by then."""
    went_on = tmp_path / "went on"
    program = f"say('holds'); os.kill(0, signal.SIGTSTP); open({str(went_on)!r}, 'w'); signal.pause()"
    terminal = Terminal(server, "run", name, "--lease", "6", "--", *python(program))
    assert os.WIFSTOPPED(terminal.state())
    while server.cli().exists(name, f"lock:{name}"):
        time.sleep(0.01)
    os.kill(terminal.pid, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(terminal.state()) == 70
    assert not went_on.exists()
    terminal.end()
