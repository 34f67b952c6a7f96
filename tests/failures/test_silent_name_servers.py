"""A name server that hears, and never answers."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio.sentinel import Sentinel

from asynclock import QuorumUnavailable, Redlock
from asynclock.stores import lookups
from asynclock.stores.lookups import Unresolved, addresses_of, addresses_within
from tests.support.host_names import GOOD, HostNames
from tests.support.ports import free_port
from tests.support.programs import PYTHONPATH, run_python
from tests.support.servers import Servers
from tests.support.services import needs, program
from tests.support.services.sentinels import NAME, Deployment
from tests.support.services.zookeeper import ZooKeeper
from tests.support.still_clock import turns
from tests.support.waiters import LIMIT
from tests.support.zookeeper_probes import hang_up

NO_ANSWER = "no answer to the lookup of its host name; check the host name and the name servers"


# -- the threads of the program ----------------------------------------------------------------------------------------

URLS = {
    "one": ("redis://a.test",),
    "tls": ("rediss://a.test",),
    "quorum": ("redis://a.test", "redis://b.test", "redis://c.test"),
    "sentinel": ("redis+sentinel://a.test,b.test/mymaster",),
    "cluster": ("redis+cluster://a.test,b.test",),
    "postgresql": ("postgresql://user@a.test/db",),
    "mariadb": ("mariadb://user@a.test/db",),
    "zookeeper": ("zookeeper://a.test,b.test/locks",),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", URLS)
async def test_f14_a_lookup_takes_no_thread_of_the_program(host_names: HostNames, kind: str) -> None:
    """Each attempt to connect ends by its limit, the lookup does not: `asyncio.to_thread` still has its thread. The
    error names the lookup."""
    host_names.mute("a.test", "b.test", "c.test")
    async with asyncio.timeout(LIMIT), aclosing(Redlock(*URLS[kind], connect_timeout=0.3, patience=0.3)) as client:
        said = ""
        while said.count(NO_ANSWER) < len(URLS[kind]):  # on a busy machine the lookup begins late
            with pytest.raises(QuorumUnavailable) as caught:
                await client("order:42").acquire(timeout=None)
            said = str(caught.value)
        assert await asyncio.to_thread(lambda: "free") == "free"
        assert host_names.asked["a.test"] == 1


async def test_f14_a_short_timeout_names_the_lookup_too(host_names: HostNames) -> None:
    """The attempt to connect has not ended yet."""
    host_names.mute("a.test")
    async with aclosing(Redlock("redis://a.test", connect_timeout=30)) as client:
        with pytest.raises(QuorumUnavailable, match=f"a.test:6379 is not connected yet: {NO_ANSWER}"):
            await client("order:42").acquire(timeout=3.0)


async def test_f14_the_master_that_sentinels_name(host_names: HostNames, sentinel_deployment: Deployment) -> None:
    """They may name it by its host name, which is not in the url."""
    host_names.mute("a.test")
    sentinels = [("127.0.0.1", each.port) for each in sentinel_deployment.sentinels]
    async with Sentinel(sentinels, force_master_ip="a.test").master_for(NAME) as master:
        async with asyncio.timeout(LIMIT), aclosing(Redlock(master, connect_timeout=0.5, patience=0.1)) as client:
            said = ""
            while not re.search(
                rf"the master a\.test:\d+: {NO_ANSWER}", said
            ):  # or the first attempt has not ended yet
                with pytest.raises(QuorumUnavailable, match=NO_ANSWER) as caught:
                    await client("order:42").acquire(timeout=None)
                said = str(caught.value)


async def test_f14_a_host_that_needs_no_lookup_is_tried_at_once(
    host_names: HostNames, shared_zookeeper: ZooKeeper, name: str
) -> None:
    """The lookup of the other host of the ensemble has no answer."""
    host_names.mute("a.test")
    url = f"zookeeper://a.test,{shared_zookeeper.address}/locks?session_timeout=60"
    async with asyncio.timeout(LIMIT), Redlock(url, lease=60, connect_timeout=60) as client, client(name) as lease:
        assert lease.held


def test_f14_several_hosts_wait_for_a_lookup_that_is_a_little_slower(
    host_names: HostNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of several servers knows them all, and not only the one whose lookup ends first."""
    monkeypatch.setattr(lookups, "_GRACE", LIMIT)
    host_names.give("a.test", GOOD)
    host_names.give("b.test", GOOD)
    host_names.mute("b.test")
    slower = threading.Timer(0.1, host_names.answer)
    slower.start()
    found = addresses_within([("a.test", 1), ("b.test", 2)], LIMIT)
    slower.join()
    assert [isinstance(each, list) for each in found] == [True, True]


