"""Servers of ZooKeeper that freeze or start again, and clients that hang, while a lock is held."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionLoss

from asynclock import ConfigError, Lease, LockError, LockLost, QuorumUnavailable, Redlock
from asynclock.events import Event, NodeDown
from asynclock.quorum.ballot import UNREACHABLE, WON, Ballot
from asynclock.rules.model import ACQUIRE, RELEASE, Op, Queueing, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.stores.port import Reconnecting
from asynclock.stores.zookeeper.connection import Connection
from asynclock.stores.zookeeper.handler import Handler
from tests.support.host_names import SILENT, silent_at
from tests.support.ports import free_port
from tests.support.probes import nodes_of
from tests.support.proxy import TcpProxy
from tests.support.services.zookeeper import ZooKeeper, ZooKeepers
from tests.support.still_clock import turns
from tests.support.waiters import LIMIT, LONG, reconnected, until
from tests.support.zookeeper_clients import SHORT, SOON, behind, client_of
from tests.support.zookeeper_probes import (
    connection_of,
    end_thread,
    end_thread_twice,
    held_request,
    thread_of,
    zookeeper_session,
)

# -- the server ------------------------------------------------------------------------------------------------------


async def test_f27_a_release_that_the_connection_before_has_lost_is_no_error(
    shared_zookeeper: ZooKeeper, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is connected again when it learns that the connection took the delete with it. It deletes again, and
    the log has no error: the outage is over."""
    async with client_of(shared_zookeeper, 6.0) as client, client_of(shared_zookeeper) as other:
        lease = await client(name).acquire(timeout=None)
        delete, lost = Connection.delete, list[str]()

        async def deletes(connection: Connection, path: str) -> bool:
            if len(lost) < 2 and connection is connection_of(client):
                lost.append(path)
                raise ConnectionLoss
            return await delete(connection, path)

        monkeypatch.setattr(Connection, "delete", deletes)
        await lease.release()
        async with asyncio.timeout(LIMIT), other(name):
            pass
    assert len(lost) == 2
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


async def test_d4_a_server_that_starts_again_keeps_the_session(zookeepers: ZooKeepers, name: str) -> None:
    """Its log has the session and its nodes. So the lease goes on, and fences rise."""
    server = await asyncio.to_thread(zookeepers.start)
    async with client_of(server, 30.0, patience=LIMIT) as client:
        async with client(name) as lease:
            server.kill()
            server.start()
            await asyncio.to_thread(server.wait)
            async with asyncio.timeout(LIMIT):
                while True:
                    try:
                        await lease.extend()
                        break
                    except QuorumUnavailable:
                        await asyncio.sleep(0.05)
            assert lease.held
        async with asyncio.timeout(SOON), client(name) as again:
            assert again.fence > lease.fence


