"""The second round of a win, which raises the counters of the nodes to its token."""

from __future__ import annotations

from dataclasses import replace

from asynclock.protocol.hold import Tenure
from asynclock.protocol.states import Confirming
from tests.support.stepped_quorum import NAME, clients_over, settle


def test_a_win_whose_second_round_is_cut_off_is_undone() -> None:
    """The next round has another id. What a majority has granted to this one would keep its own client out for a
    lease."""
    holder, waiter, servers = clients_over(3)
    first = holder.acquire()
    settle(holder, waiter)
    tenure = first.take()
    assert isinstance(tenure, Tenure)
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
