"""How a round and a ticket are undone: what is sent for that, where, and what is not sent again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from asynclock._options import QUORUM_TIMEOUT, RELEASE_TIMEOUT
from asynclock.rules.model import ACQUIRE, RELEASE, Entry, Serve, State
from asynclock.rules.mutex import FAIR
from tests.support.held import sent_to
from tests.support.stepped_acquires import LEASE, acquiring, holds, take_away, tenure_of, tickets, under_way, waits
from tests.support.stepped_quorum import NAME, SteppedClient, clients_over, settle

both = pytest.mark.parametrize("nodes", [1, 3])


def deadlines(client: SteppedClient) -> list[float]:
    """For how many seconds each release that is under way is waited for."""
    return [handler.deadline - handler.sent for node in client.nodes for op, handler in node.sent if op.verb is RELEASE]


def leaves_a_ticket(client: SteppedClient, lease: float) -> None:
    waits(client, lease=lease).abandon()


def undoes_a_try(client: SteppedClient, lease: float) -> None:
    acquiring(client, lease=lease, timeout=0).abandon()


@both
@pytest.mark.parametrize("leaves", [leaves_a_ticket, undoes_a_try])
@pytest.mark.parametrize(
    ("lease", "within"), [(0.2, QUORUM_TIMEOUT), (10.0, 1.0), (300.0, RELEASE_TIMEOUT)], ids=["short", "usual", "long"]
)
def test_how_long_a_release_is_waited_for(
    nodes: int, leaves: Callable[[SteppedClient, float], None], lease: float, within: float
) -> None:
    """For the node timeout of the lock, within limits: a node needs some time, and a close of the client waits."""
    client, other, _ = clients_over(nodes)
    holds(other)
    leaves(client, lease)
    assert deadlines(client) == [pytest.approx(within)] * nodes


@pytest.mark.parametrize(("nodes", "answered"), [(1, True), (1, False), (3, True)])
def test_a_withdrawal_is_sent_as_a_script(nodes: int, answered: bool) -> None:
    """The server's own compare-and-delete would leave the ticket; also the ticket of a first round at a single node,
    which may have no answer yet."""
    client, other, _ = clients_over(nodes)
    holds(other)
    waiting = waits(client) if answered else acquiring(client)
    waiting.abandon()
    (found,) = {op.queueing.contended for op in under_way(client, RELEASE)}
    assert found


@both
def test_a_withdrawal_is_kept_for_the_lease_of_the_lock(nodes: int) -> None:
    """A node that is down carries it out later. What it would remove is gone after that time."""
    client, other, _ = clients_over(nodes)
    holds(other)
    waits(client, lease=12.0).abandon()
    assert [op.lease for op in under_way(client, RELEASE)] == [12.0] * nodes


@both
def test_a_withdrawal_leaves_no_counter(nodes: int) -> None:
    """The name is taken by another program, and has no fences."""
    client, _, servers = clients_over(nodes)
    take_away(servers, None)
    waits(client).abandon()
    settle(client)
    assert [(each[NAME].fence, each[NAME].queue) for each in servers] == [(0, ())] * nodes


def test_the_last_withdrawal_of_a_client_that_closes_serves_the_queue() -> None:
    """Over several nodes the others would notify waiters of this client, which do not take the name any more."""
    client, other, _ = clients_over(3)
    holds(other)
    some = [waits(client, kind=FAIR) for _ in range(3)]
    client.machine.begin_close()
    for each in some:
        each.close()
    found = [op.queueing.serve for op, _ in client.nodes[0].sent]
    assert found == [Serve.NOBODY, Serve.NOBODY, Serve.WAKE]


def test_a_withdrawal_names_the_time_when_the_first_ticket_was_sent() -> None:
    """A node that has had no connection since then does not keep the withdrawal: nothing of it was sent there."""
    client, other, _ = clients_over(3)
    tenure = holds(other)
    client.clock.advance(1.0)
    began = client.clock.now()
    waiting = waits(client)
    for _ in range(3):
        client.clock.advance(LEASE / 3)
        settle(client, other)
    waiting.abandon()
    assert tenure.held
    assert [op.since for op in under_way(client, RELEASE)] == [began] * 3


@both
def test_a_round_that_reached_no_node_is_not_undone(nodes: int) -> None:
    """In an outage each try would leave a release for each node that is down."""
    client, _, _ = clients_over(nodes)
    for node in client.nodes:
        node.error = OSError("down")
    waiting = waits(client)
    client.clock.advance(2.0)
    settle(client)
    waiting.abandon()
    for node in client.nodes:
        node.back()
    assert not under_way(client)


@both
def test_a_round_that_may_have_reached_a_node_is_undone(nodes: int) -> None:
    """Its connection was lost, and another attempt at connecting has failed: the release follows when it is back."""
    client, _, servers = clients_over(nodes)
    waiting = acquiring(client)
    for node in client.nodes:
        node.cut()
        node.error = OSError("down")
    client.turn()
    waiting.abandon()
    for node in client.nodes:
        node.back()
    assert {op.verb for op in under_way(client)} == {RELEASE}
    settle(client)
    assert not any(each.get(NAME, State()).holds for each in servers)


def last_sent(client: SteppedClient) -> list[Any]:
    """The last op to each node that is not a release, as it would be sent again."""
    return [[handler.op for op, handler in node.sent if op.verb is not RELEASE][-1] for node in client.nodes]


@both
def test_a_try_that_was_given_up_is_not_sent_again(nodes: int) -> None:
    """A server that does not know the script answers later than the release was sent. A hold would stay there."""
    client, _, _ = clients_over(nodes)
    acquiring(client).abandon()
    assert all(op.revoked for op in last_sent(client))


def test_no_earlier_round_of_an_id_is_sent_again() -> None:
    """At a single node one release ends all rounds of a waiter."""
    client, other, _ = clients_over(1)
    holds(other)
    waiting = acquiring(client)
    rounds = last_sent(client)
    settle(client)
    client.clock.advance(LEASE / 3)
    client.turn()
    rounds += last_sent(client)
    waiting.abandon()
    assert all(op.revoked for op in rounds)


@both
def test_a_ticket_that_was_withdrawn_is_not_sent_again(nodes: int) -> None:
    """Its renewal is under way. It would stay at the head of the queue."""
    client, other, _ = clients_over(nodes)
    holds(other)
    waiting = waits(client)
    client.clock.advance(LEASE / 3)
    client.turn()
    assert not any(op.revoked or not op.queueing.number for op in last_sent(client))
    waiting.abandon()
    assert all(op.revoked or not op.queueing.number for op in last_sent(client))


def about_to_win(nodes: int = 3) -> tuple[SteppedClient, Any, list[Any]]:
    """A client whose waiter has just been notified by all nodes and tries, its waiter, and the servers."""
    client, other, servers = clients_over(nodes)
    held = holds(other)
    waiting = waits(client)
    held.hold.end(held)
    for node in other.nodes:
        node.carry_out()
    client.turn()
    assert len(under_way(client, ACQUIRE)) == nodes
    return client, waiting, servers


def test_a_ticket_whose_owner_has_won_is_not_sent_again() -> None:
    """The last node does not know the script, and says so after the others have granted."""
    client, waiting, _ = about_to_win()
    for node in client.nodes[:2]:
        node.carry_out()
    assert tenure_of(waiting).held
    (op,) = [op for op in (handler.op for _, handler in client.nodes[2].sent) if op.verb is ACQUIRE]
    assert op.queueing.number == 0


def test_a_late_grant_needs_no_withdrawal() -> None:
    """A node that grants keeps no ticket."""
    client, waiting, servers = about_to_win()
    for node in client.nodes:
        node.carry_out()
    assert tenure_of(waiting).held
    assert not under_way(client)
    assert not any(map(tickets, servers))


@pytest.mark.parametrize("refuses", [0, 2], ids=["first", "last"])
def test_a_refusal_beside_a_win_is_followed_by_a_withdrawal_there_alone(refuses: int) -> None:
    """The node that has refused keeps the ticket, whether its answer came before those that won or after them."""
    client, waiting, servers = about_to_win()
    servers[refuses][NAME] = replace(servers[refuses][NAME], holds=(Entry("another's", None),))
    for node in client.nodes:
        node.carry_out()
    tenure = tenure_of(waiting)
    assert tenure.held
    assert [node.index for node in client.nodes for op, _ in node.sent if op.verb is RELEASE] == [refuses]
    settle(client)
    assert not any(map(tickets, servers))


def test_a_try_without_a_majority_is_undone_once() -> None:
    """One node has granted it. The ticket, whose place the hold took there, is put back. When the waiter leaves, its
    ticket alone is withdrawn."""
    client, _, servers = clients_over(3)
    take_away(servers[:2], None, "a" * 32 + "|")
    waiting = waits(client)
    assert [len(tickets(each)) for each in servers] == [1] * 3
    assert not servers[2][NAME].holds
    (ticket,) = {each.id for server in servers for each in tickets(server)}
    waiting.abandon()
    assert [[op.id for op, _ in node.sent] for node in client.nodes] == [[ticket]] * 3


def test_a_renewal_without_an_answer_is_not_undone() -> None:
    """The undo would withdraw the ticket at that node."""
    client, other, servers = clients_over(3)
    holds(other)
    waits(client)
    client.clock.advance(LEASE / 3)
    client.turn()
    client.nodes[2].cut()
    settle(client, other)
    client.nodes[2].back()
    assert not under_way(client, RELEASE)
    settle(client)
    assert all(map(tickets, servers))


def test_a_waiter_without_fencing_withdraws_the_ticket_of_before_an_outage() -> None:
    """Its session keeps the ticket, as one of ZooKeeper does. In the outage it asks as if for the first time, without a
    ticket, and then it gives up."""
    client, other, servers = clients_over(1)
    client.quorum.keeps_tickets = True
    holds(other)
    waiting = waits(client, fencing=False)
    asked = sent_to(client.nodes[0])
    client.nodes[0].cut()
    while not any(op.plain for op, _ in asked):
        client.clock.advance(0.1)
        client.turn()
    assert tickets(servers[0])
    waiting.abandon()
    client.nodes[0].back()
    settle(client)
    assert not tickets(servers[0])
