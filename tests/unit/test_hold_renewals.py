"""When a hold is renewed, which votes of the nodes count for it, and what the nodes that lack it are sent."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence

import pytest

from asynclock import LockLost
from asynclock.events import Renewed
from asynclock.protocol.hold import Tenure
from asynclock.protocol.watchdog import TICK
from asynclock.quorum.ballot import Ballot
from asynclock.rules.model import ACQUIRE, EXTEND, Verb
from tests.support.held import Held, sent_to
from tests.support.stepped_acquires import LEASE, acquiring
from tests.support.stepped_quorum import NAME, settle

STRANGER = "f" * 32
"""The random part of the id of another hold."""


def loss_of(held: Held) -> LockLost:
    """The error that its owner gets."""
    error = held.tenure.error()
    assert isinstance(error, LockLost)
    return error


def times_of(held: Held, node: int, verb: Verb, seconds: float, step: float = 0.01) -> list[float]:
    """When that node is sent such an op, in seconds from now, while so many seconds pass and each op is carried out."""
    began, found = held.now, list[float]()
    for _ in range(round(seconds / step)):
        held.clock.advance(step)
        found += [held.now - began] * len(held.under_way(verb)[node])
        settle(held.client)
    return found


# -- when it is renewed ------------------------------------------------------------------------------------------------


def test_a_renewal_that_waits_in_the_queue_of_the_client_is_not_sent_twice() -> None:
    """Not even after an extension of the program has failed. Once it has been sent, and has no answer, the next one
    follows."""
    held = Held(1)
    node = held.nodes[0]
    held.clock.advance(10.0)
    [(_, renewal)] = node.sent
    assert isinstance(renewal, Ballot)
    renewal.defer(lambda: OSError("it waits"))
    held.hold.extend(LEASE)
    node.sent.reverse()
    held.fail(0)
    held.clock.advance(5.0)
    assert [handler for _, handler in node.sent] == [renewal]
    renewal.begin(held.now)
    held.clock.advance(5.0)
    assert len(node.sent) > 1


def test_a_renewal_that_failed_in_the_queue_of_the_client_is_sent_again() -> None:
    """Its node has lost its connection."""
    held = Held(1)
    held.clock.advance(10.0)
    [(_, renewal)] = held.nodes[0].sent
    assert isinstance(renewal, Ballot)
    renewal.defer(lambda: OSError("it waits"))
    held.fail(0)
    held.clock.advance(5.0)
    assert held.asked(EXTEND) == [True]


@pytest.mark.parametrize("extends", [False, True])
@pytest.mark.parametrize("renew", [False, True])
def test_it_is_renewed_when_a_third_of_its_lease_has_passed(renew: bool, extends: bool) -> None:
    """Counted from the last renewal, or from the extension of the program. With renew=False the program extends it
    alone."""
    held = Held(renew=renew)
    if extends:
        held.clock.advance(5.0)
        held.extend()
    third = LEASE / 3
    due = [pytest.approx(number * third, abs=1.0) for number in (1, 2, 3)]
    assert times_of(held, 0, EXTEND, 3.1 * third) == (due if renew else [])


@pytest.mark.parametrize("renew", [False, True])
def test_a_new_connection_renews_what_is_renewed_at_all(renew: bool) -> None:
    """The only node may have lost the hold. A lock with renew=False is left alone, and the time of a hold whose renewal
    is due sooner stays as it is."""
    held = Held(1, renew=renew)
    held.nodes[0].cut()
    held.nodes[0].back()
    held.client.turn()
    held.clock.advance(1.0)
    assert held.asked(EXTEND) == [renew]
    settle(held.client)
    before = held.hold.renew_at
    held.hold.renew_soon(math.inf if renew else held.now)
    assert held.hold.renew_at == before


def test_a_shorter_extension_takes_nothing_away() -> None:
    """At no node."""
    held = Held()
    held.extend(10 * LEASE)
    before = held.hold.valid_until
    held.extend(LEASE)
    held.extend(0.0)
    assert held.hold.valid_until == before


def test_a_hold_whose_tenure_was_collected_without_a_word_is_not_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KeyboardInterrupt as `__del__` begins is only printed. Nobody could release the hold."""
    held = Held(1)
    monkeypatch.delattr(Tenure, "__del__")
    hold = held.hold
    del held.tenure
    gc.collect()
    assert times_of(held, 0, EXTEND, LEASE) == []
    assert hold.over
    assert not held.client.machine.holds.of(NAME)