async def test_f14_locks_work_as_soon_as_the_name_server_answers(servers: Servers, host_names: HostNames) -> None:
    """A client that waits gets its lock, and its tries have shared one lookup."""
    port = free_port()
    servers.start("--port", str(port), "--bind", GOOD)
    host_names.give("a.test", GOOD)
    host_names.mute("a.test")
    async with asyncio.timeout(LIMIT), aclosing(Redlock(f"redis://a.test:{port}", connect_timeout=0.2)) as client:
        with pytest.raises(QuorumUnavailable):
            await client("order:42").acquire(timeout=0)
        host_names.answer()
        async with client("order:42") as lease:
            assert lease.held


@pytest.mark.usefixtures("host_names")
@pytest.mark.parametrize("url", ["redis://a.test", "postgresql://user@a.test/db", "mariadb://user@a.test/db"])
async def test_f14_a_name_without_an_address(url: str) -> None:
    """The error says so."""
    async with aclosing(Redlock(url, patience=0.1)) as client:
        with pytest.raises(
            QuorumUnavailable, match=r"the host name a\.test does not resolve: Name or service not known"
        ):
            await client("order:42").acquire(timeout=None)


# -- one lookup for all ------------------------------------------------------------------------------------------------


@pytest.mark.both_loops("the answer comes from another thread")
async def test_f14_all_that_wait_share_one_lookup(host_names: HostNames) -> None:
    """In several event loops. A waiter that is cancelled does not end it for the others."""
    host_names.give("a.test", GOOD)
    host_names.mute("a.test")
    joined = threading.Event()

    async def waits() -> list[Any]:
        task = asyncio.create_task(addresses_of("a.test", 8))
        await turns()
        joined.set()
        return await task

    elsewhere = asyncio.create_task(asyncio.to_thread(asyncio.run, waits()))
    await asyncio.to_thread(joined.wait)
    first, second = (asyncio.create_task(addresses_of("a.test", 7)) for _ in range(2))
    await turns()
    first.cancel()
    await turns()
    assert first.cancelled()
    host_names.answer()
    async with asyncio.timeout(LIMIT):
        found = [await second, await elsewhere]
    assert [each[0][4] for each in found] == [(GOOD, 7), (GOOD, 8)]
    assert host_names.asked["a.test"] == 1


async def test_f14_each_waiter_has_an_error_of_its_own(host_names: HostNames) -> None:
    """Tracebacks of several tasks in one exception would grow without end. The next lookup asks again."""
    host_names.mute("a.test")
    tasks = [asyncio.create_task(addresses_of("a.test", 7)) for _ in range(2)]
    await turns()
    host_names.answer()
    one, two = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(one, Unresolved)
    assert isinstance(two, Unresolved)
    assert one is not two
    host_names.give("a.test", GOOD)
    assert [each[4] for each in await addresses_of("a.test", 7)] == [(GOOD, 7)]


async def test_f14_a_loop_that_was_closed_during_a_lookup(
    host_names: HostNames, caplog: pytest.LogCaptureFixture
) -> None:
    """The others get their answer, and nothing is logged."""
    host_names.give("a.test", GOOD)
    host_names.mute("a.test")

    def gives_up() -> None:
        loop = asyncio.SelectorEventLoop()
        task = loop.create_task(addresses_of("a.test", 7))
        loop.call_later(0.01, loop.stop)
        loop.run_forever()
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        loop.close()

    await asyncio.to_thread(gives_up)
    task = asyncio.create_task(addresses_of("a.test", 7))
    await turns()
    host_names.answer()
    assert len(await task) == 1
    assert host_names.asked["a.test"] == 1
    assert not caplog.records


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", ("127.0.0.1", 7)), ("::1", ("::1", 7, 0, 0))])
async def test_an_address_needs_no_lookup(host_names: HostNames, host: str, address: tuple[object, ...]) -> None:
    """It works without name servers and without a thread."""
    assert [each[4] for each in await addresses_of(host, 7)] == [address]
    assert not host_names.asked


@pytest.mark.parametrize("host", ["", "a" * 64 + ".test", "b\0.test"])
async def test_a_name_that_cannot_be_looked_up(host: str) -> None:
    """Python refuses it, and not with an OSError."""
    with pytest.raises(Unresolved, match="does not resolve"):
        await addresses_of(host, 7)