async def test_a_host_name_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names it, where kazoo does not try to connect at all."""

    def fails(host: str, *args: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    with pytest.raises(QuorumUnavailable, match=r"the host name no\.such\.host does not resolve: .*not known"):
        async with Redlock("zookeeper://no.such.host"):
            pass


def test_the_next_lookup_does_not_hide_why_the_last_attempt_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """kazoo tries again and again. A client whose time is over during a lookup names what is known."""
    asked, answer = threading.Event(), threading.Event()

    def fails(host: str, *args: object) -> object:
        asked.set()
        answer.wait(LIMIT)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    handler = Handler(LIMIT, LIMIT, LIMIT, lambda timeout, session: None, lambda: False)
    with ThreadPoolExecutor(1) as pool:
        for known in ("no answer to the lookup", "not known"):
            looking = pool.submit(handler.addresses, [("no.such.host", 2181)])
            assert asked.wait(LIMIT)
            assert known in str(handler.trouble)
            answer.set()
            looking.result()
            asked.clear()
            answer.clear()


async def test_c10_a_frozen_server(zookeepers: ZooKeepers, name: str) -> None:
    """The holder stops when its lease is over, by its own clock. The client hangs up before that, also while it has
    requests to send all the time: another server could answer. Once the server runs again, so do locks."""
    server = await asyncio.to_thread(zookeepers.start)
    told: list[Event] = []

    async def ask(client: Redlock) -> None:
        while True:
            with contextlib.suppress(QuorumUnavailable):
                await client("another").locked()

    async with client_of(server, SHORT, patience=LIMIT) as client:
        client.subscribe(told.append)
        asking = [asyncio.create_task(ask(client)) for _ in range(20)]
        with pytest.raises(LockLost) as lost:
            async with client(name) as lease:
                server.freeze()
                async with asyncio.timeout(LIMIT):
                    await asyncio.Event().wait()
        assert lost.value.reason == "expired"
        assert any(isinstance(each, NodeDown) for each in told)
        server.thaw()
        async with asyncio.timeout(LIMIT), client(name) as again:
            assert again.fence > lease.fence
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)


async def test_a_close_does_not_wait_for_a_frozen_server(zookeepers: ZooKeepers, name: str) -> None:
    server = await asyncio.to_thread(zookeepers.start)
    client = client_of(server, SHORT)
    lease = await client(name).acquire(timeout=None)
    server.freeze()
    async with asyncio.timeout(LIMIT):
        await client.aclose()
    assert not lease.held


async def test_a_close_during_a_connect_leaves_no_thread(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody accepts the connection. The connect would go on for as long as `connect_timeout` says."""
    threads, port = set(threading.enumerate()), free_port()
    connect, connects = Handler.create_connection, threading.Event()

    def noted(handler: Handler, *args: Any, **options: Any) -> Any:
        connects.set()
        return connect(handler, *args, **options)

    monkeypatch.setattr(Handler, "create_connection", noted)
    with silent_at(port):
        client = Redlock(f"zookeeper://{SILENT}:{port}", connect_timeout=LONG)
        asking = asyncio.create_task(client(name).acquire(timeout=None))
        await until(connects.is_set)
        await client.aclose()
        await until(lambda: set(threading.enumerate()) <= threads)
        with pytest.raises(LockError):
            await asking


async def test_a_shorter_session_timeout_of_a_reconnect_ends_the_holds(zookeepers: ZooKeepers, name: str) -> None:
    """The server starts again with another maxSessionTimeout. If the connection were lost now, it would free the name
    long before the lease ends. A waiter has no place there either."""
    server = await asyncio.to_thread(zookeepers.start)
    async with client_of(server, LONG) as client, client_of(server, 3.0) as other, asyncio.timeout(2 * LIMIT):
        lease = await client(name).acquire(timeout=None)
        waiting = asyncio.create_task(client(name).acquire(timeout=None))
        server.kill()
        server.give_at_most(3.0)
        server.start()
        assert await lease.wait_lost()
        await (await other(name).acquire(timeout=None)).release()
        with pytest.raises(ConfigError, match="the servers give sessions of 3 s at most"):
            await client(f"{name}:2").acquire(timeout=0)
        waiting.cancel()
        await asyncio.wait({waiting})


async def test_the_reason_of_an_outage_is_the_last_one(zookeepers: ZooKeepers, name: str) -> None:
    """Nobody listens at first, and then a server that opens no session. Each error says what is so now."""
    server = await asyncio.to_thread(zookeepers.start)

    async def said() -> str:
        try:
            await client(name).acquire(timeout=0)
        except QuorumUnavailable as error:
            return str(error)
        return ""

    async with client_of(server, patience=0.0) as client, asyncio.timeout(2 * LIMIT):
        server.kill()
        while "refused" not in await said():
            await asyncio.sleep(0.05)
        await until(lambda: not isinstance(nodes_of(client)[0].error, Reconnecting))
        with socket.create_server((server.host, server.port)):
            while "opens no session" not in await said():
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("call", ["release", "extend", "locked", "break_lock"])
async def test_a_close_ends_the_calls_that_are_under_way(zookeeper_proxy: TcpProxy, name: str, call: str) -> None:
    """The servers carry a call out, and their answer does not come. Nobody waits for it after the close."""
    client = behind(zookeeper_proxy)
    lease = await client(name).acquire(timeout=None)
    zookeeper_proxy.hold_replies()
    asked = lease.release() if call == "release" else lease.extend() if call == "extend" else None
    asked = asked or (client(name).locked() if call == "locked" else client.break_lock(name))
    asking: asyncio.Future[object] = asyncio.ensure_future(asked)
    await until(lambda: zookeeper_proxy.held)
    async with asyncio.timeout(LIMIT):
        await client.aclose()
        with contextlib.suppress(LockError):
            await asking


