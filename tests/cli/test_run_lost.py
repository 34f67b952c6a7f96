"""`asynclock run` when its lease cannot be kept: the command ends before another owner can begin."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from asynclock import Lease, Redlock
from asynclock.cli.child import Child
from asynclock.cli.children import Children
from asynclock.cli.guard import OnLost
from asynclock.cli.runner import Mode, Plan, Runner
from asynclock.stores import MemoryStore
from tests.support.commands import HOLDS, Begin, Running, answered, asynclock, python
from tests.support.fake_clock import FakeClock
from tests.support.proxy import Proxy
from tests.support.servers import Server

STUBBORN = """
signal.signal(signal.SIGTERM, lambda *_: say('SIGTERM'))
say('holds')
while True: signal.pause()
"""
TIDY = """
def end(*_):
    say('tidies up')
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
say('holds')
while True: signal.pause()
"""


@pytest.mark.timeout(120)
async def test_the_command_ends_before_its_lease(server: Server, name: str, begin: Begin, tmp_path: Path) -> None:
    """No command reaches the server any more: SIGTERM, then SIGKILL, while the key of the hold still lives. A tenth of
    the lease is left at SIGKILL: so much time a busy machine has to deliver it, and this test to look."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    program = f"sys.stdout = open({str(pipe)!r}, 'w')\n{STUBBORN}"
    async with Proxy(server.path.with_suffix(".cut"), server.path) as proxy:
        running = begin("run", name, "--lease", "40", "--", *python(program), ASYNCLOCK_URLS=proxy.url)
        with await asyncio.to_thread(pipe.open) as said:
            assert await asyncio.to_thread(said.readline) == "holds\n"
            proxy.drop_requests = True
            assert await asyncio.to_thread(said.readline) == "SIGTERM\n"
            assert await asyncio.to_thread(said.readline) == ""  # it is dead
            assert server.cli().exists(name, f"lock:{name}") == 1
        assert await asyncio.to_thread(running.code) == 70
    assert "SIGTERM, in" in running.all_said()


def test_a_quorum_that_is_lost(five: list[Server], name: str, begin: Begin) -> None:
    """Three of five servers die: 70, although the command itself exits 0 on SIGTERM."""
    running = begin("run", name, "--lease", "15", "--", *python(TIDY), on=five).holds()
    for server in five[:3]:
        server.kill()
    assert running.line() == "tidies up"
    assert running.code() == 70


def test_a_minority_that_is_lost(five: list[Server], name: str, begin: Begin) -> None:
    """Two of five die: the command runs on, for longer than a lease."""
    program = "say('holds'); sys.stdin.read(); say('done')"
    running = begin("run", name, "--lease", "12", "--", *python(program), on=five).holds()
    five[0].kill()
    five[1].kill()
    assert "is down" in running.said()
    for server in five[2:]:
        cli = server.cli()
        key = name if cli.exists(name) else f"lock:{name}"
        before: int = cli.pttl(key)
        while (now := cli.pttl(key)) <= before:  # until it is renewed
            assert now > 0
            before = now
            time.sleep(0.05)  # it takes some seconds, and other tests need the CPU
    running.let_go()
    assert running.line() == "done"
    assert running.code() == 0


def test_a_lock_that_is_broken(server: Server, name: str, begin: Begin) -> None:
    """By an operator: the command is told at once, and gets a tenth of the lease to end."""
    running = begin("run", name, "--lease", "60", "--", *python(TIDY), on=server).holds()
    assert answered("break", name, "--yes", on=server).returncode == 0
    assert running.line() == "tidies up"
    assert running.code() == 70


def test_what_the_command_started_ends_too(server: Server, name: str, begin: Begin) -> None:
    """The command itself ends at SIGTERM; what it started does not, and gets SIGKILL."""
    deaf = "sh -c 'trap \"\" TERM; echo holds; while :; do sleep 1; done' & wait"
    running = begin("run", name, "--lease", "6", "--", "sh", "-c", deaf, on=server).holds()
    server.freeze()
    assert running.line() == ""
    assert running.code() == 70


def test_what_the_command_started_may_tidy_up(server: Server, name: str, begin: Begin) -> None:
    """SIGKILL does not come as soon as the command itself has ended."""
    tidy = "sh -c 'trap \"sleep 0.2; echo tidied up; exit\" TERM; echo holds; while :; do sleep 0.1; done' & wait"
    running = begin("run", name, "--lease", "60", "--", "sh", "-c", tidy, on=server).holds()
    assert answered("break", name, "--yes", on=server).returncode == 0
    assert running.line() == "tidied up"
    assert running.code() == 70


def test_on_lost_kill(server: Server, name: str, begin: Begin) -> None:
    """No SIGTERM."""
    running = begin("run", name, "--lease", "6", "--on-lost", "kill", "--", *python(STUBBORN), on=server).holds()
    server.freeze()
    assert running.line() == ""
    assert running.code() == 70