def test_the_events_of_renewals_have_their_outcome() -> None:
    """A question that asks for no lease is no renewal."""
    held = Held()
    held.extend()
    held.extend(0.0)
    held.hold.extend(LEASE)
    held.fail(0)
    held.fail(1)
    assert [(type(event), event.outcome) for event in held.listening.events] == [(Renewed, "ok"), (Renewed, "failed")]


# -- which votes count -------------------------------------------------------------------------------------------------


def test_a_refusal_after_the_end_of_its_round_ends_the_hold_at_once() -> None:
    """Two of five nodes were down at the acquire, and no majority answers the renewal. Then one of the other three
    refuses it, so the hold is left at two."""
    held = Held(5, down=[3, 4])
    held.lose_key(1)
    held.hold.extend(LEASE)
    held.client.turn()
    held.fail(0)
    held.answer(1)
    assert not held.tenure.held
    held.clock.advance(0.02)
    assert held.losses == ["expired"]


def test_a_refusal_in_an_open_round_ends_the_hold_when_it_would_have_ended_without_it() -> None:
    """One of three nodes has never had it, and another one has lost it. A grant that is still to come cannot make up
    for that any more at the end that the hold had, which is before the end of the round."""
    held = Held(down=[2], renew=False)
    held.lose_key(1)
    held.clock.block(held.tenure.ends - held.now - 1.0)
    held.hold.extend(LEASE)
    held.answer(1)
    held.clock.advance(0.9)
    assert held.losses == []
    held.clock.advance(0.1 + TICK)
    assert held.losses == ["expired"]


def test_a_late_refusal_of_the_acquire_does_not_end_a_hold_before_its_renewal_is_decided() -> None:
    """Three of five nodes have granted it, and one of them has lost it: it refuses the renewal. Of the two others, one
    has refused the acquire, and the other one has granted it: with that one, the hold is at three nodes again."""
    held = Held(5, late=[3, 4])
    held.lose_key(2)
    held.hold.extend(LEASE)
    held.answer(2)
    held.take(3)
    held.nodes[3].carry_out()
    held.clock.advance(0.1)
    held.answer(4)
    assert held.tenure.held
    held.answer(0, 1)
    assert held.tenure.held
    assert held.losses == []


def test_max_hold_ends_a_hold_with_a_late_refusal_in_time() -> None:
    """The node that refused is asked again later than that."""
    held = Held(late=[2], rtt=0.2, max_hold=0.05)
    held.take(2)
    held.answer(2)
    held.clock.advance(0.07)
    assert held.losses == ["max_hold"]


def test_a_node_that_has_it_again_no_longer_counts_as_one_that_refused() -> None:
    """It refused the program's extension, and got the hold in the second attempt after the contested win. Then another
    node loses the hold."""
    held = Held(taken=[2])
    held.extend()
    held.lose_key(2)
    held.wait(0.5, step=0.01)
    assert held.has_it() == [True, True, True]
    held.lose_key(1)
    held.hold.extend(LEASE)
    held.answer(1)
    assert held.tenure.held
    settle(held.client)
    assert held.losses == []


def test_a_node_that_was_asked_again_in_vain_counts_as_one_that_refused() -> None:
    """It refused the program's extension, and then the second attempt after the contested win. Then another node loses
    the hold: a majority has refused, and the owner learns it at once."""
    held = Held(taken=[2])
    held.extend()
    held.wait(0.5, step=0.01)
    held.lose_key(1)
    held.hold.extend(LEASE)
    held.answer(1)
    assert held.losses == ["taken"]


def test_a_node_that_is_healed_after_a_renewal_counts_from_the_next_one() -> None:
    """It may have lost more than one key. Before that, another node loses the hold."""
    held = Held()
    held.lose_key(2)
    held.extend()
    assert held.has_it() == [True, True, True]
    held.lose_key(1)
    held.hold.extend(LEASE)
    held.answer(1)
    assert not held.tenure.held
    held.answer(0, 2)
    assert held.tenure.held


def test_an_error_of_a_node_that_has_renewed_since_is_not_reported() -> None:
    """Neither of two rounds had a majority. In the second one only the last node has answered."""
    held = Held()
    for failing in [(0, 1, 2), (0, 1)]:
        held.hold.extend(LEASE)
        for node in failing:
            held.fail(node)
        held.answer(*({0, 1, 2} - {*failing}))
    held.clock.block(2 * LEASE)
    held.tenure.check_clock()
    assert {*loss_of(held).errors} == {"node 0", "node 1"}


