"""A forked child that leaves the parent's event loop and its blocks, by `sys.exit`, an exception or a return, releases
nothing of its parent."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asynclock import Redlock
from tests.support.programs import LIBRARY, PATIENT, PYTHONPATH, STORES, Program, run_python
from tests.support.services.zookeeper import ZooKeeper
from tests.support.waiters import LIMIT

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")

PARENT = """
import asyncio, os, sys, threading, warnings

warnings.filterwarnings("ignore", category=DeprecationWarning)  # of a fork in a process that has threads

name, how, *urls = sys.argv[1:]
OPTIONS = {"patience": 20, "connect_timeout": 20, "lease": 30}

def forks():
    # True in the child. In the parent it waits until the child has ended, and then for a line of the test.
    pid = os.fork()
    if pid == 0:
        return True
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    sys.stdin.readline()
    return False
"""

TASKS = (
    PARENT
    + """
from asynclock import Redlock

client = Redlock(*urls, **OPTIONS)

async def turns():
    # The child has taken the pipe that wakes the loop out of the selector which it shares with its parent.
    while True:
        await asyncio.sleep(0.02)

async def begin():
    global lease, waiting, turning
    turning = asyncio.create_task(turns())
    lease = await client(f"{name}:held").acquire()
    waiting = asyncio.create_task(client(f"{name}:wanted").acquire())
    while len((await client.inspect(f"{name}:wanted")).waiters) < 1:
        await asyncio.sleep(0.01)

async def go_on():
    await lease.extend()
    wanted = await waiting
    await wanted.extend()
    await wanted.release()
    await lease.release()
    turning.cancel()
    await client.aclose()
    print("fine", flush=True)

"""
)

LEAVING = (
    TASKS
    + """
async def leave():
    await begin()
    if forks():
        if how == "raise":
            raise ValueError("the child ends by an exception")
        if how == "exit":
            sys.exit(7)
        return
    await go_on()

async def leave_blocks():
    async with client:
        await begin()
        async with client(f"{name}:block") as block:
            async with lease:
                if forks():
                    sys.exit(7)
                block.ensure_held()
                wanted = await waiting
                await wanted.release()
                await lease.extend()
        turning.cancel()
    print("fine", flush=True)

if how == "runner":
    with asyncio.Runner() as runner:
        runner.run(begin())
        if forks():
            sys.exit(7)
        runner.run(go_on())
else:
    asyncio.run(leave_blocks() if how == "blocks" else leave())
"""
)

THREADS = (
    PARENT
    + """
from asynclock.blocking import Redlock

client, fine = Redlock(*urls, **OPTIONS), threading.Event()

def wait():
    with client(f"{name}:wanted") as lease:
        lease.extend()
        fine.set()

with client(f"{name}:held") as lease, client(f"{name}:block"):
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    while len(client.inspect(f"{name}:wanted").waiters) < 1:
        threading.Event().wait(0.01)
    if forks():
        if how == "raise":
            raise ValueError("the child ends by an exception")
        sys.exit(7)
    lease.extend()
    assert fine.wait(20)
waiting.join()
print("fine", flush=True)
"""
)


NODES = (
    TASKS
    + """
from asynclock._clock import SYSTEM
from asynclock.quorum.quorum import Quorum
from asynclock.rules.model import RELEASE, Op
from tests.support.probes import hold_of, nodes_of

async def prepared():
    await begin()
    return nodes_of(client), hold_of(lease).op

async def release(nodes, op):
    quorum, settled = Quorum(nodes, SYSTEM, asyncio.get_running_loop().call_soon), asyncio.Event()
    quorum.ask(Op(RELEASE, op.kind, op.name, op.id, 30.0), 2.0, on_settled=lambda ballot: settled.set())
    await settled.wait()
    for node in nodes:
        await asyncio.wait({asyncio.ensure_future(node.open())}, timeout=0.1)
        await asyncio.wait({asyncio.ensure_future(node.aclose())}, timeout=3)

with asyncio.Runner() as runner:
    nodes, op = runner.run(prepared())
    if forks():
        runner.run(release(nodes, op))
        sys.exit(7)
    runner.run(go_on())
"""
)


SESSION = """
import asyncio, os, sys, threading, warnings
from asynclock import Redlock

warnings.filterwarnings("ignore", category=DeprecationWarning)
url, name = sys.argv[1:]
client = Redlock(f"{url}?session_timeout=8", lease=8, patience=20, connect_timeout=20)

async def end_of(pid):
    ended = asyncio.create_task(asyncio.to_thread(os.waitpid, pid, 0))
    while not ended.done():  # the child shares the selector, and the pipe that wakes this loop
        await asyncio.sleep(0.02)
    return os.waitstatus_to_exitcode(ended.result()[1])

with asyncio.Runner() as runner:
    lease = runner.run(client(name).acquire())
    pid = os.fork()
    if pid == 0:
        runner.run(asyncio.sleep(1.5))
        os._exit(threading.active_count())
    print("threads in the child:", runner.run(end_of(pid)), flush=True)
    runner.run(lease.extend())
    runner.run(client.aclose())
