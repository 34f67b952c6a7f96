"""A forked child keeps no connection of its parent open: to the servers, a parent that died is gone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from asynclock import Redlock
from tests.support.ports import free_port
from tests.support.programs import LIBRARY, STORES, Program, run_python
from tests.support.servers import Server
from tests.support.services.zookeeper import ZooKeeper
from tests.support.waiters import LIMIT, in_queue, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the descriptors of a process are read in /proc")

loops = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])

BEGIN = """
import asyncio, os, signal, socket, sys

async def run(main):
    await main()

def begin(main):
    loop = asyncio if sys.argv[1] == "asyncio" else __import__("uvloop")
    loop.run(main())

def connected_to(servers):
    # the descriptors that are connected to one of these ports and paths
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(fd)) as sock:
                peer = sock.getpeername()
        except OSError:
            continue
        if (peer if isinstance(peer, str) else str(peer[1])) in servers:
            found.append(fd)
    return found
"""

INHERITED = (
    BEGIN
    + """
from asynclock import Redlock

async def main():
    urls, servers = sys.argv[2].split(), sys.argv[3].split()
    clients = [Redlock(url, patience=20, connect_timeout=20) for url in urls]
    leases = [await client("held").acquire() for client in clients]
    before = connected_to(servers)
    assert len(before) >= len(urls), before
    pid = os.fork()
    if pid == 0:
        kept = connected_to(servers)
        for fd in kept:
            with socket.socket(fileno=os.dup(fd)) as sock:
                print("the child keeps", fd, sock.getpeername(), flush=True)
        os._exit(len(kept))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert connected_to(servers) == before
    for client, lease in zip(clients, leases):
        await lease.extend()
        async with client("another"):
            pass
        await client.aclose()
    print("fine")

begin(main)
"""
)


@loops
def test_f9_a_child_has_no_socket_of_its_parent(
    server: Server, postgresql_url: str, mariadb_url: str, shared_zookeeper: ZooKeeper, name: str, loop: str
) -> None:
    """To no server of any store. The parent goes on with them."""
    table = f"?asynclock_table=forks_{loop}"
    urls = [server.url, postgresql_url + table, mariadb_url + table, shared_zookeeper.url()]
    ports = [each.rpartition(":")[2].partition("/")[0] for each in urls[1:]]
    told = run_python(INHERITED, loop, " ".join(urls), f"{server.path} {' '.join(ports)}", preload=STORES)
    assert told == "fine\n"


UNDER_WAY = (
    BEGIN
    + """
from asynclock import Redlock

async def main():
    url, port = sys.argv[2:]
    with socket.create_server(("127.0.0.1", int(port))) as silent:
        silent.setblocking(False)
        client = Redlock(url, connect_timeout=20, patience=20)
        connecting = asyncio.ensure_future(client("a").acquire(timeout=20))
        accepted, _ = await asyncio.get_running_loop().sock_accept(silent)
        while not connected_to([port]):
            await asyncio.sleep(0)
        pid = os.fork()
        if pid == 0:
            os._exit(len(connected_to([port])))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert connected_to([port])
        print("fine", flush=True)
        os._exit(0)

begin(main)
"""
)


@pytest.mark.xdist_group("database-programs")
@loops
@pytest.mark.parametrize("url", ["redis", "postgresql", "mysql", "zookeeper"])
def test_f9_a_child_has_no_socket_that_its_parent_is_connecting(url: str, loop: str) -> None:
    """A server that accepts connections and says nothing: the connect is under way at the fork."""
    port = free_port()
    database = "/test" if url in {"postgresql", "mysql"} else ""
    told = run_python(UNDER_WAY, loop, f"{url}://127.0.0.1:{port}{database}", str(port), preload=STORES)
    assert told == "fine\n"


FULL = """
import os, resource, socket, stat
from asynclock.stores import forks

pairs = [socket.socketpair() for _ in range(3)]
ours = [first for first, _ in pairs]
for each in ours:
    forks.keep_from_children(each.fileno())
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
try:
    while True:
        os.dup(0)
except OSError:
    pass
pid = os.fork()
if pid == 0:
    os._exit(sum(not stat.S_ISCHR(os.fstat(each.fileno()).st_mode) for each in ours))
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert all(stat.S_ISSOCK(os.fstat(each.fileno()).st_mode) for each in ours)
for pair in pairs:
    for each in pair:
        each.close()
print("fine")
"""


def test_f9_a_process_without_free_descriptors_may_fork() -> None:
    assert run_python(FULL) == "fine\n"


REUSED = """
import os, socket, stat
from asynclock.stores import forks

real = os.fstat

def without_inodes(descriptor):
    found = list(real(descriptor))
    if stat.S_ISSOCK(found[0]):
        found[1:3] = 0, 0
    return os.stat_result(found)

os.fstat = without_inodes
ours, _ = socket.socketpair()
number = ours.fileno()
kept = forks.keep_from_children(number)
ours.close()
another, peer = socket.socketpair()
assert another.fileno() == number
if kept is not None:
    kept.end()
pid = os.fork()
if pid == 0:
    another.send(b"x")
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print("fine")
"""


def test_f9_a_descriptor_that_another_file_has_taken_is_left_alone() -> None:
    """Also where the system gives sockets no inode, so that nothing tells two of them apart."""
    assert run_python(REUSED) == "fine\n"


WAITER = (
    BEGIN
    + """
from asynclock import Redlock

def fork():
    # the child lives until this test ends
    if os.fork() == 0:
        os.read(0, 1)
        os._exit(0)

async def main():
    url, name, when = sys.argv[2:]
    if when == "connecting":
        real = asyncio.open_unix_connection

        async def connect(path):
            made = await real(path)
            asyncio.open_unix_connection = real
            fork()
            return made

        asyncio.open_unix_connection = connect
    redlock = Redlock(url)
    waiting = asyncio.create_task(redlock(name).acquire())
    if when == "waiting":
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), fork_and_die)
    await waiting

def fork_and_die():
    os.read(0, 1)
    fork()
    os.kill(os.getpid(), signal.SIGKILL)

begin(main)
"""
)


@asynccontextmanager
async def waiter(*args: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A program that waits; it and its child end with the block."""
    program = Program(["-c", WAITER, *args], LIBRARY, stdin=subprocess.PIPE)
    assert program.stdin is not None
    try:
        yield program
    finally:
        program.kill()
        program.wait()
        program.stdin.close()  # its child reads the end


@loops
@pytest.mark.parametrize("when", ["waiting", "connecting"])
async def test_f9_a_dead_waiter_with_a_living_child_is_not_served(
    server: Server, name: str, loop: str, when: str
) -> None:
    """It forked while it waited, or while it connected. The server sees that it is gone, and serves the next waiter."""
    async with Redlock(server.url) as holder, Redlock(server.url) as other:
        lease = await holder(name).acquire()
        assert lease is not None
        with server.cli() as cli:
            before = len(cli.client_list())
            async with waiter(loop, server.url, name, when) as program:
                assert program.stdin is not None
                await until(in_queue([server], name, 1))
                if when == "waiting":
                    program.stdin.write(b"x")
                    program.stdin.flush()
                else:
                    program.kill()
                await asyncio.to_thread(program.wait)
                await until(lambda: len(cli.client_list()) == before)
                waiting = asyncio.create_task(other(name).acquire())
                await until(in_queue([server], name, 2))
                await lease.release()
                async with asyncio.timeout(LIMIT):
                    served = await waiting
                assert served is not None
                await served.release()