@pytest.mark.parametrize("times", [1, 6])
@pytest.mark.parametrize("turn", range(1, 5))
async def test_a_program_that_cancels_all_tasks_loses_no_release(
    shared_zookeeper: ZooKeeper, name: str, turn: int, times: int
) -> None:
    """As asyncio.run does after Ctrl-C: the tasks of the library are among them. The caller of the release has its
    answer, and the node is deleted. It may do that until none is left."""
    async with client_of(shared_zookeeper) as client, client_of(shared_zookeeper) as other:
        lease = await client(name).acquire(timeout=None)
        releasing = asyncio.create_task(lease.release())
        await turns(turn)
        await cancel_all_tasks(times)
        async with asyncio.timeout(LIMIT):
            await asyncio.wait({releasing})
            await (await other(name).acquire(timeout=None)).release()


async def cancel_all_tasks(times: int) -> None:
    """But for this one, in so many turns of the loop."""
    for _ in range(times):
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)


async def test_a_program_that_cancels_all_tasks_loses_no_end_of_a_lease(shared_zookeeper: ZooKeeper, name: str) -> None:
    """The client is just deleting the node of a hold that was not extended."""
    async with client_of(shared_zookeeper, SHORT) as client, client_of(shared_zookeeper) as other:
        lease = await client(name, renew=False).acquire(timeout=None)
        with held_request(client, "delete", lambda: True) as reached:
            async with asyncio.timeout(LIMIT):
                await reached.wait()
            await cancel_all_tasks(1)
        assert not lease.held
        async with asyncio.timeout(LIMIT):
            await (await other(name).acquire(timeout=None)).release()


