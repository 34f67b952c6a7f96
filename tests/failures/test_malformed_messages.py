"""Messages of a server or another client that are neither a notice nor a reply: each costs at most a connection."""

from __future__ import annotations

import asyncio
import logging
import random

import pytest

from asynclock import QuorumUnavailable, Redlock
from asynclock.rules.model import ID_LENGTH, Notice
from asynclock.stores.redis.keys import channel
from asynclock.stores.redis.notices import notice_of
from tests.support.cancelled_waits import sent
from tests.support.default_keys import PREFIX, key_of
from tests.support.on_the_wire import notice_on_wire
from tests.support.probes import connection_of, feed, nodes_of, run_on, tag_of, unanswered
from tests.support.servers import Server
from tests.support.still_clock import idle, numbers
from tests.support.waiters import LIMIT, LONG, back, queue, until, urls_of

pytestmark = pytest.mark.both_loops("the loop has the transports")

some_nodes = pytest.mark.parametrize("nodes", [1, 3])


def junk(waiter: bytes, name: str, chance: random.Random) -> list[bytes]:
    """Messages of many kinds. None is the grant of a ticket that was ever sent."""
    key = key_of(name).encode()
    numbers = [b"", b"x", b"-", b"1.5", b"1_0", b"\xd9\xa1", b"nan", b"1e9", b"9" * 17, b"9" * 400, b"9" * 5000]
    found = [b"", b" ", b"    ", b"\x00", b"\xff\xfe", b"{}", waiter, waiter + b" 1", waiter + b" 1 0", b"x" * 100_000]
    for number in numbers:
        found += [b"%b %b 0 -1 %b" % (waiter, number, key), b"%b 1 %b -1 %b" % (waiter, number, key)]
        found += [b"%b 1 0 %b %b" % (waiter, number, key), b"%b -%b 0 -%b %b" % (waiter, number, number, key)]
    found += [b"%b 1 0 -1 \xff\xfe" % waiter, b"\xff" * 32 + b" 1 0 -1 " + key, b"f" * 32 + b" 1 0 -1 " + key]
    found += [b"%b 0 0 -2 %b" % (b"f" * 32, key), b"%b 999999999999999 5 -1 %b" % (waiter, key)]
    for _ in range(200):
        found.append(bytes(chance.choices(range(256), k=chance.randrange(80))))
        cut = bytearray(b"%b 1 0 -1 %b" % (waiter, key))
        cut[chance.randrange(len(cut))] = chance.randrange(128, 256)
        found.append(bytes(cut))
    chance.shuffle(found)
    return found


@some_nodes
async def test_junk_on_a_clients_channel_is_ignored(
    five: list[Server], name: str, nodes: int, chance: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    """A waiter's channel delivers messages that are no notices: its connections stay, each node logs one warning, and
    the waiter is served."""
    servers = five[:nodes]
    async with Redlock(*urls_of(servers), lease=LONG) as holds, Redlock(*urls_of(servers), lease=LONG) as waits:
        async with holds(name) as lease:
            waiting = asyncio.create_task(waits(name).acquire(timeout=None))
            await until(lambda: idle(waits) and all(len(queue(each, name)) == 1 for each in servers))
            before = [*map(connection_of, nodes_of(waits))]
            for server in servers:
                with server.cli() as cli:
                    for message in junk(queue(server, name)[0][:ID_LENGTH], name, chance):
                        assert cli.publish(channel(tag_of(waits)), message) == 1  # the client listens still
            await sent([waits])
            assert before == [*map(connection_of, nodes_of(waits))]
            assert [each.levelname for each in caplog.records if each.levelno >= logging.WARNING] == ["WARNING"] * nodes
            assert not waiting.done()
        async with asyncio.timeout(LIMIT), await waiting as served:
            assert served.fence > lease.fence


@pytest.mark.parametrize("number", [0, 1, 10**15])
@pytest.mark.parametrize("left", [0.0, 0.001, 3.0, 1e12])
@pytest.mark.parametrize(("broken", "continue_batch"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("name", ["x", "", "with spaces  and\nlines", "\u00fc\u4e00"])
def test_a_notice_is_parsed_as_it_was_written(
    number: int, left: float, broken: bool, continue_batch: bool, name: str
) -> None:
    """For any name. The time left is one ms more, for Redis rounds; a notice with a flag carries no time."""
    left = 0.0 if broken or continue_batch else left
    notice = Notice("0123456789abcdef" * 2, number, 2**53, left, name, broken, continue_batch)
    found = notice_of(notice_on_wire(notice, "prefix:"), "prefix:")
    assert found == notice._replace(left=pytest.approx(left + 0.001 if left else 0.0))  # type: ignore[arg-type]
    assert notice_of(notice_on_wire(notice, "other:"), "prefix:") is None


@pytest.mark.parametrize("reply", [b"*0\r\n", b">0\r\n", b",1.5\r\n", b"$1\r\nx\r\n", b"@\r\n"])
async def test_a_malformed_reply_costs_its_connection_only(server: Server, name: str, reply: bytes) -> None:
    """The commands that wait for that reply, and for those behind it, fail; the client connects again and works."""
    async with Redlock(server.url, lease=LONG) as redlock:
        await redlock.health()
        (node,) = nodes_of(redlock)
        connection = connection_of(node)
        server.freeze()
        asking = [asyncio.create_task(redlock(f"{name}:{i}").acquire(timeout=0)) for i in range(3)]
        await until(lambda: len(unanswered(connection)) == 3)
        feed(connection, reply)  # as if the server had said so
        async with asyncio.timeout(LIMIT):
            for each in asking:
                with pytest.raises(QuorumUnavailable):
                    await each
            server.thaw()
            await until(lambda: connection_of(node) not in (None, connection))
            async with redlock(name, timeout=LIMIT) as lease:
                assert lease.held


async def test_an_empty_list_is_a_reply(server: Server) -> None:
    """As that of a node of a cluster to CLUSTER SLOTS after CLUSTER RESET. It costs no connection."""
    async with Redlock(server.url) as redlock:
        await redlock.health()
        (node,) = nodes_of(redlock)
        connection = connection_of(node)
        assert await run_on(connection, "LRANGE", "no such key", "0", "-1") == []
        assert connection_of(node) is connection


async def test_a_grant_of_one_node_of_three_is_no_lock(five: list[Server], name: str) -> None:
    """A client that was set up with only one of the nodes lets the next waiter in as it releases. The waiter needs a
    majority, whatever that node notifies."""
    servers = five[:3]
    async with Redlock(*urls_of(servers), lease=LONG) as holds, Redlock(*urls_of(servers), lease=LONG) as waits:
        await back(waits)
        async with holds(name) as lease:
            waiting = asyncio.create_task(waits(name).acquire(timeout=None))
            await until(lambda: idle(waits) and all(numbers(each, name) == [1] for each in servers))
            whose = queue(servers[0], name)[0][:ID_LENGTH].decode()
            with servers[0].cli() as cli:
                forged = notice_on_wire(Notice(whose, 1, lease.fence + 1, name=name), PREFIX)
                assert cli.publish(channel(tag_of(waits)), forged) == 1
            await sent([waits, waits])
            await until(lambda: idle(waits) or waiting.done())
            assert not waiting.done()
        async with asyncio.timeout(LIMIT), await waiting as served:
            assert served.fence > lease.fence
