"""A quorum of servers of different releases."""

from __future__ import annotations

from typing import Any

import pytest

from asynclock import Redlock
from tests.support.probes import connection_of, native_release, nodes_of, release_by, release_by_script
from tests.support.servers import Server
from tests.support.waiters import PATIENT, holder, urls_of


@pytest.mark.parametrize("without", [{0}, {1}, {2}, {0, 1}, {0, 2}, {1, 2}])
async def test_a_release_reaches_servers_with_and_without_a_command_for_it(
    five: list[Server], name: str, without: set[int]
) -> None:
    """Some servers have a compare-and-delete of their own, and others need the script: one release is packed as
    both."""
    some = five[:3]
    async with Redlock(*urls_of(some), **PATIENT) as client:
        await client.health()
        if not all(map(native_release, nodes_of(client))):
            pytest.skip("these servers have no such command")
        before = [*map(connection_of, nodes_of(client))]
        release_by_script(client, without)
        lease = await client(name).acquire(timeout=None)
        await lease.release()
        await client.health()
        assert not any(holder(server, name) for server in some)
        assert [*map(connection_of, nodes_of(client))] == before


async def test_each_server_gets_the_command_that_it_has(
    five: list[Server], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compare-and-delete of Valkey has another name than that of Redis. A release in a fleet of both is packed as
    each of them."""
    commands, first = [("DELIFEQ",), ("DELEX", "IFEQ"), ("DELIFEQ",)], dict[int, bytes]()
    some = five[:3]

    def note(connection: Any, index: int) -> None:
        send = connection.send

        def noted(wire: bytes, handler: Any) -> None:
            first.setdefault(index, wire.split(b"\r\n")[2])
            send(wire, handler)

        monkeypatch.setattr(connection, "send", noted)

    async with Redlock(*urls_of(some), **PATIENT) as client:
        await client.health()
        lease = await client(name).acquire(timeout=None)
        for index, node in enumerate(nodes_of(client)):
            release_by(node, commands[index])
            note(connection_of(node), index)
        await lease.release()
        await client.health()  # a server without the command gets the script
        assert [first[index].decode() for index in range(3)] == [command[0] for command in commands]
        assert not any(holder(server, name) for server in some)
