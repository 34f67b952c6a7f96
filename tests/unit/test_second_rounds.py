"""The second round of a win, which raises the counters of the nodes to its token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from asynclock.protocol.acquisition import Acquisition
from asynclock.protocol.hold import Tenure
from asynclock.protocol.states import Confirming
from asynclock.rules.model import Entry, State
from tests.support.probes import in_outage
from tests.support.stepped_acquires import holds, tenure_of
from tests.support.stepped_quorum import NAME, SteppedClient, clients_over, settle


def test_a_win_whose_second_round_is_cut_off_is_undone() -> None:
    """The next round has another id. What a majority has granted to this one would keep its own client out for a
    lease."""
    holder, waiter, servers = clients_over(3)
    first = holder.acquire()
    settle(holder, waiter)
    tenure = tenure_of(first)
    second = waiter.acquire()
    settle(holder, waiter)
    for ahead, server in enumerate(servers[:2], 1):  # the counters differ
        server[NAME] = replace(server[NAME], fence=server[NAME].fence + ahead * 10_000_000)
    tenure.hold.end(tenure)
    for _ in range(3):  # the release, its notices, and the attempt of the waiter
        for node in holder.nodes:
            while node.sent:
                node.carry_out()
        holder.turn()
        waiter.turn()
    for node in waiter.nodes:
        node.carry_out()
    waiter.turn()
    assert isinstance(second.state, Confirming)
    for node in waiter.nodes[:2]:
        node.cut()
    waiter.nodes[2].carry_out()
    waiter.turn()
    for node in waiter.nodes[:2]:
        node.back()
    waiter.clock.advance(1.0)
    settle(holder, waiter)
    assert second.future.done()
    assert isinstance(second.take(), Tenure)


def won_at(servers: Sequence[dict[str, State]], client: SteppedClient) -> Acquisition:
    """An acquire that these servers have granted. Their counters differ, so its second round is under way."""
    for ahead, server in enumerate(servers):
        server[NAME] = State(fence=10**17 + ahead, fence_ends=math.inf)
    acquiring = client.acquire()
    for node in client.nodes:
        node.carry_out()
    client.turn()
    assert isinstance(acquiring.state, Confirming)
    return acquiring


@pytest.mark.parametrize("late", [False, True])
def test_a_node_that_refuses_the_second_round_does_not_count(late: bool) -> None:
    """Four of five nodes have granted, and one of them loses its data before the second round. Then another one does.
    The hold is left at two nodes, so it is over, also if that first refusal came after the end of the round."""
    holder, _, servers = clients_over(5)
    servers[0][NAME] = State(holds=(Entry("another's", None),))
    acquiring = won_at(servers[1:], holder)
    del servers[4][NAME]
    order = (1, 2, 3, 4) if late else (4, 1, 2, 3)
    for each in order:
        holder.nodes[each].carry_out()
    holder.turn()
    tenure = tenure_of(acquiring)
    assert tenure.held
    del servers[1][NAME]
    tenure.hold.extend(30.0)
    for node in holder.nodes[:4]:  # the fifth is silent
        while node.sent:
            node.carry_out()
    assert [bool(server[NAME].holds) for server in servers[1:4]] == [False, True, True]
    assert not tenure.held


def test_a_node_that_refused_the_second_round_gets_the_hold_again() -> None:
    """It is asked like each node that refused a contested win."""
    holder, _, servers = clients_over(3)
    acquiring = won_at(servers, holder)
    del servers[2][NAME]
    for each in (2, 0, 1):
        holder.nodes[each].carry_out()
    holder.turn()
    tenure = tenure_of(acquiring)
    for _ in range(10):
        holder.clock.advance(0.01)
        settle(holder)
    assert [[each.id for each in server[NAME].holds] for server in servers] == [[tenure.hold.op.id]] * 3


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_win_at_nodes_with_equal_counters_has_no_second_round(nodes: int) -> None:
    """Its token is certain. No time is spent, and nothing more is sent."""
    client, _, _ = clients_over(nodes)
    acquiring = client.acquire()
    for node in client.nodes:
        node.carry_out()
    assert isinstance(acquiring.take(), Tenure)
    assert not any(node.sent for node in client.nodes)


def test_the_second_round_has_as_much_time_as_the_first() -> None:
    """A third of it is over when the second one begins."""
    holder, _, servers = clients_over(3)
    for ahead, server in enumerate(servers):
        server[NAME] = State(fence=10**17 + ahead, fence_ends=math.inf)
    acquiring = holder.acquire()
    holder.clock.advance(1.0)
    for node in holder.nodes:
        node.carry_out()
    assert isinstance(acquiring.state, Confirming)
    assert acquiring.state.ballot.sent == holder.clock.now()
    assert acquiring.state.ballot.deadline == holder.clock.now() + 3.0


@pytest.mark.parametrize(("lost", "cut", "outage"), [((0, 1), (), False), ((0,), (1,), False), ((), (0, 1), True)])
def test_a_second_round_without_a_majority_is_an_outage_if_the_nodes_are_away(
    lost: Sequence[int], cut: Sequence[int], outage: bool
) -> None:
    """If they answer, and have lost the hold, it is a refusal. Either way what the first round won is undone, and the
    acquire goes on."""
    holder, _, servers = clients_over(3)
    acquiring = won_at(servers, holder)
    for each in lost:
        del servers[each][NAME]
    for each in cut:
        holder.nodes[each].cut()
    for node in holder.nodes:
        if node.sent:
            node.carry_out()
    holder.turn()
    assert in_outage(acquiring) is outage
    for each in cut:
        holder.nodes[each].back()
    for _ in range(10):
        settle(holder)
        holder.clock.advance(0.1)
    tenure = tenure_of(acquiring)
    assert [[each.id for each in server[NAME].holds] for server in servers] == [[tenure.hold.op.id]] * 3


def test_a_node_that_is_silent_in_the_second_round_counts_by_the_first() -> None:
    """All five nodes have granted, and three of them are asked again before the majority is there. Then two of these
    lose their data. The hold is left at three nodes."""
    holder, _, servers = clients_over(5)
    acquiring = won_at(servers, holder)
    for node in holder.nodes[:3]:
        node.carry_out()
    holder.turn()
    tenure = tenure_of(acquiring)
    for server in servers[:2]:
        del server[NAME]
    tenure.hold.extend(30.0)
    for node in holder.nodes[:3]:
        while node.sent:
            node.carry_out()
    assert tenure.held


def test_an_adoption_raises_the_counters_of_the_nodes() -> None:
    """They differ, so its token needs a second round, as that of an acquire does."""
    giver, taker, servers = clients_over(3)
    given = holds(giver)
    given.hold.detach(given)
    for ahead, server in enumerate(servers):
        server[NAME] = replace(server[NAME], fence=10**17 + ahead)
    adopting = taker.adopt(given)
    for node in taker.nodes:
        node.carry_out()
    assert isinstance(adopting.state, Confirming)
    settle(taker)
    taken = tenure_of(adopting)
    assert all(server[NAME].fence >= taken.fence for server in servers)