def test_an_error_of_the_acquire_is_no_reason_of_a_loss() -> None:
    """One of three nodes failed after the acquire was granted, and no renewal has failed."""
    held = Held(late=[2], renew=False)
    held.fail(2)
    held.clock.block(2 * LEASE)
    held.tenure.check_clock()
    assert loss_of(held).errors == {}


def test_the_error_has_the_facts_of_the_moment_of_the_loss() -> None:
    """The time without a renewal counts from the last one that a majority has granted, to the loss and not to the use
    that raises the error. The errors of a node before that renewal are not of interest."""
    held = Held()
    held.hold.extend(LEASE)
    for node in (0, 1, 2):
        held.fail(node)
    held.wait(12.0)
    for node in held.nodes[1:]:
        node.cut()
    held.wait(LEASE)
    text = str(loss_of(held))
    assert "no majority of the nodes renewed it for 29.7 s" in text
    assert "is away" not in text
    held.clock.block(100.0)
    assert str(loss_of(held)) == text


def test_the_error_of_a_closed_client_has_what_the_nodes_said_before() -> None:
    """A node had failed the last renewal. That it grants the next one after the close changes nothing."""
    held = Held()
    held.hold.extend(LEASE)
    for node in (0, 1):
        held.fail(node)
    held.hold.extend(LEASE)
    held.client.machine.begin_close()
    held.client.machine.close_hold(held.hold)
    settle(held.client)
    assert {*loss_of(held).errors} == {"node 0", "node 1"}


def test_the_error_of_a_closed_client_has_what_a_node_says_later() -> None:
    """A renewal was under way as the client closed."""
    held = Held()
    held.hold.extend(LEASE)
    held.client.machine.begin_close()
    held.client.machine.close_hold(held.hold)
    held.fail(0)
    assert {*loss_of(held).errors} == {"node 0"}


def test_the_error_of_a_refused_release_has_what_each_node_said() -> None:
    """The client learns of its loss from the release only."""
    held = Held()
    held.take(0, 1, 2)
    release = held.hold.end(held.tenure)
    assert release is not None
    settle(held.client)
    error = held.hold.lost_error(release.loss_reason(), release)
    assert error.reason == "taken"
    assert [str(said) for said in error.errors.values()] == [
        f"node {node}: the name is held by a key of another program" for node in range(3)
    ]


# -- after an operator broke it ----------------------------------------------------------------------------------------


def test_a_hold_that_was_broken_at_one_node_asks_all_of_them() -> None:
    """The question asks for no lease. The others have it, so it goes on; the key that was deleted does not come back,
    and no other task gets the hold. A notice about another hold asks nothing."""
    held = Held()
    held.lose_key(2)
    held.notify(2, broken=True, id=STRANGER)
    assert held.asked(EXTEND) == [False] * 3
    held.notify(2, broken=True)
    assert [[op.lease for op in ops] for ops in held.under_way(EXTEND)] == [[0.0]] * 3
    settle(held.client)
    assert held.tenure.held
    assert held.has_it() == [True, True, False]
    assert held.listening.events == []
    acquiring(held.client)
    assert held.hold.end(held.tenure) is not None


@pytest.mark.parametrize("order", [["7|host|note", ""], ["", "7|host|note"], ["7|host|note", "", ""]])
def test_the_error_names_the_operator_that_broke_it(order: list[str]) -> None:
    """The notice that names it comes before or after the notice of the break, which asks all nodes."""
    held = Held()
    held.lose_key(0, 1, 2)
    for by in order:
        held.hold.broken(by)
    assert [len(ops) for ops in held.under_way(EXTEND)] == [order.count("")] * 3
    settle(held.client)
    assert held.losses == ["broken"]
    assert "host, pid 7 ('note') broke it" in str(loss_of(held))


def test_a_broken_hold_is_over_at_the_moment_of_its_end() -> None:
    """One of three nodes has missed the last renewal. At the moment at which the hold ends there, an operator breaks it
    at another node. The owner is told so, and not that it has expired."""
    held = Held(renew=False)
    ends = held.tenure.ends
    held.clock.block(5.0)
    held.hold.extend(LEASE)
    held.fail(2)
    held.answer(0, 1)
    held.clock.block(ends - held.now)
    assert held.tenure.held
    held.lose_key(1)
    held.notify(1, broken=True)
    held.answer(1)
    assert held.losses == ["broken"]