@pytest.mark.parametrize("code", [0, 5])
def test_on_lost_ignore(server: Server, name: str, begin: Begin, code: int) -> None:
    """The command runs on, and its own exit code counts; stderr says that the lease was lost."""
    program = f"say('holds'); sys.stdin.read(); sys.exit({code})"
    running = begin("run", name, "--on-lost", "ignore", "--", *python(program), on=server).holds()
    assert answered("break", name, "--yes", on=server).returncode == 0
    running.let_go()
    assert running.code() == code
    assert "lost" in running.all_said()


def test_a_holder_that_was_frozen(server: Server, name: str, begin: Begin) -> None:
    """asynclock itself was stopped for longer than its lease: it ends the command as it wakes. SIGKILL follows SIGTERM
    soon, so a command on a busy machine may get no time to answer."""
    running = begin("run", name, "--lease", "6", "--", *python(STUBBORN), on=server).holds()
    running.process.send_signal(signal.SIGSTOP)
    assert asynclock("run", name, "--", "true", on=server).returncode == 0
    running.process.send_signal(signal.SIGCONT)
    assert running.line() in ("SIGTERM", "")
    assert running.code() == 70
    assert "is lost: SIGTERM, in" in running.all_said()


# -- a stderr that cannot be written -----------------------------------------------------------------------------------


def hang_up(running: Running) -> None:
    """The reader of its stderr goes away, as `tee` does when it is killed."""
    assert running.process.stderr is not None
    running.process.stderr.close()


def test_a_lost_lease_ends_the_command_without_stderr(server: Server, name: str, begin: Begin) -> None:
    """The line that tells of the loss cannot be written. The command gets its SIGTERM, and the exit code is 70."""
    running = begin("run", name, "--lease", "60", "--", *python(TIDY), on=server).holds()
    hang_up(running)
    assert answered("break", name, "--yes", on=server).returncode == 0
    assert running.line() == "tidies up"
    assert running.code() == 70


class Away(Proxy):
    """The second and the third connection are closed at once; the fourth reaches the server."""

    def __init__(self, front: Path, back: Path) -> None:
        super().__init__(front, back)
        self.back_again = asyncio.Event()
        self._accepted = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._accepted += 1
        if self._accepted in (2, 3):
            writer.transport.abort()
            return
        if self._accepted == 4:
            self.back_again.set()
        await super()._serve(reader, writer)


async def test_a_server_is_connected_again_without_stderr(
    server: Server, name: str, begin: Begin, tmp_path: Path
) -> None:
    """The warning that the server is down cannot be written. The client goes on with its attempts to connect."""
    async with Away(tmp_path / "away", server.path) as proxy:
        running = begin("run", name, "--lease", "60", "--", *HOLDS, ASYNCLOCK_URLS=proxy.url)
        await asyncio.to_thread(running.holds)
        hang_up(running)
        proxy.cut()
        async with asyncio.timeout(40):
            await proxy.back_again.wait()
        running.let_go()
        assert await asyncio.to_thread(running.code) == 0


def test_json_events_without_stderr(server: Server, name: str, begin: Begin) -> None:
    """The event "started" cannot be written. The command keeps its lock, and its exit code counts."""
    running = begin("run", name, "--json", "--", *HOLDS, on=server)
    hang_up(running)
    assert running.line() == "holds"
    assert asynclock("run", name, "--wait", "0", "--", "true", on=server).returncode == 75
    running.let_go()
    assert running.code() == 0


def test_the_exit_code_without_stderr(server: Server, name: str, begin: Begin) -> None:
    """Python would exit with 120, because it cannot write the rest of its buffer at its end."""
    buffered = ["env", "-u", "PYTHONUNBUFFERED"]
    running = begin("run", name, "--", "/no/such/command", on=server, under=buffered)
    hang_up(running)
    assert running.code() == 127


async def test_a_command_that_is_given_up_is_killed() -> None:
    """After an error of asynclock the lock is released, so the command must have ended."""
    children = Children()
    children.begin()
    child = Child(children, ["sleep", "1000"], os.environ, tied=True)
    try:
        child.close()
        async with asyncio.timeout(30):
            assert await child.ended == -signal.SIGKILL
    finally:
        child.send(signal.SIGKILL)


@pytest.mark.parametrize("mode", [Mode.EXCLUSIVE, Mode.ONCE])
async def test_a_lease_that_is_lost_before_the_command_begins(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine stood still between the grant and the block. The command did not run: 70, with --on-lost ignore,
    too, and not the 0 of a command that has ended."""
    clock = FakeClock()

    async def stopped(lease: Lease) -> Lease:
        clock.advance(100.0)
        return await entered(lease)

    entered = Lease.__aenter__
    monkeypatch.setattr(Lease, "__aenter__", stopped)
    plan = Plan("a", ("true",), (), None, mode, 1, 60.0, 30.0, None, None, OnLost.IGNORE, 75)
    async with Redlock(MemoryStore(clock), renew=False, cancel_on_lost=False) as client:
        assert await Runner(plan, client, False).run() == 70