async def test_f14_a_process_that_gets_no_more_threads(
    shared_zookeeper: ZooKeeper, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt to connect fails, and the next one is made. The thread of kazoo goes on: with it the session, and all
    leases, would end."""
    url = f"zookeeper://localhost:{shared_zookeeper.port}/locks?session_timeout=60"
    starts, refused = threading.Thread.start, 0

    def start(thread: threading.Thread) -> None:
        nonlocal refused
        if thread.name == "asynclock looks up localhost" and refused < 2:
            refused += 1
            raise RuntimeError("can't start new thread")
        starts(thread)

    async with Redlock(url, lease=60, patience=LIMIT) as client, client(name) as lease:
        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(Unresolved, match="no thread for the lookup of localhost: can't start new thread"):
            await addresses_of("localhost", 7)
        hang_up(client)
        async with asyncio.timeout(LIMIT), client(f"{name}:2"):
            assert refused == 2
            assert lease.held


# -- the process -------------------------------------------------------------------------------------------------------

MUTED = """
    import asyncio, logging, os, socket, threading
    logging.getLogger("asynclock").setLevel("ERROR")
    from asynclock import QuorumUnavailable, Redlock
    from asynclock.stores.lookups import addresses_of

    parent, real, asked = os.getpid(), socket.getaddrinfo, threading.Event()

    def getaddrinfo(host, *args):
        if host == "a.test" and os.getpid() == parent:
            asked.set()
            threading.Event().wait()
        return real("127.0.0.1" if host == "a.test" else host, *args)

    socket.getaddrinfo = getaddrinfo
"""


def test_f14_the_end_of_a_program_does_not_wait_for_a_lookup() -> None:
    """Neither asyncio.run, nor the interpreter: a lookup that never ends would hold it for ever."""
    program = """
    async def main():
        redlock = Redlock("redis://a.test", patience=1.0, connect_timeout=1.0)
        try:
            await redlock("order:42").acquire()
        except QuorumUnavailable:
            print(asked.is_set())
        await redlock.aclose()

    asyncio.run(main())
    """
    assert run_python(MUTED + program) == "True\n"


def test_f14_a_child_that_is_forked_during_a_lookup_starts_its_own() -> None:
    """The thread of the lookup is not in the child: nothing there would ever end it, or release its lock."""
    program = """
    import signal, warnings
    warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads

    async def waits():
        task = asyncio.create_task(addresses_of("a.test", 7))
        await asyncio.to_thread(asked.wait)
        task.cancel()

    asyncio.run(waits())
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        print([each[4] for each in asyncio.run(addresses_of("a.test", 7))], flush=True)
        os._exit(0)
    print(os.waitpid(pid, 0)[1])
    """
    assert run_python(MUTED + program) == "[('127.0.0.1', 7)]\n0\n"


IN_A_NETWORK = """
    mount --bind "$1" /etc/resolv.conf && ip link set lo up && echo ready && exec "$2" -c "$3"
"""

REAL = """
import asyncio, socket
from asynclock import QuorumUnavailable, Redlock

hears = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
hears.bind(("127.0.0.53", 53))

async def main():
    redlock = Redlock("redis://dead.example", patience=0.1, connect_timeout=0.3)
    try:
        await redlock("order:42").acquire()
    except QuorumUnavailable as error:
        print("lookup" in str(error), hears.recv(1) != b"")
    await redlock.aclose()

asyncio.run(main())
"""


def test_f14_a_real_name_server_that_is_silent(tmp_path: Path) -> None:
    """In a network of its own, whose resolv.conf names a socket that hears and never answers. The resolver would wait
    for a minute."""
    (unshare, _) = needs("a network of its own", *map(program, ("unshare", "ip")))
    resolv = tmp_path / "resolv.conf"
    resolv.write_text("nameserver 127.0.0.53\noptions timeout:30 attempts:2\n")
    done = subprocess.run(
        [unshare, "-nmr" if os.getuid() else "-nm", "sh", "-c", IN_A_NETWORK, *("sh", resolv, sys.executable, REAL)],
        env={"PYTHONPATH": PYTHONPATH, "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    if not done.stdout.startswith("ready"):
        pytest.skip(f"this user may not have a network of its own: {done.stderr}")
    assert done.stdout == "ready\nTrue True\n", done.stderr
