"""An acquisition whose rounds no majority answers: its patience, its ticket, and the tasks behind it."""

from __future__ import annotations

import pytest

from asynclock import QuorumUnavailable
from asynclock.protocol.acquisition import Acquisition
from asynclock.rules.model import Verb
from asynclock.rules.mutex import MUTEX
from tests.support.held import sent_to
from tests.support.probes import asks_again_at
from tests.support.stepped_acquires import acquiring, holds, tenure_of
from tests.support.stepped_quorum import NAME, SteppedClient, clients_over, settle
from tests.support.stepped_waits import Waits, fail, ops, outcome_of, pass_time, reply, sent, take_down

PATIENCE = 5.0
both = pytest.mark.parametrize("nodes", [1, 3])


def ended_within(client: SteppedClient, acquisition: Acquisition, seconds: float) -> float:
    """The seconds until it ended in an outage."""
    began = client.clock.now()
    while outcome_of(acquisition) is None:
        assert client.clock.now() < began + seconds
        pass_time(client, 0.01)
    assert isinstance(outcome_of(acquisition), QuorumUnavailable)
    return client.clock.now() - began


# -- patience --------------------------------------------------------------------------------------------------------


@both
def test_the_next_task_joins_the_outage(nodes: int) -> None:
    """It came two seconds after the first one, and has no fresh patience when that one gives up."""
    client, _, _ = clients_over(nodes)
    take_down(client)
    first = acquiring(client)
    pass_time(client, 2.0)
    second = acquiring(client)
    assert ended_within(client, first, 10.0) == pytest.approx(PATIENCE - 2.0, abs=0.02)
    assert ended_within(client, second, 10.0) == pytest.approx(2.0, abs=0.02)


@both
def test_patience_ends_during_a_round(nodes: int) -> None:
    """The nodes are connected again, and silent."""
    client, _, _ = clients_over(nodes)
    take_down(client)
    acquisition = acquiring(client)
    client.turn()
    for node in client.nodes:
        node.error = None
    assert ended_within(client, acquisition, 10.0) == pytest.approx(PATIENCE, abs=0.02)


@both
def test_it_does_not_ask_at_the_end_of_its_patience(nodes: int) -> None:
    """The last try leaves time for its reply. After it the acquire sleeps until the end."""
    client, _, _ = clients_over(nodes)
    acquisition = acquiring(client)
    began, tried = client.clock.now(), 0.0
    while outcome_of(acquisition) is None:
        if sent(client):
            tried = client.clock.now() - began
            fail(client)
        client.clock.advance(0.01)
        client.turn()
    assert sent(client) == []
    assert 0.0 < tried < PATIENCE - 0.02
    assert isinstance(outcome_of(acquisition), QuorumUnavailable)


def test_a_try_that_met_an_outage_holds_nobody_back() -> None:
    """It has no place in the local queue. The next task asks at once."""
    client, _, _ = clients_over(1)
    trying = acquiring(client, 0)
    fail(client)
    assert isinstance(outcome_of(trying), QuorumUnavailable)
    acquiring(client)
    assert sent(client) == [Verb.ACQUIRE]


# -- what is left at the nodes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps", [True, False])
def test_a_store_that_keeps_tickets_in_an_outage(keeps: bool) -> None:
    """The ticket is not withdrawn there. At another store it is: a stale ticket would delay others."""
    waits = Waits(1)
    waits.client.quorum.keeps_tickets = keeps
    waits.pass_time(9.0)
    fail(waits.client)
    assert sent(waits.client) == ([] if keeps else [Verb.RELEASE])


def test_a_first_round_is_undone_also_by_a_store_that_keeps_tickets() -> None:
    """It may have been granted, and there is no ticket yet."""
    client, _, _ = clients_over(1)
    client.quorum.keeps_tickets = True
    acquiring(client)
    (asked,) = ops(client)
    fail(client, maybe=True)
    assert [(op.verb, op.id) for op in ops(client)] == [(Verb.RELEASE, asked.id)]


