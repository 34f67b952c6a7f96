"""A handler of a reply is interrupted by an exception, as of a signal handler of the program, which may come at any
point. The ops of other tasks have their answers nevertheless."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asynclock import Redlock
from asynclock.rules.model import Op, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.stores.redis.connection import REPLIES
from asynclock.stores.redis.store import RedisStore
from tests.support.probes import break_connection, clock_of, connection_of, nodes_of
from tests.support.servers import Server
from tests.support.waiters import LIMIT, LONG, until, works

pytestmark = pytest.mark.both_loops("the loop calls the connection, and has the timers")


class Interrupted(BaseException):
    """What the signal handler raises."""


class Handler:
    """Of a release of nothing, with so many seconds. It counts its answers, and its failures. The first call of
    one that is interrupted counts nothing: the exception comes before its first line."""

    def __init__(self, client: Redlock, seconds: float, *, interrupted: bool = False) -> None:
        self.op = Op(Verb.RELEASE, MUTEX, "free", f"{'0' * 32}|", 30.0)
        self.sent = clock_of(client).now()
        self.deadline = self.sent + seconds
        self.answers = self.failures = 0
        self._interrupted = interrupted

    def answer(self, index: int, reply: Any) -> None:
        del index, reply
        self._interrupt()
        self.answers += 1

    def fail(self, index: int, error: Exception, *, maybe: bool) -> None:
        del index, error, maybe
        self._interrupt()
        self.failures += 1

    def _interrupt(self) -> None:
        if self._interrupted:
            self._interrupted = False
            raise Interrupted


@pytest.fixture
async def raised() -> list[Any]:
    """What the loop reports: the program goes on."""
    reported = list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context.get("exception")))
    return reported


def send(client: Redlock, handlers: list[Handler]) -> None:
    (node,) = nodes_of(client)
    for each in handlers:
        node.send(each.op, each)
    node.flush()


async def test_an_answer_that_is_handled_in_a_later_turn(server: Server, name: str, raised: list[Any]) -> None:
    """More answers have come than one turn handles. The connection is lost, and not in use for ever without reading:
    each op ends, and the next lock is had."""
    async with Redlock(server.url, lease=LONG) as client:
        await works(client, name)
        handlers = [Handler(client, LONG, interrupted=each == REPLIES + 10) for each in range(3 * REPLIES)]
        before = connection_of(nodes_of(client)[0])
        server.freeze()
        send(client, handlers)
        await asyncio.sleep(0)
        server.thaw()
        await until(lambda: all(each.answers or each.failures for each in handlers))
        assert [type(each) for each in raised] == [Interrupted]
        await works(client, name)
        assert connection_of(nodes_of(client)[0]) is not before


async def test_a_failure_at_the_loss_of_a_connection(server: Server, name: str, raised: list[Any]) -> None:
    """The ops behind it fail as well, and the client connects again."""
    async with Redlock(server.url, lease=LONG) as client:
        await works(client, name)
        server.freeze()
        handlers = [Handler(client, LONG, interrupted=each == 1) for each in range(4)]
        send(client, handlers)
        break_connection(connection_of(nodes_of(client)[0]))
        await until(lambda: all(each.failures for each in handlers))
        server.thaw()
        await works(client, name)
        assert [type(each) for each in raised] == [Interrupted]


async def test_a_failure_at_a_deadline(server: Server, name: str, raised: list[Any]) -> None:
    """The ops behind it fail at their own deadlines: the timer of the node goes on."""
    async with Redlock(server.url, lease=LONG) as client:
        await works(client, name)
        server.freeze()
        handlers = [Handler(client, 1.0 + each / 50, interrupted=each < 2) for each in range(4)]
        send(client, handlers)
        await until(lambda: all(each.failures for each in handlers))
        server.thaw()
        await works(client, name)
        assert {type(each) for each in raised} == {Interrupted}


async def test_votes_that_the_replicas_do_not_confirm(server: Server, name: str, raised: list[Any]) -> None:
    """At the loss of the connection, those behind the first one fail as well (`min_replicas`)."""
    store = RedisStore(server.url, min_replicas=1)
    async with asyncio.timeout(LIMIT):
        client = Redlock(store, lease=LONG, patience=0)
        failed, interrupted = list[Exception](), list[Exception]()

        def fails(error: Exception) -> None:
            if not interrupted:
                interrupted.append(error)
                raise Interrupted
            failed.append(error)

        with pytest.raises(Exception, match="replicas"):
            await client(name).acquire(timeout=0)
        (node,) = nodes_of(client)
        for _ in range(3):
            node.confirm(lambda: None, fails)
        before = connection_of(node)
        break_connection(before)
        await until(lambda: len(failed) == 3)
        assert [type(each) for each in raised] == [Interrupted]
        await until(lambda: connection_of(node) not in (None, before))
        await client.aclose()


async def test_each_overdue_op_fails_once(server: Server, name: str) -> None:
    """While a server stands still, many ops are overdue one after the other. Each of them is failed at its own
    deadline, and not again at those of the others: that would take all CPU of a loop with thousands of ops."""
    async with Redlock(server.url, lease=LONG) as client:
        await works(client, name)
        server.freeze()
        try:
            handlers = [Handler(client, LONG + each) for each in range(50)]
            send(client, handlers)
            connection = connection_of(nodes_of(client)[0])
            for each in handlers[:30]:
                connection.fail_overdue(each.deadline + 0.5)
            assert [each.failures for each in handlers] == [1] * 30 + [0] * 20
        finally:
            server.thaw()
