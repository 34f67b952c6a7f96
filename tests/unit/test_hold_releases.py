"""Which nodes get the release of a hold, what it says, and what a hold that is over leaves behind."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest

from asynclock import LockLost
from asynclock._options import RELEASE_TIMEOUT
from asynclock.rules.model import ACQUIRE, EXTEND, RELEASE, WAIT
from tests.support.held import OTHER, Held, sent_to, writes_of
from tests.support.stepped_acquires import LEASE, acquiring, tenure_of
from tests.support.stepped_quorum import NAME, clients_over, settle

STRANGER = "f" * 32
"""The random part of the id of another hold."""


def released(held: Held) -> list[bool]:
    """The owner releases. Of each node, whether it gets the release."""
    held.hold.end(held.tenure)
    return held.asked(RELEASE)


# -- which nodes get it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("down", [0, 1, 2])
def test_a_node_that_never_had_the_hold_gets_no_release(down: int) -> None:
    """It was down at the acquire. A node that is down would keep a pending release for each lock."""
    held = Held(down=[down])
    held.nodes[down].back()
    assert released(held) == [node != down for node in range(3)]


def test_each_node_gets_the_release_if_none_has_failed() -> None:
    """Also one that has refused the hold, or has not answered yet."""
    assert released(Held(5, taken=[3], late=[4])) == [True] * 5


def test_a_node_that_has_refused_the_hold_gets_no_release_beside_one_that_has_failed() -> None:
    """It got the token, which is no hold. The second attempt there has not begun."""
    held = Held(5, taken=[3], down=[4])
    settle(held.client)
    held.nodes[4].back()
    assert released(held) == [True, True, True, False, False]


@pytest.mark.parametrize("maybe", [False, True])
def test_a_node_that_fails_after_the_grant_gets_the_release_if_it_may_have_the_hold(maybe: bool) -> None:
    """The acquire had its majority, another node granted it late, and this one is the last to answer."""
    held = Held(5, late=[3, 4])
    held.answer(3)
    held.fail(4, maybe=maybe)
    assert released(held) == [True, True, True, True, maybe]


@pytest.mark.parametrize("by", ["a renewal", "a second attempt"])
def test_a_node_that_was_healed_gets_the_release(by: str) -> None:
    """It did not grant the acquire, and has got the hold since. A node that was down all the time gets none."""
    held = Held(5, down=[3, 4]) if by == "a renewal" else Held(5, taken=[3], down=[4])
    if by == "a renewal":
        held.nodes[3].back()
        held.extend()
    else:
        held.lose_key(3)
        held.wait(0.1, step=0.01)
    assert held.has_it() == [True, True, True, True, False]
    held.nodes[4].back()
    assert released(held) == [True, True, True, True, False]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_node_that_granted_an_earlier_round_of_an_adoption_gets_the_release(first: int) -> None:
    """The other nodes lost their connections in that round, and this node is down in the round that is won."""
    held = Held()
    giver, taker = held.client, held.client.clients[1]
    held.hold.detach(held.tenure)
    adopting = taker.adopt(held.tenure)
    taker.nodes[first].carry_out()
    rest = [node for node in taker.nodes if node.index != first]
    for node in rest:
        node.cut()
    taker.turn()
    for node in rest:
        node.back()
    taker.nodes[first].cut()
    taker.clock.advance(1.0)
    settle(giver, taker)
    adopted = tenure_of(adopting)
    taker.nodes[first].back()
    settle(giver, taker)
    adopted.hold.end(adopted)
    assert [any(op.id == adopted.hold.op.id for op, _ in node.sent) for node in taker.nodes] == [True] * 3


# -- what it says ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fencing", [False, True])
def test_a_hold_without_fencing_sends_no_token(fencing: bool) -> None:
    """Another node would store it. Also where each grant of a store has a number. Its release looks at the queue,
    because its acquire did not."""
    client, _, _ = clients_over(1)
    [node] = client.nodes
    acquisition = acquiring(client, fencing=fencing)
    [(_, handler)] = node.sent
    node.sent.clear()
    handler.answer(0, (7, False))
    tenure = tenure_of(acquisition)
    tenure.hold.extend(LEASE)
    tenure.hold.end(tenure)
    extend, release = (op for op, _ in node.sent)
    assert [extend.fence, release.fence] == [7 if fencing else 0] * 2
    assert release.queueing.looks is not fencing


@pytest.mark.parametrize("fencing", [False, True])
@pytest.mark.parametrize("nodes", [1, 3])
def test_a_release_says_that_other_clients_wait(nodes: int, fencing: bool) -> None:
    """A server has told the holder so. A notice about another hold does not count."""
    held = Held(nodes, fencing=fencing)
    held.notify(id=STRANGER)
    assert not held.hold.contended
    held.notify()
    held.notify(id=STRANGER)
    held.hold.end(held.tenure)
    assert [op.queueing.contended for ops in held.under_way(RELEASE) for op in ops] == [True] * nodes


@pytest.mark.parametrize(
    ("nodes", "waits", "late"),
    [(1, [], []), (1, [0], []), (3, [], [2]), (3, [0], [2]), (3, [2], []), (3, [2], [2]), (3, [0, 1, 2], [])],
)
def test_a_grant_says_that_other_clients_wait(nodes: int, waits: list[int], late: list[int]) -> None:
    """It entered before those that wait. One node that says so is enough, also if it says so late."""
    held = Held(nodes, waits=waits, late=late)
    held.answer(*late)
    held.hold.end(held.tenure)
    assert [op.queueing.contended for ops in held.under_way(RELEASE) for op in ops] == [bool(waits)] * nodes


@pytest.mark.parametrize(("lease", "within"), [(10.0, 1.0), (100.0, RELEASE_TIMEOUT)])
def test_a_release_is_waited_for_as_long_as_a_node_may_take(lease: float, within: float) -> None:
    """But for no longer than its caller is to wait."""
    held = Held(lease=lease)
    held.hold.end(held.tenure)
    assert [handler.deadline - held.now for node in held.nodes for _, handler in node.sent] == [within] * 3


@pytest.mark.parametrize(("before", "followed"), [("", 1), ("broken", 0), ("lost", 0), ("not done", 0)])
def test_the_marks_of_a_run_are_completed_if_it_had_the_hold_to_its_end(before: str, followed: int) -> None:
    """Else another client may have run meanwhile."""
    held = Held()
    if before != "not done":
        held.tenure.mark_done(60.0)
    if before == "broken":
        held.hold.broken()
    elif before == "lost":
        held.hold.lose("taken")
    held.hold.end(held.tenure)
    assert len(held.client.machine.holds.done_marks) == followed


@pytest.mark.parametrize("contended", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_release_that_others_wait_for_is_written_at_once(contended: bool, waits: bool) -> None:
    """Node by node, before anything else is done; where a task of this process waits, together with its attempt. Any
    other release is written at the end of the turn."""
    held = Held()
    writes = writes_of(held)
    if waits:
        acquiring(held.client)
        held.clock.block(1.0)
    if contended:
        held.notify()
    held.hold.end(held.tenure)
    sent = [RELEASE, WAIT] if waits else [RELEASE]
    assert writes == ([(node, sent) for node in range(3)] if contended else [])


# -- what it leaves behind ---------------------------------------------------------------------------------------------


def test_no_command_of_a_hold_is_sent_again_after_its_release() -> None:
    """Its acquire could bring the key back."""
    held = Held()
    assert not held.hold.op.revoked
    held.hold.end(held.tenure)
    assert held.hold.op.revoked


@pytest.mark.parametrize("order", [[0], [0, 1, 2], [2, 0, 1], [0, 2, 1]])
@pytest.mark.parametrize("refuses", [False, True])
def test_a_hold_keeps_nothing_of_its_acquire_that_it_does_not_need(order: Sequence[int], refuses: bool) -> None:
    """Each node has answered, at once or late, and none has failed. A client may have many holds, and each would keep
    the ballot and what was sent."""
    client, _, servers = clients_over(len(order))
    if refuses and len(order) > 1:
        servers[2][NAME] = OTHER
    acquisition = acquiring(client)
    ballot = client.nodes[0].sent[0][1]
    ballot.op.packed = b"as a store encodes it"
    for each in order:
        client.nodes[each].carry_out()
    client.turn()
    hold = tenure_of(acquisition).hold
    assert hold.op is ballot.op
    assert ballot.op.packed is None
    assert not any(each is hold for each in gc.get_referrers(ballot))


@pytest.mark.parametrize("ends", ["released", "detached", "lost", "expired", "dropped"])
def test_the_watchdog_forgets_a_hold_that_is_over(ends: str) -> None:
    """It has each hold once, whatever has changed the time of its next check. A hold that is over has no tenures."""
    held = Held()
    held.enter_again(max_hold=5.0)
    assert held.watched == [held.hold]
    held.wait(2 * LEASE, step=1.0)
    held.extend()
    assert held.watched == [held.hold]
    hold = held.hold
    end(held, ends)
    assert held.watched == []
    assert hold.tenures == []


def test_the_watchdog_has_a_hold_that_was_passed_on_once() -> None:
    """max_hold of its next owner is over in another tick of the watchdog."""
    held = Held()
    held.clock.block(0.008)
    waiting = held.next_owner(max_hold=2.0)
    held.clock.block(0.004)
    assert held.hold.end(held.tenure) is None
    held.tenure = tenure_of(waiting)
    assert held.watched == [held.hold]
    held.hold.end(held.tenure)
    assert held.watched == []


def test_a_check_of_a_hold_that_is_over_does_nothing() -> None:
    """The watchdog may still have it. It is neither renewed nor lost."""
    held = Held()
    held.hold.end(held.tenure)
    settle(held.client)
    held.hold.check(held.hold.renew_at)
    held.hold.check(held.hold.valid_until)
    assert held.asked(EXTEND) == [False] * 3
    assert held.losses == []
    assert held.watched == []


def test_a_hold_that_was_won_too_late_sends_nothing_but_its_release() -> None:
    """The answers of the nodes took longer than the lease. One node answers even later, and refuses."""
    client, _, servers = clients_over(3)
    acquisition = acquiring(client)
    servers[2][NAME] = OTHER
    [(acquire, _)] = client.nodes[2].sent
    client.clock.block(2 * LEASE)
    for node in client.nodes[:2]:
        node.carry_out()
    client.turn()
    client.nodes[2].carry_out()
    client.turn()
    assert not acquisition.future.done()
    assert {op.verb for node in client.nodes for op, _ in node.sent if op.id == acquire.id} == {RELEASE}


def test_a_hold_that_was_lost_is_not_passed_on() -> None:
    """Its owner releases it after the next task has got a hold of its own, for which a third task waits."""
    held = Held()
    second = held.next_owner()
    lost, tenure = held.hold, held.tenure
    held.lose_key(0, 1, 2)
    lost.lose("broken")
    settle(held.client)
    third = acquiring(held.client)
    assert tenure_of(second).held
    assert lost.end(tenure) is not None
    assert not third.future.done()


def test_a_hold_is_lost_for_the_first_reason() -> None:
    """What is found out later changes nothing."""
    held = Held()
    held.hold.lose("taken")
    held.hold.lose("expired")
    error = held.tenure.error()
    assert held.losses == ["taken"]
    assert isinstance(error, LockLost)
    assert error.reason == "taken"


def end(held: Held, how: str) -> None:
    hold = held.hold
    if how == "released":
        hold.end(held.tenure)
    elif how == "detached":
        hold.detach(held.tenure)
    elif how == "lost":
        hold.lose("taken")
    elif how == "expired":
        held.clock.block(2 * LEASE)
        hold.check(held.now)
    else:
        weak = held.tenure.weak_self
        del held.tenure
        gc.collect()
        hold.dropped(weak)


@pytest.mark.parametrize("contended", [False, True])
@pytest.mark.parametrize("ends", ["released", "detached", "lost", "dropped"])
def test_the_next_task_of_its_process_asks(ends: str, contended: bool) -> None:
    """It has waited behind the hold, which is too old to be passed on. If the release lets waiters of other clients in,
    it asks for a place behind them."""
    held = Held()
    waiting = acquiring(held.client)
    held.clock.block(1.0)
    if contended:
        held.notify()
    assert not any(node.sent for node in held.nodes)
    end(held, ends)
    assert held.asked(WAIT if contended and ends == "released" else ACQUIRE) == [True] * 3
    assert not waiting.future.done()


# -- tenures that the program drops ------------------------------------------------------------------------------------


def test_a_hold_goes_on_while_one_of_its_tenures_is_left() -> None:
    """The owner entered again, and has dropped the outer tenure."""
    held = Held()
    again = held.enter_again()
    weak, held.tenure = held.tenure.weak_self, again
    gc.collect()
    held.hold.dropped(weak)
    held.wait(2 * LEASE, step=1.0)
    assert again.held


def test_a_dropped_tenure_that_something_still_refers_to_is_not_renewed() -> None:
    """A ResourceWarning that was recorded refers to it."""
    held = Held()
    held.hold.dropped(held.tenure.weak_self)
    held.wait(2 * LEASE, step=1.0)
    assert not held.tenure.held


def test_a_late_report_of_a_dropped_tenure_wakes_nobody() -> None:
    """Its hold was lost meanwhile. Another task has the name by now, and the next one waits for that."""
    held = Held()
    hold, weak = held.hold, held.tenure.weak_self
    hold.lose("expired")
    hold.end(held.tenure)
    settle(held.client)
    first = acquiring(held.client)
    settle(held.client)
    second = tenure_of(first)
    acquiring(held.client)
    hold.dropped(weak)
    assert second.held
    assert held.asked(ACQUIRE) == [False] * 3


def test_a_heal_is_not_sent_again() -> None:
    """A release may have been sent by then."""
    held = Held(taken=[2])
    sent = sent_to(held.nodes[2])
    held.lose_key(2)
    held.wait(0.1, step=0.01)
    assert [op.revoked for op, _ in sent if op.verb is ACQUIRE] == [True]