async def test_without_a_thread_the_next_call_connects(
    shared_zookeeper: ZooKeeper, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system gave none for the connection. The error says so."""

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with contextlib.AsyncExitStack() as stack:
        client = client_of(shared_zookeeper, patience=0.0)
        stack.push_async_callback(client.aclose)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(QuorumUnavailable, match="can't start new thread"):
                await client(name).acquire(timeout=0)
        async with asyncio.timeout(LIMIT):
            while True:
                with contextlib.suppress(QuorumUnavailable):
                    async with client(name):
                        break


async def test_a_close_without_a_thread_ends_the_session(
    shared_zookeeper: ZooKeeper, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system gives none for the close. The thread of kazoo ends, and the name is free before its lease is over."""

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    client = client_of(shared_zookeeper)
    lease = await client(name).acquire(timeout=None)
    thread = thread_of(client)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        await client.aclose()
    assert not lease.held
    await asyncio.to_thread(thread.join, LIMIT)
    assert not thread.is_alive()
    async with client_of(shared_zookeeper) as other, asyncio.timeout(SOON), other(name):
        pass


async def test_without_a_file_the_next_call_connects(
    shared_zookeeper: ZooKeeper, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has too many open files for the connection. The error says so, and no thread is left of the try."""

    def no_file() -> tuple[int, int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with contextlib.AsyncExitStack() as stack:
        client = client_of(shared_zookeeper, patience=0.0)
        stack.push_async_callback(client.aclose)
        threads = set(threading.enumerate())
        with monkeypatch.context() as patched:
            patched.setattr(os, "pipe", no_file)
            with pytest.raises(QuorumUnavailable, match="Too many open files"):
                await client(name).acquire(timeout=0)
        assert set(threading.enumerate()) <= threads
        async with asyncio.timeout(LIMIT):
            while True:
                with contextlib.suppress(QuorumUnavailable):
                    async with client(name):
                        break


async def test_a_session_shorter_than_the_lease_is_refused(zookeepers: ZooKeepers, name: str) -> None:
    """The server gives less than was asked: nobody could rely on the lease."""
    server = await asyncio.to_thread(zookeepers.start, longest=SHORT)
    client = client_of(server, 10.0)
    with pytest.raises(ConfigError, match=r"sessions of 2 s at most .* session_timeout=2 .* lease=2"):
        await client(name).acquire(timeout=None)
    assert "maxSessionTimeout" in (await client.health()).reason
    await client.aclose()


# -- the client ------------------------------------------------------------------------------------------------------

HOLDS = """
import asyncio, sys
from asynclock import LockLost, Redlock

async def main(url, name):
    async with Redlock(url, lease=2.0) as redlock:
        try:
            async with redlock(name) as lease:
                print("held", lease.fence, flush=True)
                await asyncio.Event().wait()
        except LockLost as lost:
            print("lost", lost.reason, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_b3_a_client_that_is_stopped(shared_zookeeper: ZooKeeper, name: str) -> None:
    """The session of a process that does not run expires, and another client gets the name. When the process goes on,
    it knows at once that it has lost the lock."""
    command = [sys.executable, "-c", HOLDS, shared_zookeeper.url(session_timeout=SHORT), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        held = (await asyncio.to_thread(program.stdout.readline)).split()
        os.kill(program.pid, signal.SIGSTOP)
        async with client_of(shared_zookeeper) as other, asyncio.timeout(LIMIT), other(name) as lease:
            assert lease.fence > int(held[1])
            os.kill(program.pid, signal.SIGCONT)
            assert (await asyncio.to_thread(program.stdout.readline)).split() == ["lost", "expired"]
        program.wait(LIMIT)


def gone_after(server: ZooKeeper, name: str, seconds: float, found: list[bool]) -> None:
    """Whether a name is free within that time, as another program sees it."""
    watcher = KazooClient(server.address)
    watcher.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not watcher.get_children(f"/locks/{name}"):
            found.append(True)
            break
        time.sleep(0.05)
    watcher.stop()
    watcher.close()


@pytest.mark.both_loops("the thread has to wake the loop")
async def test_b1_a_blocked_loop_does_not_keep_the_name(shared_zookeeper: ZooKeeper, name: str) -> None:
    """The threads of kazoo run on, but do not keep the session alive for a loop that does not run."""
    found: list[bool] = []
    async with client_of(shared_zookeeper, 1.0) as client:
        lease = await client(name).acquire(timeout=None)
        watching = threading.Thread(target=gone_after, args=(shared_zookeeper, name, LIMIT, found))
        watching.start()
        watching.join()  # blocks the loop
        assert found
        assert not lease.held
        async with asyncio.timeout(SOON), client(name) as again:
            assert again.fence > lease.fence


@pytest.mark.both_loops("the thread has to wake the loop")
async def test_b1_a_loop_that_is_blocked_while_it_connects(shared_zookeeper: ZooKeeper, name: str) -> None:
    """The thread of kazoo connects meanwhile. The session comes in the turn in which the time to connect is over; no op
    was sent over it for as long as it lasted."""
    client = client_of(shared_zookeeper, connect_timeout=0.5)
    asking = asyncio.create_task(client.health())
    await turns()  # the thread begins
    time.sleep(1.5)  # as a program that imports its modules
    await asking
    async with asyncio.timeout(LIMIT), client(name):
        pass
    await client.aclose()


@pytest.mark.both_loops("the thread has to wake the loop")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a5_a_thread_that_ends_by_an_error(
    shared_zookeeper: ZooKeeper, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """kazoo does not start it again by itself. The leases are lost, and the client works on with another session."""
    caplog.set_level(logging.CRITICAL, "asynclock.kazoo")
    async with client_of(shared_zookeeper, patience=LIMIT) as client:
        with pytest.raises(LockLost) as lost:
            async with asyncio.timeout(LIMIT), client(name) as lease:
                end_thread(client)
                await asyncio.Event().wait()
        assert lost.value.reason == "expired"
        async with asyncio.timeout(SHORT + LIMIT), client(f"{name}:other") as again:
            assert again.fence > lease.fence


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_thread_that_ends_twice(
    shared_zookeeper: ZooKeeper, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends again before it is connected, of which kazoo tells nothing. It is started again all the same."""
    caplog.set_level(logging.CRITICAL, "asynclock.kazoo")
    async with client_of(shared_zookeeper, SHORT, patience=LIMIT) as client:
        with pytest.raises(LockLost):
            async with asyncio.timeout(LIMIT), client(name):
                end_thread_twice(client)
                await asyncio.Event().wait()
        async with asyncio.timeout(LIMIT), client(f"{name}:other"):
            pass


def test_a_loop_that_ended_without_a_close_keeps_nothing(shared_zookeeper: ZooKeeper, name: str) -> None:
    """Its threads would keep the session alive for as long as the process lives."""
    found: list[bool] = []
    loop = asyncio.new_event_loop()
    client = client_of(shared_zookeeper, 1.0)

    async def acquire() -> tuple[Lease, threading.Thread]:
        return await client(name).acquire(timeout=None), thread_of(client)

    lease, thread = loop.run_until_complete(acquire())
    loop.close()
    gone_after(shared_zookeeper, name, LIMIT, found)
    assert found
    thread.join(LIMIT)
    assert not thread.is_alive()
    time.sleep(max(0.0, lease.remaining))  # a lease that is dropped while held warns


@pytest.mark.parametrize("how", ["asks again", "gives up"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_node_of_an_earlier_session_is_no_hold_of_this_one(
    zookeeper_proxy: TcpProxy,
    shared_zookeeper: ZooKeeper,
    name: str,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    """It was created, its reply was lost, and the thread of kazoo ended. The servers delete it when the earlier session
    ends, while this client would renew it, and another one could enter. So the client deletes it."""
    caplog.set_level(logging.CRITICAL, "asynclock.kazoo")
    async with behind(zookeeper_proxy) as client, client_of(shared_zookeeper) as other, asyncio.timeout(LIMIT):
        async with client(name):  # from now on the node of the name exists
            pass
        (node,), (earlier, _) = nodes_of(client), zookeeper_session(client) or (0, b"")
        created, begun = zookeeper_proxy.request(b"m__lock__"), time.monotonic()

        def ask(verb: Verb, number: int = 0) -> Ballot:
            op = Op(verb, MUTEX, name, f"{1:032x}|", 30.0, queueing=Queueing(number=number))
            ballot = Ballot(op, 1, begun, begun + LIMIT)
            node.send(op, ballot)
            return ballot

        zookeeper_proxy.drop_replies = True
        first = ask(ACQUIRE, number=1)
        await created.wait()
        while not (found := await connection_of(other).children(f"/locks/{name}")):
            await asyncio.sleep(0.01)
        back = asyncio.create_task(reconnected(node))
        end_thread(client)
        zookeeper_proxy.drop_replies = False
        looking = asyncio.create_task(client.inspect(name))  # it wakes the thread
        await back
        await asyncio.gather(looking, return_exceptions=True)
        await until(lambda: first.outcome is not None)
        again = ask(ACQUIRE if how == "asks again" else RELEASE, number=2)
        await until(lambda: again.outcome is not None)
        left = await connection_of(other).children(f"/locks/{name}")
        assert not {*left} & {*found}
        stats = [await connection_of(other).exists(f"/locks/{name}/{each}") for each in left]
        now, _ = zookeeper_session(client) or (0, b"")
        assert now != earlier
        assert [stat.owner for stat in stats] == ([now] if how == "asks again" else [])
        if how == "asks again":
            assert again.outcome is WON
            release = ask(RELEASE)
            await until(lambda: release.outcome is not None)


async def test_a_create_of_a_session_that_ended_meanwhile_is_no_hold(
    zookeeper_proxy: TcpProxy, shared_zookeeper: ZooKeeper, name: str
) -> None:
    """Its answer comes together with the end of the session, after which the client forgets all nodes. It does not
    count this one either."""
    async with behind(zookeeper_proxy) as client, asyncio.timeout(LIMIT):
        async with client(name):  # from now on the node of the name exists
            pass
        (node,), connection, now = nodes_of(client), connection_of(client), time.monotonic()
        created, session = zookeeper_proxy.request(b"m__lock__"), connection.session
        op = Op(ACQUIRE, MUTEX, name, f"{1:032x}|", 30.0, queueing=Queueing(number=1))
        ballot = Ballot(op, 1, now, now + LIMIT)
        zookeeper_proxy.hold_replies()
        node.send(op, ballot)
        await created.wait()
        connection.session = 0
        zookeeper_proxy.let_go()
        await until(lambda: ballot.outcome is not None)
        assert ballot.outcome is UNREACHABLE
        connection.session = session
        release = Ballot(Op(RELEASE, MUTEX, name, op.id, 30.0), 1, now, now + LIMIT)
        node.send(release.op, release)
        await until(lambda: release.outcome is not None)
        assert not await connection.children(f"/locks/{name}")
