"""Acquisitions are woken when nodes are back, or gone."""

from __future__ import annotations

import pytest

from asynclock.events import NodeDown
from asynclock.protocol.acquisition import Acquisition
from asynclock.protocol.planner import waking_time
from asynclock.rules.model import Verb
from asynclock.rules.mutex import MUTEX
from tests.support.probes import asks_again_at, in_outage
from tests.support.stepped_acquires import acquiring
from tests.support.stepped_quorum import NAME, SteppedClient, clients_over
from tests.support.stepped_waits import Waits, pass_time, sent, take_down

both = pytest.mark.parametrize("nodes", [1, 3])


def in_long_pause(nodes: int) -> tuple[SteppedClient, Acquisition]:
    """A client whose nodes are down, and its acquire, which has just begun a pause that is longer than a wake takes."""
    client, _, _ = clients_over(nodes)
    take_down(client)
    acquisition = acquiring(client)
    client.turn()
    while asks_again_at(acquisition) - client.clock.now() < 4 * waking_time(1):
        pass_time(client, 0.01)
    assert in_outage(acquisition)
    return client, acquisition


def back(client: SteppedClient) -> None:
    """The nodes can be asked again, and the last of them reports that."""
    for node in client.nodes:
        node.error = None
    client.machine.connected(False)


@both
def test_the_end_of_an_outage_wakes_it(nodes: int) -> None:
    """It asks within the time for all that are woken, at a random moment of it."""
    client, _ = in_long_pause(nodes)
    back(client)
    pass_time(client, 0.49 * waking_time(1))
    assert sent(client) == []
    pass_time(client, 0.02 * waking_time(1))
    assert sent(client) == [Verb.ACQUIRE]


@both
def test_one_that_asks_sooner_is_not_delayed(nodes: int) -> None:
    """The pause at the begin of an outage is shorter than a wake takes."""
    client, _, _ = clients_over(nodes)
    take_down(client)
    acquisition = acquiring(client)
    client.turn()
    soon = asks_again_at(acquisition)
    assert soon < client.clock.now() + 0.5 * waking_time(1)
    back(client)
    assert asks_again_at(acquisition) == soon


@both
def test_a_node_that_is_gone_in_an_outage_wakes_nobody(nodes: int) -> None:
    """The acquire knows of the outage already."""
    client, acquisition = in_long_pause(nodes)
    until = asks_again_at(acquisition)
    for node in client.nodes:
        client.machine.reported(NodeDown(node.label, "it is silent"))
    assert asks_again_at(acquisition) == until


@both
def test_the_begin_of_an_outage_wakes_one_that_waits_for_a_notice(nodes: int) -> None:
    """No notice will come, and its patience begins with its question. It renews its ticket, and does not try."""
    waits = Waits(nodes)
    for node in waits.client.nodes:
        waits.client.machine.reported(NodeDown(node.label, "it is silent"))
    waits.pass_time(waking_time(1))
    assert sent(waits.client) == [Verb.ACQUIRE if nodes == 1 else Verb.WAIT]


@both
def test_a_new_connection_that_ends_no_outage_wakes_nobody(nodes: int) -> None:
    """No notice was lost meanwhile, so the tickets need not be sent again."""
    waits = Waits(nodes)
    until = asks_again_at(waits.acquisition)
    waits.client.machine.connected(False)
    assert asks_again_at(waits.acquisition) == until


@both
def test_notices_that_may_be_lost_wake_it(nodes: int) -> None:
    """It sends its ticket again."""
    waits = Waits(nodes)
    waits.client.machine.connected(True)
    waits.pass_time(waking_time(1))
    assert sent(waits.client) == [Verb.ACQUIRE if nodes == 1 else Verb.WAIT]


@both
def test_one_that_asks_is_not_woken(nodes: int) -> None:
    """Its round is under way: the first one, or one that renews its ticket."""
    client, _, _ = clients_over(nodes)
    acquiring(client)
    waits = Waits(nodes)
    waits.pass_time(9.0)
    for each in (client, waits.client):
        each.machine.connected(True)
        for node in each.nodes:
            each.machine.reported(NodeDown(node.label, "it is silent"))
        each.machine.connected(True)
        pass_time(each, waking_time(1))
        assert len(sent(each)) == 1


def test_one_that_yields_to_remote_waiters_is_not_woken() -> None:
    """It has asked nothing yet, and asks a moment later anyway."""
    client, _, _ = clients_over(3)
    client.machine.yielded.add(MUTEX, NAME)
    acquisition = acquiring(client)
    until = asks_again_at(acquisition)
    client.machine.connected(True)
    assert asks_again_at(acquisition) == until
    assert sent(client) == []
