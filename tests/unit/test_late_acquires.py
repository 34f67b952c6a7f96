"""An acquire that a node reads late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.stepped_acquires import holds, tenure_of
from tests.support.stepped_quorum import NAME, clients_over, settle


def test_a_late_acquire_brings_no_detached_hold_back() -> None:
    """A node reads it after the adoption, which it refused. Nobody would release that hold."""
    giver, taker, servers = clients_over(3)
    acquiring = giver.acquire()
    for node in giver.nodes[:2]:
        node.carry_out()
    giver.turn()
    given = tenure_of(acquiring)
    given.hold.detach(given)
    adopting = taker.adopt(given)
    settle(taker)
    taken = tenure_of(adopting)
    settle(giver, taker)
    assert [[each.id for each in server[NAME].holds] for server in servers[:2]] == [[taken.hold.op.id]] * 2
    assert not [each for each in servers[2][NAME].holds if each.id == given.hold.op.id]


def test_a5_a_late_refusal_beside_a_refused_extend_hides_no_loss() -> None:
    """One of three nodes has another's attempt, and answers late. Another one has lost the key. A majority refuses, and
    the owner is told at once."""
    holder, other, servers = clients_over(3)
    other.acquire()
    other.nodes[2].carry_out()
    acquiring = holder.acquire()
    for node in holder.nodes[:2]:
        node.carry_out()
    holder.turn()
    tenure = tenure_of(acquiring)
    del servers[1][NAME]
    tenure.hold.extend(30.0)
    for node in holder.nodes:
        while node.sent:
            node.carry_out()
    holder.turn()
    assert holder.losses == ["taken"]
    assert not tenure.held


@pytest.mark.parametrize("ahead", [0, 10_000_000])
def test_a_late_grant_with_a_smaller_counter_raises_it(ahead: int) -> None:
    """A majority has the token. The node that grants late, with a smaller counter, gets the token, too; a node that has
    it already gets nothing."""
    earlier, holder, servers = clients_over(3)
    before = holds(earlier)
    before.hold.end(before)
    settle(earlier)
    for server in servers[:2]:
        server[NAME] = replace(server[NAME], fence=server[NAME].fence + ahead)
    acquiring = holder.acquire()
    for node in holder.nodes:
        node.carry_out()
    holder.turn()
    tenure = tenure_of(acquiring)
    assert [len(node.sent) for node in holder.nodes] == [0, 0, 1 if ahead else 0]
    settle(holder)
    assert [server[NAME].fence for server in servers] == [tenure.fence] * 3
