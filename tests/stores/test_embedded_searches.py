"""The search for an embedded server, when the server or a process that starts it is stopped."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from asynclock import QuorumUnavailable, Redlock
from asynclock.stores.embedded import finding
from asynclock.stores.embedded.home import Home
from asynclock.stores.embedded.searches import socket_of
from tests.support.embedded_box import Box, SlowStart, leave, processes_of, search_under_way
from tests.support.still_clock import turns
from tests.support.waiters import LIMIT, works

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="whether a process is stopped is read in /proc")


@pytest.fixture(autouse=True)
def here(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients of this process use that folder, too."""
    monkeypatch.setenv("ASYNCLOCK_EMBEDDED_DIR", str(box.runtime))


@pytest.fixture
def slow_start(box: Box, tmp_path: Path) -> Iterator[SlowStart]:
    slow = SlowStart(box, tmp_path)
    yield slow
    slow.end()


@pytest.fixture
def stopped_start(slow_start: SlowStart) -> SlowStart:
    """A program that was stopped while it starts the server."""
    os.kill(slow_start.program.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, slow_start.program.pid, os.WSTOPPED | os.WNOWAIT)
    return slow_start


async def complaint_of(client: Redlock, part: str) -> None:
    """Wait until an acquire fails with that message. On a busy machine the first ones come before the search begins."""
    async with asyncio.timeout(LIMIT):
        said = ""
        while part not in said:
            with pytest.raises(QuorumUnavailable) as caught:
                await client("job").acquire(timeout=None)
            said = str(caught.value)


@pytest.mark.usefixtures("one_thread")
async def test_a_search_takes_no_thread_of_the_program(stopped_start: SlowStart) -> None:
    """It cannot end, because another process is stopped at the door. `asyncio.to_thread` still has its thread."""
    async with aclosing(Redlock("embedded:", connect_timeout=0.3, patience=0.3)) as client:
        await complaint_of(client, str(stopped_start.program.pid))
        async with asyncio.timeout(LIMIT):
            assert await asyncio.to_thread(lambda: "free") == "free"


async def test_the_error_names_the_process_that_is_stopped_at_the_door(stopped_start: SlowStart) -> None:
    """The user can continue or end it."""
    async with aclosing(Redlock("embedded:", connect_timeout=0.3, patience=0.3)) as client:
        pid = stopped_start.program.pid
        await complaint_of(client, f"(process {pid}, which is stopped) starts the embedded server")


async def test_locks_work_as_soon_as_the_process_at_the_door_goes_on(stopped_start: SlowStart) -> None:
    """The client has tried again meanwhile."""
    async with aclosing(Redlock("embedded:", connect_timeout=0.3, patience=0.3)) as client:
        await complaint_of(client, "which is stopped")
        os.kill(stopped_start.program.pid, signal.SIGCONT)
        stopped_start.go_on()
        async with asyncio.timeout(LIMIT):
            while True:
                try:
                    async with client("job") as lease:
                        assert lease.held
                        return
                except QuorumUnavailable:
                    pass