"""


@contextmanager
def running(program: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A program that ends with the block."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    env = {"PYTHONPATH": PYTHONPATH, "PATH": "/usr/bin:/bin", "ASYNCLOCK_NODE_TIMEOUT": PATIENT}
    preload = LIBRARY if any(each.startswith("unix:") for each in args) else STORES
    with Program(["-c", program, *args], preload, text=True, env=env, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


async def leaves_all_to_its_parent(program: str, name: str, how: str, *urls: str, code: int = 7) -> str:
    """The parent holds two names or three, and waits for another one, which this process holds. Its child ends, with
    that exit code. Then the names are still taken, and the parent still waits; it gets the name once that is free.
    Returns what the two have written to stderr."""
    async with Redlock(*urls, patience=LIMIT, connect_timeout=LIMIT, lease=30) as other:
        wanted = await other(f"{name}:wanted").acquire()
        assert wanted is not None
        with running(program, name, how, *urls) as parent:
            assert parent.stdin is not None
            assert parent.stdout is not None
            assert parent.stderr is not None
            ended = await asyncio.to_thread(parent.stdout.readline)
            assert ended == f"{code}\n", parent.stderr.read()
            assert await other(f"{name}:held").acquire(timeout=0) is None
            assert await other(f"{name}:block").locked() is (how == "blocks" or program is THREADS)
            assert len((await other.inspect(f"{name}:wanted")).waiters) == 1
            await wanted.release()
            print(file=parent.stdin, flush=True)
            said, complaints = await asyncio.to_thread(parent.communicate, timeout=LIMIT)
        assert (said, parent.returncode) == ("fine\n", 0), complaints
        for part in ("held", "wanted", "block"):
            assert not await other(f"{name}:{part}").locked()
    return str(complaints)


@pytest.mark.parametrize("how", ["runner", "exit", "return", "blocks"])
async def test_f9_a_child_that_leaves_the_loop_of_its_parent_releases_nothing(
    shared_urls: list[str], name: str, how: str
) -> None:
    """Forked between two runs of a loop, in a coroutine, and in blocks. Nothing is logged."""
    code = 0 if how == "return" else 7
    assert await leaves_all_to_its_parent(LEAVING, name, how, shared_urls[0], code=code) == ""


async def test_f9_a_child_that_ends_by_an_exception_releases_nothing(shared_urls: list[str], name: str) -> None:
    """The error of the program is the only one that is printed."""
    complaints = await leaves_all_to_its_parent(LEAVING, name, "raise", shared_urls[0], code=1)
    assert complaints.count("Error") == 1


async def test_f9_a_child_releases_nothing_at_several_nodes(shared_urls: list[str], name: str) -> None:
    assert await leaves_all_to_its_parent(LEAVING, name, "exit", *shared_urls[:3]) == ""


STORES_OF_TESTS = ["redis", "cluster", "postgresql", "mariadb", "sqlite", "zookeeper"]


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of one store of each sort."""
    match request.param:
        case "redis":
            found = request.getfixturevalue("shared_urls")[0]
        case "cluster":
            found = request.getfixturevalue("shared_cluster").url
        case "sqlite":
            found = f"sqlite:///{tmp_path}/locks.db"
        case "zookeeper":
            found = request.getfixturevalue("shared_zookeeper").url()
        case database:
            found = request.getfixturevalue(f"{database}_url") + "?asynclock_table=forked"
    return str(found)


@pytest.mark.xdist_group("database-programs")
@pytest.mark.parametrize("how", ["exit", "runner"])
@pytest.mark.parametrize("url", STORES_OF_TESTS[1:], indirect=True)
async def test_f9_a_child_releases_nothing_in_any_store(name: str, url: str, how: str) -> None:
    assert await leaves_all_to_its_parent(LEAVING, name, how, url) == ""


@pytest.mark.xdist_group("database-programs")
@pytest.mark.parametrize("url", STORES_OF_TESTS, indirect=True)
async def test_f9_the_copy_of_a_node_releases_nothing(name: str, url: str) -> None:
    """Asked for it in the child, as by a task of the parent that goes on there, a node sends nothing, opens no new
    connection, and does not take the session of the parent over."""
    await leaves_all_to_its_parent(NODES, name, "", url)


@pytest.mark.parametrize("how", ["exit", "raise"])
async def test_f9_a_child_of_threads_releases_nothing(shared_urls: list[str], name: str, how: str) -> None:
    """With `asynclock.blocking`: the child leaves blocks of its parent, and the interpreter."""
    complaints = await leaves_all_to_its_parent(THREADS, name, how, shared_urls[0], code=1 if how == "raise" else 7)
    assert complaints.count("Error") == (how == "raise")


@pytest.mark.xdist_group("database-programs")
async def test_f9_a_child_does_not_take_over_a_session_of_zookeeper(shared_zookeeper: ZooKeeper, name: str) -> None:
    """A child that goes on in the loop of its parent finds the threads of kazoo gone. It starts no new ones: with the
    session of the parent they would end the connection of the parent."""
    told = await asyncio.to_thread(run_python, SESSION, shared_zookeeper.url(), name, preload=STORES)
    assert told == "threads in the child: 1\n"


DROPPED = """
import asyncio, gc, os, sys, warnings
from asynclock import LockNotHeld, Redlock

warnings.filterwarnings("ignore", category=ResourceWarning)  # that the client was dropped
warnings.filterwarnings("ignore", category=DeprecationWarning)

def in_child(lease):
    assert not lease.held
    try:
        lease.ensure_held()
    except LockNotHeld as error:
        assert "belongs to the parent process" in str(error), error
        sys.exit(7)

async def main():
    lease = await Redlock(sys.argv[1])(sys.argv[2]).acquire()
    gc.collect()
    pid = os.fork()
    if pid == 0:
        in_child(lease)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    lease.ensure_held()
    await lease.extend()
    await lease.release()
    print("fine")

asyncio.run(main())
"""


async def test_f9_a_lease_whose_client_was_dropped_is_not_held_in_a_child(shared_urls: list[str], name: str) -> None:
    """A lease does not keep the client that made its lock. It stays with the parent all the same, which goes on."""
    with running(DROPPED, shared_urls[0], name) as program:
        said, complaints = await asyncio.to_thread(program.communicate, timeout=LIMIT)
    assert (said, program.returncode) == ("fine\n", 0), complaints