def test_a_break_of_a_hold_that_is_over_asks_nothing() -> None:
    """Its release is under way."""
    held = Held()
    held.hold.end(held.tenure)
    held.hold.broken()
    assert held.asked(EXTEND) == [False] * 3


# -- what the nodes that lack it are sent ------------------------------------------------------------------------------


def test_the_nodes_that_refused_a_contested_win_are_asked_after_pauses_that_double() -> None:
    """The first pause is a round trip, and only those nodes are asked."""
    held = Held(5, taken=[3, 4], rtt=0.2)
    sent = [sent_to(node) for node in held.nodes]
    assert times_of(held, 3, ACQUIRE, 7.0) == [pytest.approx(at, abs=0.1) for at in (0.2, 0.6, 1.4, 3.0, 6.2)]
    assert [len(each) for each in sent] == [0, 0, 0, 5, 5]


def test_nodes_that_lack_it_are_not_asked_after_the_first_renewal() -> None:
    """From then on a node that refuses a renewal gets the hold if the name is free there."""
    held = Held(taken=[2])
    assert times_of(held, 2, ACQUIRE, 9.0)
    held.wait(1.5)
    assert times_of(held, 2, ACQUIRE, 60.0, step=0.1) == []


def test_a_node_that_got_it_is_asked_no_more() -> None:
    """The other attempt is undone at one of two nodes, and then at the other one."""
    held = Held(5, taken=[3, 4])
    held.lose_key(3)
    held.wait(0.1, step=0.01)
    assert held.has_it() == [True, True, True, True, False]
    assert times_of(held, 3, ACQUIRE, 1.0) == []
    assert times_of(held, 0, ACQUIRE, 1.0) == []
    assert times_of(held, 4, ACQUIRE, 3.0)
    held.lose_key(4)
    held.wait(5.0)
    assert held.has_it() == [True] * 5
    assert not any(times_of(held, node, ACQUIRE, 1.0) for node in range(5))


def test_a_node_that_refuses_again_gets_nothing_else() -> None:
    """Neither a token nor another attempt before the next pause is over."""
    held = Held(taken=[2])
    sent = sent_to(held.nodes[2])
    held.wait(0.02, step=0.01)
    assert {op.verb for op, _ in sent} == {ACQUIRE}


def test_a_node_that_lacks_it_is_asked_until_the_end_of_the_hold() -> None:
    """Also a moment before."""
    held = Held(taken=[2], renew=False)
    held.clock.block(held.tenure.ends - held.now - 0.005)
    held.hold.check(held.now)
    assert held.asked(ACQUIRE) == [False, False, True]


def test_a_hold_without_fencing_is_sent_to_no_more_nodes() -> None:
    """A heal carries a token. Neither a contested win heals, nor a renewal that a node has refused."""
    held = Held(taken=[2], fencing=False)
    held.lose_key(2)
    sent = sent_to(held.nodes[2])
    held.wait(LEASE)
    assert {op.verb for op, _ in sent} == {EXTEND}
    assert held.has_it() == [True, True, False]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_a_node_that_refuses_a_renewal_gets_the_hold(order: Sequence[int]) -> None:
    """Also if the others have renewed it already."""
    held = Held()
    held.lose_key(2)
    held.hold.extend(LEASE)
    held.answer(*order)
    settle(held.client)
    assert held.has_it() == [True, True, True]


def test_a_node_gets_nothing_after_the_release() -> None:
    """Its refusal of the renewal comes late, and would show that it lacks the hold."""
    held = Held()
    held.lose_key(2)
    held.hold.extend(LEASE)
    held.answer(0, 1)
    held.hold.end(held.tenure)
    held.nodes[2].carry_out()
    assert [op.verb for op, _ in held.nodes[2].sent] == [Verb.RELEASE]
    assert held.watched == []


def test_a_node_that_refused_the_hold_gets_its_token() -> None:
    """So the next token there is greater, whoever gets it."""
    held = Held(taken=[2])
    settle(held.client)
    assert [server[NAME].fence for server in held.servers] == [held.tenure.fence] * 3


def test_a_command_to_one_node_has_as_much_time_as_one_to_all() -> None:
    """The node fails it after that."""
    held = Held(taken=[2])
    sent = sent_to(held.nodes[2])
    held.wait(0.01, step=0.01)
    assert [handler.deadline - handler.sent for _, handler in sent] == [LEASE / 10]
