"""Tests reach into the nodes of ZooKeeper only here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from asynclock import Redlock
from asynclock.stores.zookeeper.connection import SessionState
from asynclock.stores.zookeeper.node import ZooKeeperNode
from tests.support.probes import nodes_of


def contenders_of(client: Redlock) -> dict[str, Any]:
    """What the nodes over ZooKeeper keep beside the holds, by id."""
    nodes = (node for node in nodes_of(client) if isinstance(node, ZooKeeperNode))
    found = (each for node in nodes for each in node._contenders.values())
    return {each.id: each for each in found if not each.granted}


def zookeeper_session(client: Redlock) -> tuple[int, bytes] | None:
    """The id and the password of the session that a client has in ZooKeeper; None while it is not connected."""
    (node,) = nodes_of(client)
    found: tuple[int, bytes] | None = node._connection._client.client_id
    return found


def connection_of(client: Redlock) -> Any:
    """Its connection to the servers."""
    (node,) = nodes_of(client)
    return node._connection


def watchers_of(client: Redlock) -> int:
    """How many watchers kazoo has for a client, and how many callbacks they have beyond one each."""
    connection = connection_of(client)
    kazoo = connection._client
    known = [*kazoo._data_watchers.values(), *kazoo._child_watchers.values()]
    more = sum(max(0, len(each.callbacks) - 1) for each in connection._watches.values())
    return sum(map(len, known)) + more


def zookeeper_port(client: Redlock) -> int:
    """The port of the server to which a client is connected."""
    (node,) = nodes_of(client)
    port: int = node._connection._handler._socket.getpeername()[1]
    return port


async def seen_at(node: Any, name: str) -> list[Any]:
    """The holds and the waiters of a name at a node."""
    view = await node.probe(name)
    return [*view.holds, *view.waiters]


def change(client: Redlock, state: SessionState) -> None:
    """As if kazoo had told this state of the session."""
    (node,) = nodes_of(client)
    node._changed(state)


def expire(client: Redlock) -> None:
    """As if kazoo had told that the session has expired. The servers know nothing of that."""
    (node,) = nodes_of(client)
    node._connection.session += 1  # of the next one, which begins
    node._session_expired()


def asks(client: Redlock) -> bool:
    """Whether an op waits for the answer of the servers."""
    (node,) = nodes_of(client)
    return bool(node._ops)


def end_thread(client: Redlock) -> None:
    """The thread of kazoo meets an error that nobody expected, and ends."""
    (node,) = nodes_of(client)
    handler = node._connection._handler
    select = handler.select

    def fail(*args: Any) -> Any:
        handler.select = select
        raise RuntimeError("an error that nobody expected")

    handler.select = fail


def end_thread_twice(client: Redlock) -> None:
    """The same, and once more before the next thread is connected."""
    (node,) = nodes_of(client)
    handler = node._connection._handler
    addresses = handler.addresses

    def fail(*args: Any) -> Any:
        handler.addresses = addresses
        raise RuntimeError("another error that nobody expected")

    handler.addresses = fail
    end_thread(client)


def hang_up(client: Redlock) -> None:
    """Its connection breaks."""
    connection_of(client)._handler.hang_up()


def thread_of(client: Redlock) -> Any:
    """The thread of kazoo that has the connection."""
    (node,) = nodes_of(client)
    return node._connection._client._connection._connection_routine


@contextmanager
def held_thread(client: Redlock) -> Iterator[None]:
    """The thread of kazoo that has the connection does nothing inside, as if other threads had the processor."""
    handler = connection_of(client)._handler
    select, go_on = handler.select, threading.Event()

    def wait(*args: Any) -> Any:
        go_on.wait()
        return select(*args)

    handler.select = wait
    try:
        yield
    finally:
        handler.select = select
        go_on.set()


def sends_of(client: Redlock) -> list[int]:
    """The system calls that send from now on, as the numbers of bytes."""
    sock, calls = connection_of(client)._handler._socket, list[int]()

    class Counted:
        def __init__(self, below: Any) -> None:
            self._below = below

        def __getattr__(self, name: str) -> Any:
            return getattr(self._below, name)

        def send(self, data: bytes) -> int:
            sent: int = self._below.send(data)
            calls.append(sent)
            return sent

    sock._sock = Counted(sock._sock)
    return calls


@contextmanager
def held_request(client: Redlock, verb: str, when: Callable[[], object]) -> Iterator[asyncio.Event]:
    """The first request of that method of the connection, once `when` says so, is not sent before the end of this. The
    event is set when it is to be sent."""
    connection = connection_of(client)
    send, reached, go_on = getattr(connection, verb), asyncio.Event(), asyncio.Event()

    async def hold(*args: Any) -> Any:
        if not reached.is_set() and when():
            reached.set()
            await go_on.wait()
        return await send(*args)

    setattr(connection, verb, hold)
    try:
        yield reached
    finally:
        delattr(connection, verb)
        go_on.set()


def most_sent(*clients: Redlock) -> int:
    """How often the ticket was sent that was sent most often, of those that wait or have got a hold."""
    return max(each.number for client in clients for each in nodes_of(client)[0]._contenders.values())


def under_way(client: Redlock) -> int:
    """The requests that kazoo has, and that are not answered yet."""
    kazoo = connection_of(client)._client
    return len(kazoo._queue) + len(kazoo._pending)


def requests_of(client: Redlock) -> list[str]:
    """The requests that are sent from now on, each by its kind."""
    connection, asked = connection_of(client), list[str]()
    ask = connection._ask

    async def noted(request: Any) -> Any:
        asked.append(type(request).__name__)
        return await ask(request)

    connection._ask = noted
    return asked


def asked_by(client: Redlock) -> list[str]:
    """The requests that are not answered yet, in their order, each by its kind."""
    connection = connection_of(client)
    kazoo = connection._client
    sent = [request for request, *_ in (*kazoo._pending, *kazoo._queue)]
    waiting = [request for request, future, _ in connection._requests._waiting if not future.done()]
    return [type(request).__name__ for request in (*sent, *waiting)]


def ask(client: Redlock, request: object) -> asyncio.Future[Any]:
    """Send a request as it is."""
    answer: asyncio.Future[Any] = connection_of(client)._requests.ask(request)
    return answer


def holds_and_waits(client: Redlock) -> bool:
    """Whether a waiter for several names waits with its nodes."""
    return any(each.hold_and_wait is not None for each in contenders_of(client).values())
