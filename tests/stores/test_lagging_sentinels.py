"""Sentinels that do not agree: some have switched to a new master, and others have not heard of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio.sentinel import Sentinel

from asynclock import Redlock
from asynclock.stores.redis.sentinel import node as sentinel_node
from tests.support.connect_probes import after_handshake
from tests.support.lagging_sentinel import LaggingSentinel
from tests.support.ports import free_port
from tests.support.probes import (
    break_connection,
    connection_of,
    in_quarantine,
    nodes_of,
    socket_of,
    switched,
)
from tests.support.servers import Servers
from tests.support.services.sentinels import Part, start_server, wait
from tests.support.waiters import LIMIT, PATIENT, until, urls_of, works


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Part, Part]]:
    """Two masters: the old one, which still answers, and the new one."""
    old, new = (start_server(free_port()) for _ in range(2))
    for each in (old, new):
        wait(each.cli().ping, "a server answers")
    yield old, new
    for each in (old, new):
        each.kill()


@pytest.fixture
def new_master() -> Iterator[Part]:
    """A server of the test's own, which no client has used."""
    found = start_server(free_port())
    wait(found.cli().ping, "a server answers")
    yield found
    found.kill()


@pytest.fixture
async def three(pair: tuple[Part, Part]) -> AsyncIterator[list[LaggingSentinel]]:
    """Three sentinels that name the old master."""
    found = [await LaggingSentinel(pair[0].port).start() for _ in range(3)]
    yield found
    for each in found:
        await each.stop()


def url_of(sentinels: list[LaggingSentinel]) -> str:
    return f"redis+sentinel://{','.join(f'127.0.0.1:{each.own_port}' for each in sentinels)}/mymaster"


def port_of(client: Redlock) -> int:
    """The port of the server to which the client is connected; 0: none."""
    connection = connection_of(nodes_of(client)[0])
    return 0 if connection is None else int(socket_of(connection).getpeername()[1])


async def test_the_greatest_epoch_counts(pair: tuple[Part, Part], three: list[LaggingSentinel], name: str) -> None:
    """Two sentinels lag: the third one has switched."""
    three[2].port, three[2].epoch = pair[1].port, 1
    async with Redlock(url_of(three)) as client:
        await works(client, name)
        assert port_of(client) == pair[1].port


async def leaves(client: Redlock, name: str, three: list[LaggingSentinel], pair: tuple[Part, Part]) -> None:
    """It works with the old master. Then a sentinel tells of a switch, and all still name that one."""
    await works(client, name)
    assert port_of(client) == pair[0].port
    await until(lambda: all(each.listeners for each in three))
    three[0].publish_switch(pair[0].port, pair[1].port)
    await until(lambda: "still name the old master" in str(nodes_of(client)[0].error))
    assert port_of(client) == 0


async def test_no_way_back(pair: tuple[Part, Part], three: list[LaggingSentinel], name: str) -> None:
    """A sentinel tells of its switch, and all still name the old master, which answers: the client has left it, and
    does not go back. It waits until one names the new master."""
    async with Redlock(url_of(three), patience=LIMIT) as client:
        await leaves(client, name, three, pair)
        three[0].port, three[0].epoch = pair[1].port, 1
        await works(client, name)
        assert port_of(client) == pair[1].port


