"""What an acquisition does after a notice: while it pauses, and while a round is under way."""

from __future__ import annotations

import pytest

from asynclock.protocol.hold import Tenure
from asynclock.quorum.quorum import Quorum
from asynclock.rules.model import Verb
from asynclock.stores.port import Refused
from tests.support.probes import asks_again_at
from tests.support.stepped_acquires import tenure_of
from tests.support.stepped_quorum import NAME, SteppedNode
from tests.support.stepped_waits import Waits, ops, outcome_of, reply, sent

RTT = 0.02
RENEWAL = 9.0
"""Seconds after which a ticket is renewed, of a lease of 30."""


@pytest.mark.parametrize("under_way", [False, True], ids=["pauses", "asks"])
@pytest.mark.parametrize(("nodes", "heard"), [(3, 1), (5, 1), (5, 2)])
def test_notices_of_a_minority_count_a_round_trip_later(nodes: int, heard: int, under_way: bool) -> None:
    """More nodes may notify the waiter until then. Then it tries, and does not only renew its ticket."""
    waits = Waits(nodes, rtt=RTT)
    if under_way:
        waits.pass_time(RENEWAL)
        assert sent(waits.client) == [Verb.WAIT]
    waits.notify(*range(1, heard + 1))
    if under_way:
        reply(waits.client, RTT)
    waits.pass_time(0.9 * RTT)
    assert sent(waits.client) == []
    waits.pass_time(0.11 * RTT)
    assert sent(waits.client) == [Verb.ACQUIRE]


@pytest.mark.parametrize("under_way", [False, True], ids=["pauses", "asks"])
@pytest.mark.parametrize(("nodes", "heard"), [(3, 2), (5, 3)])
def test_notices_of_a_majority_count_at_once(nodes: int, heard: int, under_way: bool) -> None:
    """The waiter tries. Notices that come during a round count after its refusal."""
    waits = Waits(nodes, rtt=RTT)
    if under_way:
        waits.pass_time(RENEWAL)
    waits.notify(*range(1, heard + 1))
    if under_way:
        assert sent(waits.client) == [Verb.WAIT]
        reply(waits.client, RTT)
    assert sent(waits.client) == [Verb.ACQUIRE]


def test_notices_count_once() -> None:
    """The try that follows them is refused: the waiter waits again."""
    waits = Waits(3)
    waits.notify(0, 1)
    reply(waits.client)
    assert sent(waits.client) == []
    waits.pass_time(1.0)
    assert sent(waits.client) == []


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("left", [0.5, 5.0])
@pytest.mark.parametrize("under_way", [False, True], ids=["pauses", "asks"])
def test_a_notice_of_when_the_name_is_free(nodes: int, left: float, under_way: bool) -> None:
    """The waiter tries at that moment, and not before."""
    waits = Waits(nodes)
    if under_way:
        waits.pass_time(RENEWAL)
    waits.notify(0, left=left)
    if under_way:
        reply(waits.client)
    waits.pass_time(left - 0.01)
    assert sent(waits.client) == []
    waits.pass_time(0.02)
    assert sent(waits.client) == [Verb.ACQUIRE]


def test_notices_and_the_end_of_a_pause_in_one_turn() -> None:
    """The waiter asks once."""
    waits = Waits(3)
    waits.clock.advance(RENEWAL)
    waits.notify(0, 1)
    waits.client.turn()
    assert sent(waits.client) == [Verb.ACQUIRE]


class WritingNode(SteppedNode):
    """Notes how much was written when it had to write at once."""

    written = 0

    def flush(self) -> None:
        self.written = len(self.sent)


def test_a_try_after_a_notice_is_written_at_once() -> None:
    """The name may be free for a moment only. A single node notifies a waiter for several names so."""
    waits = Waits(1)
    client = waits.client
    (node,) = client.nodes
    node.__class__ = WritingNode
    client.quorum = Quorum(client.nodes, client.clock, client.later)  # type: ignore[arg-type]
    waits.notify(0)
    assert isinstance(node, WritingNode)
    assert node.written == 1


# -- grants of a single node -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fence", [1, 7])
def test_a_grant_while_it_pauses(fence: int) -> None:
    """The waiter has the hold. It asks nothing more, and nothing is left of it. Other clients may wait for the hold, so
    its release serves them."""
    waits = Waits(1)
    waits.notify(0, fence=fence)
    assert sent(waits.client) == []
    assert "done" in repr(waits.acquisition)
    assert not waits.client.machine.under_way
    assert waits.client.machine.tickets.all() == []
    tenure = tenure_of(waits.acquisition)
    tenure.hold.end(tenure)
    (released,) = ops(waits.client)
    assert released.verb is Verb.RELEASE
    assert released.queueing.contended


def test_a_grant_during_a_round_that_fails() -> None:
    """The ticket became the hold while it was renewed. The waiter takes it, and does not withdraw it."""
    waits = Waits(1)
    waits.pass_time(RENEWAL)
    waits.notify(0, fence=7)
    _, handler = waits.client.nodes[0].sent.pop()
    handler.fail(0, ConnectionError("it hung up"), maybe=True)
    waits.client.turn()
    assert isinstance(waits.acquisition.take(), Tenure)
    assert sent(waits.client) == []


@pytest.mark.parametrize("how", ["broken", "expired"])
def test_a_grant_that_has_ended(how: str) -> None:
    """It came during a round, and before the end of that round the node said that this hold has ended."""
    waits = Waits(1)
    waits.pass_time(RENEWAL)
    waits.notify(0, fence=7)
    waits.notify(0, **{how: True})
    _, handler = waits.client.nodes[0].sent.pop()
    handler.answer(0, Refused(5.0, "another's"))
    waits.client.turn()
    assert outcome_of(waits.acquisition) is None


def test_a_grant_that_comes_after_its_end() -> None:
    """It is released, and the next round has another id: the release may leave a tombstone of the old one."""
    waits = Waits(1)
    before = waits.servers[0][NAME].queue[0].id
    waits.clock.block(31.0)
    waits.notify(0, fence=7)
    assert sent(waits.client) == [Verb.RELEASE, Verb.ACQUIRE]
    released, asked = ops(waits.client)
    assert released.id == before
    assert asked.id != before


def test_a_grant_of_a_sending_that_is_not_known_any_more() -> None:
    """It says nothing about when the name is free, so the waiter asks when its ticket is due."""
    waits = Waits(1)
    waits.pass_time(RENEWAL)
    waits.notify(0, number=99, fence=7)
    reply(waits.client)
    assert sent(waits.client) == []
    assert asks_again_at(waits.acquisition) == waits.clock.now() + RENEWAL
    waits.pass_time(RENEWAL)
    assert sent(waits.client) == [Verb.ACQUIRE]


@pytest.mark.parametrize("continues", [True, False])
def test_the_last_of_a_batch_has_the_next_tickets_served(continues: bool) -> None:
    """Its notice says so. After its entry it sends the release of an id that nobody has used."""
    waits = Waits(1)
    waits.pass_time(RENEWAL)
    waits.notify(0, fence=7, continue_batch=continues)
    waits.notify(0, fence=7)
    _, handler = waits.client.nodes[0].sent.pop()
    handler.answer(0, Refused(5.0, "another's"))
    tenure = tenure_of(waits.acquisition)
    assert sent(waits.client) == [Verb.RELEASE] * continues
    assert all(op.id != tenure.hold.op.id for op in ops(waits.client))
