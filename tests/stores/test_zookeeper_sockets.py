"""The sockets that kazoo's thread gets from the handler: requests leave together, and answers are read together."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from asynclock.stores.zookeeper.handler import Handler
from tests.support.services.zookeeper import ZooKeeper
from tests.support.waiters import LIMIT, until
from tests.support.zookeeper_clients import client_of
from tests.support.zookeeper_probes import held_thread, sends_of, under_way

LARGE = bytes(range(256)) * (1 << 15)
"""8 MiB: more than the system keeps for a peer that does not read."""


@pytest.fixture
def handler() -> Handler:
    return Handler(LIMIT, LIMIT, LIMIT, lambda timeout, session: None, lambda: False)


@pytest.fixture
def ends(handler: Handler) -> Iterator[tuple[Any, socket.socket]]:
    """A socket of the handler, as kazoo uses it, and the server's end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = handler.create_connection(address=server.getsockname())
        ours.setblocking(0)
        its, _ = server.accept()
        with its:
            its.settimeout(LIMIT)
            yield ours, its
            ours.close()


def test_a_server_that_reads_slowly_gets_all(handler: Handler, ends: tuple[Any, socket.socket]) -> None:
    """The rest is sent while kazoo waits for the answer."""
    ours, its = ends
    assert ours.send(LARGE) == len(LARGE)
    assert not ours.flush()  # nobody reads yet
    read = bytearray()

    def serve() -> None:
        while len(read) < len(LARGE):
            read.extend(its.recv(1 << 16))
        its.sendall(b"done")

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    assert handler.select([ours], [], [], LIMIT)[0] == [ours]
    assert ours.recv(4) == b"done"
    serving.join(LIMIT)
    assert read == LARGE


def test_nothing_to_read_is_no_answer(handler: Handler, ends: tuple[Any, socket.socket]) -> None:
    """While the rest of a request waits for the server, too."""
    ours, _ = ends
    ours.send(LARGE)
    assert handler.select([ours], [], [], 0.01)[0] == []


def test_what_was_read_beyond_an_answer_is_the_next_one(handler: Handler, ends: tuple[Any, socket.socket]) -> None:
    """kazoo reads the length of an answer, and then the rest. Nothing else arrives that could wake it."""
    ours, its = ends
    its.sendall(b"one.two.three.")
    assert handler.select([ours], [], [], LIMIT)[0] == [ours]
    for each in (b"one.", b"two."):
        assert ours.recv(4) == each
        assert handler.select([ours], [], [], 0)[0] == [ours]
    assert ours.recv(100) == b"three."
    assert handler.select([ours], [], [], 0)[0] == []


def test_a_connection_ends_after_what_came_before(handler: Handler, ends: tuple[Any, socket.socket]) -> None:
    """The end is no part of an answer."""
    ours, its = ends
    its.sendall(b"last")
    its.close()
    for each in (b"la", b"st", b""):
        assert handler.select([ours], [], [], LIMIT)[0] == [ours]
        assert ours.recv(2) == each


def test_answers_are_read_although_the_connection_is_lost(handler: Handler, ends: tuple[Any, socket.socket]) -> None:
    """They came before. A request that cannot leave any more does not hide them."""
    ours, its = ends
    its.sendall(b"granted")
    assert handler.select([ours], [], [], LIMIT)[0] == [ours]
    ours.hang_up()
    ours.send(b"renew")
    assert handler.select([ours], [], [], LIMIT)[0] == [ours]
    assert ours.recv(7) == b"granted"


def test_a_greeting_in_parts_is_heard_once() -> None:
    """With the beginning of the next message behind it."""
    heard = list[tuple[float, int]]()
    handler = Handler(LIMIT, LIMIT, LIMIT, lambda timeout, session: heard.append((timeout, session)), lambda: False)
    greeting = struct.pack(">iiiqi16si", 36, 0, 30_000, 77, 16, bytes(16), 5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = handler.create_connection(address=server.getsockname())
        its, _ = server.accept()
        with its:
            for part in (greeting[:10], greeting[10:]):
                its.sendall(part)
                assert handler.select([ours], [], [], LIMIT)[0] == [ours]
                assert ours.recv(len(part)) == part
            its.sendall(b"more")
            assert handler.select([ours], [], [], LIMIT)[0] == [ours]
            assert ours.recv(4) == b"more"
            ours.close()
    assert heard == [(30.0, 77)]


def test_f5_a_request_that_comes_as_kazoo_begins_to_wait_is_sent(handler: Handler) -> None:
    """The byte that was to wake it is still in the pipe of an earlier request, which is being emptied."""
    bell, _ = handler.create_socket_pair()
    bell.send(b"\0")
    bell.recv(1)
    flush = bell.flush

    def late() -> bool:
        bell.send(b"\0")
        return flush()

    bell.flush = late  # type: ignore[method-assign]
    assert handler.select([bell], [], [], 0)[0] == [bell]
    bell.close()


async def test_requests_that_are_ready_leave_together(shared_zookeeper: ZooKeeper, name: str) -> None:
    """A system call for each would be most of what a busy client does."""
    async with client_of(shared_zookeeper, 60.0) as client:
        async with client(name):
            pass
        calls = sends_of(client)
        with held_thread(client):
            asking = [asyncio.create_task(client(f"{name}:{each}").acquire()) for each in range(50)]
            await until(lambda: under_way(client) == 50)
        leases = await asyncio.gather(*asking)
        assert calls[0] > 50 * len(name)  # each request has the name of its lock
        for lease in leases:
            await lease.release()