def test_an_outage_ends_the_precedence_of_notified_waiters() -> None:
    """A client that had released the name first takes a ticket behind them. After an outage it tries as any other, and
    leaves no ticket."""
    client, _, _ = clients_over(3)
    client.machine.yielded.add(MUTEX, NAME)
    acquisition = acquiring(client)
    assert sent(client) == []
    pass_time(client, 0.001)
    assert sent(client) == [Verb.WAIT]
    fail(client)
    pass_time(client, asks_again_at(acquisition) - client.clock.now())
    (asked,) = [op for op in ops(client) if op.verb is not Verb.RELEASE]
    assert asked.verb is Verb.ACQUIRE
    assert asked.queueing.number == 0


def test_an_outage_has_restarted_servers_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be new, and may then vote at once."""
    client, _, _ = clients_over(3)
    judged: list[bool] = []
    monkeypatch.setattr(client, "judge_again", lambda: judged.append(True))
    acquiring(client)
    assert judged == []
    fail(client)
    assert judged == [True]


# -- connections that were lost while they were idle -----------------------------------------------------------------


def cut(client: SteppedClient, *nodes: int) -> None:
    """Their connections are lost with all that waits; the other nodes carry out what was sent."""
    for node in client.nodes:
        if node.index in nodes:
            node.cut()
        else:
            while node.sent:
                node.carry_out()
    client.turn()


def back(client: SteppedClient) -> None:
    for node in client.nodes:
        if node.error is not None:
            node.back()


def test_a_waiter_keeps_its_ticket() -> None:
    """Its renewal has failed. It withdraws nothing, and asks again once they are made again."""
    waits = Waits(3)
    waits.pass_time(9.0)
    cut(waits.client, 1, 2)
    assert [sent(waits.client, index) for index in range(3)] == [[], [], []]
    back(waits.client)
    assert [sent(waits.client, index) for index in range(3)] == [[], [], []]
    assert waits.tickets == [1, 1, 1]
    waits.pass_time(0.05)
    assert sent(waits.client) == [Verb.WAIT]


def test_the_try_of_a_waiter_is_undone() -> None:
    """A minority has granted it. The undo puts the ticket back there."""
    waits = Waits(3)
    waits.held.hold.end(waits.held)
    for node in waits.holder.nodes:
        node.carry_out()
    waits.client.turn()
    assert sent(waits.client) == [Verb.ACQUIRE]
    cut(waits.client, 1, 2)
    assert sent(waits.client) == [Verb.RELEASE]
    reply(waits.client)
    assert waits.servers[0][NAME].holds == ()
    assert waits.tickets[0] == 1


def test_a_lost_try_at_a_single_node_is_repeated_with_another_id() -> None:
    """The node may still read the lost one, so that one is undone first."""
    client, _, _ = clients_over(1)
    trying = acquiring(client, 0)
    (lost,) = ops(client)
    cut(client, 0)
    back(client)
    pass_time(client, 1.0)
    undone, again = ops(client)
    assert (undone.verb, undone.id) == (Verb.RELEASE, lost.id)
    assert again.id != lost.id
    settle(client)
    assert tenure_of(trying).held


def test_a_try_with_timeout_zero_is_undone_and_repeated() -> None:
    """A minority has granted it. It is no outage that connections were closed while they were idle."""
    client, _, servers = clients_over(3)
    trying = acquiring(client, 0)
    cut(client, 1, 2)
    assert outcome_of(trying) is None
    back(client)
    pass_time(client, 1.0)
    settle(client)
    tenure = tenure_of(trying)
    assert [[each.id for each in server[NAME].holds] for server in servers] == [[tenure.hold.op.id]] * 3


@pytest.mark.parametrize("refused_before", [False, True])
@pytest.mark.parametrize("behind", [0, 1])
def test_the_tries_of_an_outage_leave_no_releases(refused_before: bool, behind: int) -> None:
    """A node that is down keeps each release for its next connection. None of these tries has reached it. What was
    there before the outage is withdrawn once."""
    holder, client, _ = clients_over(1)
    holds(holder)
    node, asked = client.nodes[0], sent_to(client.nodes[0])
    for _ in range(1 + behind):
        acquiring(client)
    if refused_before:
        settle(client)
    node.cut()
    node.listens = False
    while sum(op.verb is Verb.ACQUIRE for op, _ in asked) < 6:
        pass_time(client, 0.1)
    assert sum(op.verb is Verb.RELEASE for op, _ in asked) == 1