async def test_the_error_names_a_silent_server(box: Box) -> None:
    """It was stopped: the user can continue or end it."""
    box.hold()
    (server,) = (
        pid for pid in processes_of(box.runtime) if b".keeper" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(server, signal.SIGSTOP)
    async with aclosing(Redlock("embedded:", connect_timeout=0.3, patience=0.3)) as client:
        await complaint_of(client, f"the embedded server (process {server}, which is stopped) does not answer")


def test_a_server_that_runs_is_found_without_the_door(box: Box) -> None:
    """A process that is stopped there holds up nobody."""
    first, got = box.hold()
    with (box.folder() / "door").open("a") as door:
        fcntl.flock(door, fcntl.LOCK_EX)
        second, missed = box.hold()
        assert (got, missed) == ("held", "refused")
    leave(first)
    leave(second)


def test_a_search_gives_up(stopped_start: SlowStart, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its limit it says what it has waited for."""
    monkeypatch.setattr(finding, "LIMIT", 0.0)
    with pytest.raises(ConnectionError, match=f"process {stopped_start.program.pid}, which is stopped"):
        finding.Search(Home("default")).work()


def test_a_search_names_its_obstacle_while_it_looks_again(
    stopped_start: SlowStart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller may give up at that moment, and the server that does not run yet is not the reason."""
    search, found, probe = finding.Search(Home("default")), list[finding.Obstacle](), finding.valkey.probe

    def seen(path: Path) -> finding.valkey.Probe:
        found.append(search.obstacle)
        if len(found) == 2:
            raise EOFError
        return probe(path)

    monkeypatch.setattr(finding.valkey, "probe", seen)
    with pytest.raises(EOFError):
        search.work()
    assert f"process {stopped_start.program.pid}, which is stopped" in found[1].text


async def test_a_start_that_is_stopped_while_it_is_waited_for(slow_start: SlowStart) -> None:
    """A caller that waits longer than its limit, because the server starts, learns soon that this was stopped."""
    patient = asyncio.create_task(socket_of(Home("default"), LIMIT))
    await under_way(patient)
    hasty = asyncio.create_task(socket_of(Home("default"), 0.0))
    await turns()
    assert not hasty.done()
    os.kill(slow_start.program.pid, signal.SIGSTOP)
    async with asyncio.timeout(LIMIT):
        with pytest.raises(ConnectionError, match=f"process {slow_start.program.pid}, which is stopped"):
            await hasty
    patient.cancel()


GIVES_UP = """
    import asyncio
    from contextlib import aclosing
    from asynclock import QuorumUnavailable, Redlock
    from asynclock.stores.embedded import finding

    finding.LIMIT = 600.0

    async def main():
        async with aclosing(Redlock("embedded:", connect_timeout=0.3, patience=0.3)) as client:
            try:
                await client("job").acquire()
            except QuorumUnavailable:
                print("gave up", flush=True)

    import logging
    logging.getLogger("asynclock").setLevel("ERROR")
    asyncio.run(main())
"""


@pytest.mark.usefixtures("stopped_start")
def test_a_search_does_not_hold_up_the_end_of_the_program(box: Box) -> None:
    """Neither asyncio.run nor the interpreter waits for it."""
    program = box.start(GIVES_UP)
    said, complaints = program.communicate(timeout=50)
    assert (said, complaints, program.returncode) == ("gave up\n", "", 0)


async def under_way(task: asyncio.Task[Path]) -> None:
    """Wait until its search has found that a server starts."""
    async with asyncio.timeout(LIMIT):
        while (search := search_under_way()) is None or not search.obstacle.progresses:
            assert not task.done()
            await asyncio.sleep(0)


async def test_a_start_by_another_process_is_waited_for(box: Box, slow_start: SlowStart) -> None:
    """It may take longer than a connect may, and is no outage."""
    home = Home("default")
    patient = asyncio.create_task(socket_of(home, LIMIT))
    await under_way(patient)
    hasty = asyncio.create_task(socket_of(home, 0.0))
    await turns()
    assert not hasty.done()
    slow_start.go_on()
    async with asyncio.timeout(LIMIT):
        assert [await patient, await hasty] == [box.socket()] * 2


async def test_a_caller_that_is_cancelled_leaves_the_search_to_the_others(box: Box, slow_start: SlowStart) -> None:
    """All wait for one search."""
    home = Home("default")
    first, second = (asyncio.create_task(socket_of(home, LIMIT)) for _ in range(2))
    await under_way(first)
    search = search_under_way()
    first.cancel()
    await asyncio.wait([first])
    assert search_under_way() is search
    slow_start.go_on()
    async with asyncio.timeout(LIMIT):
        assert await second == box.socket()


DAEMON = """
    import asyncio, os
    from asynclock import Redlock

    async def lock():
        async with Redlock("embedded:", connect_timeout=30, patience=30) as client, client("job"):
            pass

    asyncio.run(lock())
    os.closerange(3, 1000)
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(FILES)]
    asyncio.run(lock())
    for each in files:
        os.fstat(each)
    print("locked twice", flush=True)
"""


@pytest.mark.parametrize("files", [0, 100])
def test_a_program_that_closes_all_files(box: Box, files: int) -> None:
    """As a daemon does at its start. It is no user of the server any more, and becomes one at its next lock. A file
    that it has opened meanwhile, and that has the number of the lock file, stays open."""
    program = box.start(DAEMON.replace("FILES", str(files)))
    said, complaints = program.communicate(timeout=50)
    assert (said, complaints) == ("locked twice\n", "")


async def test_a_keeper_that_has_ended_is_no_zombie(box: Box) -> None:
    """The program that has started it goes on. It waits for its end at the next search."""
    await lock()
    keeper = int((box.folder() / "alive").read_text().split()[0])
    os.kill(keeper, signal.SIGKILL)
    os.waitid(os.P_PID, keeper, os.WEXITED | os.WNOWAIT)
    await lock()
    with pytest.raises(ChildProcessError):
        os.waitpid(keeper, os.WNOHANG)


async def lock() -> None:
    """By a client of its own."""
    async with asyncio.timeout(LIMIT), Redlock("embedded:", connect_timeout=LIMIT, patience=LIMIT) as client:
        await works(client, "job")