async def test_the_way_back_in_a_greater_epoch(
    pair: tuple[Part, Part], three: list[LaggingSentinel], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentinels switch, and then back, which the client does not hear. It goes to the first master again as soon as
    one of them names it in a greater epoch than before."""
    monkeypatch.setattr(sentinel_node, "_LEFT", 600.0)
    async with Redlock(url_of(three), patience=LIMIT) as client:
        await leaves(client, name, three, pair)
        three[2].epoch = 2
        await works(client, name)
        assert port_of(client) == pair[0].port


async def test_no_way_back_in_an_epoch_that_is_known(
    pair: tuple[Part, Part], three: list[LaggingSentinel], name: str
) -> None:
    """The client has seen the sentinels name the old master in that epoch. After the switch one that lags names it so
    again: that is no newer than the switch."""
    for each in three:
        each.epoch = 3
    async with Redlock(url_of(three), patience=LIMIT) as client:
        await leaves(client, name, three, pair)
        three[1].port, three[1].epoch = pair[1].port, 4
        await works(client, name)
        assert port_of(client) == pair[1].port


async def test_a_switch_of_a_client_with_a_forced_host(
    pair: tuple[Part, Part], three: list[LaggingSentinel], name: str
) -> None:
    """`force_master_ip` is another name of the host that the sentinels tell. Their switch counts all the same."""
    old, new = pair
    sentinel = Sentinel([("127.0.0.1", each.own_port) for each in three], force_master_ip="localhost")
    async with sentinel.master_for("mymaster") as theirs, Redlock(theirs, patience=LIMIT) as client:
        await works(client, name)
        await until(lambda: all(each.listeners for each in three))
        three[0].publish_switch(old.port, new.port)
        await until(lambda: "still name the old master" in str(nodes_of(client)[0].error))
        for each in three:
            each.port, each.epoch = new.port, 1
        await works(client, name)
        assert port_of(client) == new.port


async def test_a_switch_as_the_client_has_connected(
    pair: tuple[Part, Part], three: list[LaggingSentinel], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message is read in the turn in which an attempt to connect to the old master succeeds. The client leaves that
    one, also where the sentinels tell no epoch."""
    old, new = pair
    async with Redlock(url_of(three)) as client:
        await works(client, name)
        node, told = nodes_of(client)[0], list[int]()

        def switch() -> None:
            if not told:
                told.append(new.port)
                for each in three:
                    each.port = new.port
                switched(node, ("127.0.0.1", old.port), ("127.0.0.1", new.port))

        after_handshake(node, monkeypatch, switch)
        for each in three:  # none of them tells of it
            each.hang_up()
        break_connection(connection_of(node))
        await until(lambda: told and port_of(client) == new.port)
        await works(client, name)


async def test_a_switch_that_nobody_told_of(pair: tuple[Part, Part], three: list[LaggingSentinel], name: str) -> None:
    """It happened while the client did not listen: the sentinel is asked after each subscription."""
    old, new = pair
    async with Redlock(url_of(three)) as client:
        await works(client, name)
        await until(lambda: all(each.listeners for each in three))
        three[1].port, three[1].epoch = new.port, 1
        assert port_of(client) == old.port
        three[1].hang_up()
        await until(lambda: port_of(client) == new.port)
        await works(client, name)


async def test_a_late_message(pair: tuple[Part, Part], three: list[LaggingSentinel], name: str) -> None:
    """A sentinel that lags tells of an older switch: the client stays where the greatest epoch is."""
    old, new = pair
    for each in three:
        each.port, each.epoch = new.port, 2
    async with Redlock(url_of(three)) as client:
        await works(client, name)
        before = connection_of(nodes_of(client)[0])
        await until(lambda: all(each.listeners for each in three))
        three[0].port, three[0].epoch = old.port, 1
        asked = three[0].asked
        three[0].publish_switch(free_port(), old.port)
        await until(lambda: three[0].asked > asked)
        await works(client, name)
        assert connection_of(nodes_of(client)[0]) is before


async def test_d5_a_master_that_was_promoted_again(
    new_master: Part, three: list[LaggingSentinel], servers: Servers, name: str
) -> None:
    """While the client was held, a replica was promoted, and after it the old master again: it may lack the holds of
    the time between, although it is the server that the client knows. It casts no vote. After a cut without a failover
    it would."""
    for each in three:
        each.port = new_master.port
    async with Redlock(url_of(three), *urls_of([servers.start(), servers.start()]), **PATIENT) as client:
        await works(client, name)
        node = nodes_of(client)[0]
        for epoch in (0, 2):
            for each in three:
                each.epoch = epoch
            before = connection_of(node)
            with new_master.cli() as cli:
                cli.client_kill_filter(_type="pubsub", skipme=True)
            await until(lambda: connection_of(node) not in (None, before))  # noqa: B023
            assert in_quarantine(node) == (epoch > 0)
