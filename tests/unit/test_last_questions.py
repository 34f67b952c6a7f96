"""The question shortly before the end of a waiter's time, and the late one after a loop was blocked."""

from __future__ import annotations

from typing import Any

import pytest

from asynclock import QuorumUnavailable
from asynclock.rules.model import Verb
from tests.support.stepped_acquires import acquiring, tenure_of
from tests.support.stepped_quorum import clients_over, settle
from tests.support.stepped_waits import Waits, fail, outcome_of, pass_time, refusal_of, reply, sent

TIMEOUT = 6.0
LAST = TIMEOUT / 3
"""Seconds before its end from which on an answer is new enough."""

both = pytest.mark.parametrize("nodes", [1, 3])


def renewal(nodes: int) -> Verb:
    """The question that renews a ticket: over several nodes it does not ask for the hold."""
    return Verb.ACQUIRE if nodes == 1 else Verb.WAIT


@both
def test_it_asks_once_before_its_end(nodes: int) -> None:
    """It renews its ticket. An answer that came at the very moment is new enough, so it does not ask again at its end:
    it withdraws its ticket."""
    waits = Waits(nodes, TIMEOUT)
    waits.pass_time(TIMEOUT - LAST - 0.01)
    assert sent(waits.client) == []
    waits.pass_time(0.01)
    assert sent(waits.client) == [renewal(nodes)]
    reply(waits.client)
    waits.pass_time(LAST)
    assert sent(waits.client) == [Verb.RELEASE]
    assert refusal_of(waits.acquisition).waited == TIMEOUT


@both
def test_an_answer_at_that_moment_counts_during_a_last_try(nodes: int) -> None:
    """After it a notice comes, and the try is not answered before the end. The name was held, which is no outage."""
    waits = Waits(nodes, TIMEOUT)
    waits.pass_time(TIMEOUT - LAST)
    reply(waits.client)
    waits.notify(*range(nodes))
    assert sent(waits.client) == [Verb.ACQUIRE]
    waits.pass_time(LAST)
    assert refusal_of(waits.acquisition).waited == TIMEOUT


def test_a_task_behind_the_one_that_asks_has_the_ticket_renewed() -> None:
    """The task in front does not try, since a try may split votes. Its pause is moved: at the old end of that pause it
    does not ask once more."""
    waits = Waits(3)
    behind = acquiring(waits.client, TIMEOUT)
    waits.pass_time(TIMEOUT - LAST)
    assert sent(waits.client) == []
    waits.pass_time(LAST / 4)
    assert sent(waits.client) == [Verb.WAIT]
    reply(waits.client)
    waits.pass_time(0.75 * LAST)
    refusal = refusal_of(behind)
    assert (refusal.waited, refusal.holder) == (TIMEOUT, waits.held.hold.op.id)
    waits.pass_time(TIMEOUT - LAST / 2)
    assert sent(waits.client) == []
    waits.pass_time(1.5 * LAST)
    assert sent(waits.client) == [Verb.WAIT]


def test_a_task_whose_time_is_up_leaves_the_others_in_their_order() -> None:
    """The task in front still asks, so a third task waits behind it, and asks nothing."""
    waits = Waits(1)
    behind = acquiring(waits.client, TIMEOUT)
    waits.pass_time(0.8 * TIMEOUT)
    reply(waits.client)
    waits.pass_time(0.2 * TIMEOUT)
    assert refusal_of(behind).waited == pytest.approx(TIMEOUT)
    third = acquiring(waits.client)
    assert sent(waits.client) == []
    assert third.terms.had_to_wait


def test_a_round_under_way_is_the_question_for_those_behind() -> None:
    """The task in front asks already when the time of the one behind it ends soon."""
    waits = Waits(1)
    waits.pass_time(5.5)
    behind = acquiring(waits.client, TIMEOUT)
    waits.pass_time(3.5)
    assert sent(waits.client) == [Verb.ACQUIRE]
    waits.pass_time(1.5)
    assert sent(waits.client) == [Verb.ACQUIRE]
    reply(waits.client)
    waits.pass_time(1.0)
    assert refusal_of(behind).waited == TIMEOUT


@pytest.mark.parametrize("answers", [True, False])
def test_a_blocked_loop_is_no_outage_for_a_task_behind(answers: bool) -> None:
    """The loop was blocked beyond its time. The task in front asks now, and the one behind it waits for the answer,
    for as long as a last answer may take. Without one it is an outage."""
    waits = Waits(1)
    behind = acquiring(waits.client, TIMEOUT)
    waits.clock.block(10.0)
    waits.pass_time(0.0)
    assert sent(waits.client) == [Verb.ACQUIRE]
    waits.pass_time(0.9 * LAST)
    assert outcome_of(behind) is None
    if answers:
        reply(waits.client)
        assert refusal_of(behind).waited == pytest.approx(10.0 + 0.9 * LAST)
    else:
        waits.pass_time(0.2 * LAST)
        assert isinstance(outcome_of(behind), QuorumUnavailable)


@both
def test_timeout_zero_has_waited_for_the_answer(nodes: int) -> None:
    """The seconds from its only question to the refusal."""
    holder, client, _ = clients_over(nodes)
    held = holder.acquire()
    settle(holder)
    trying = acquiring(client, 0)
    reply(client, 0.25)
    refusal = refusal_of(trying)
    assert (refusal.waited, refusal.holder) == (0.25, tenure_of(held).hold.op.id)


def test_a_node_is_told_when_the_caller_stops_waiting() -> None:
    """At the end of its time; for a late question, after the time that an answer may take."""
    waits = Waits(1, 30.0)
    waits.pass_time(9.0)
    ((_, asked),) = waits.client.nodes[0].sent
    handler: Any = asked
    assert handler.gives_up == waits.clock.now() + 21.0
    reply(waits.client)
    waits.clock.block(30.0)
    waits.pass_time(0.0)
    ((_, late),) = waits.client.nodes[0].sent
    handler = late
    assert handler.gives_up == waits.clock.now() + 3.0


def test_a_late_question_takes_no_longer_than_a_node_may_take() -> None:
    """The node timeout is shorter than a third of the timeout."""
    waits = Waits(1, 30.0)
    waits.clock.block(40.0)
    waits.pass_time(0.0)
    assert sent(waits.client) == [Verb.ACQUIRE]
    waits.pass_time(2.99)
    assert outcome_of(waits.acquisition) is None
    waits.pass_time(0.02)
    assert isinstance(outcome_of(waits.acquisition), QuorumUnavailable)


def test_an_acquire_once_more_at_the_end_of_its_time() -> None:
    """Its tenure was lost before its task woke, exactly as its time ends. It asks late, and waits for the answer."""
    client, _, _ = clients_over(1)
    first = acquiring(client, TIMEOUT)
    client.clock.block(TIMEOUT)
    client.nodes[0].carry_out()
    tenure_of(first).hold.lose("taken")
    again = first.again()
    again.start()
    pass_time(client, 0.0)
    assert outcome_of(again) is None
    settle(client)
    assert outcome_of(again) == "ended"


def test_a_task_of_this_process_had_the_name_a_moment_ago() -> None:
    """The next task asks, and has no answer at the end of its time. The name was held, which is no outage."""
    client, _, _ = clients_over(1)
    first = acquiring(client)
    settle(client)
    tenure = tenure_of(first)
    second = acquiring(client, TIMEOUT)
    pass_time(client, TIMEOUT - LAST / 2)
    tenure.hold.end(tenure)
    assert sent(client) == [Verb.RELEASE, Verb.ACQUIRE]
    pass_time(client, LAST / 2)
    assert refusal_of(second).waited == TIMEOUT


def test_a_task_that_waited_longer_than_its_patience_has_it_still() -> None:
    """Patience is for outages. It asks at last, and the node takes a moment to answer."""
    client, _, _ = clients_over(1)
    first = acquiring(client)
    settle(client)
    tenure = tenure_of(first)
    second = acquiring(client)
    pass_time(client, 2 * client.settings.patience - 1.0)
    tenure.hold.end(tenure)
    pass_time(client, 1.0)
    assert outcome_of(second) is None
    settle(client)
    assert outcome_of(second) == "ended"


def test_an_answer_before_an_outage_is_too_old_after_it() -> None:
    """Three tasks wait. The first has had an answer, has met an outage since, and is cancelled. The second is refused
    by a reply that came as its time was up. So the third asks, and has no answer at the end of its time: whether the
    name is held is unknown, though the answer before the outage would be new enough."""
    waits = Waits(1)
    client, (node,) = waits.client, waits.client.nodes
    second, third = acquiring(client, 10.0), acquiring(client, 10.2)
    pass_time(client, 7.75)
    reply(client)
    pass_time(client, 0.25)
    waits.notify(0)
    fail(client)
    waits.acquisition.abandon()
    client.clock.advance(2.0)
    while node.sent:
        node.carry_out()
    client.turn()
    assert refusal_of(second).waited == 10.0
    pass_time(client, 0.2)
    assert isinstance(outcome_of(third), QuorumUnavailable)
