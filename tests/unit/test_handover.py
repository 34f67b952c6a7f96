"""Handles, and the adoption of a hold, event by event."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asynclock import ConfigError, LockError, LockNotHeld, QuorumUnavailable
from asynclock.protocol.handover import Adoption, Handle, handle_of, parse_handle
from asynclock.rules.model import ADOPT, Op
from asynclock.rules.mutex import MUTEX
from asynclock.stores.port import ReplyHandler
from tests.support.stepped_acquires import tenure_of
from tests.support.stepped_quorum import NAME, SteppedClient, clients_over, settle

LEASE = 30.0
KNOWN = Handle("order:7", "0123456789abcdef0123456789abcdef|r.1700000000000000|42|host|night run", 1700000000000001)
WRITTEN = (
    "asynclock1.v8jtnwL9WyJvcmRlcjo3IiwgIjAxMjM0NTY3ODlhYmNkZWYwMTIzNDU2Nzg5YWJjZGVmfHIuMTcwMDAwMDAwMDAwMDAwMHw0Mnxob3N0"
    "fG5pZ2h0IHJ1biIsIDE3MDAwMDAwMDAwMDAwMDFd"
)
"""What the first version that could detach wrote for KNOWN. It has no padding, so each character counts."""


# -- handles -----------------------------------------------------------------------------------------------------------


def test_a_handle_of_an_earlier_version_is_read() -> None:
    """And an earlier version reads a new handle: the programs of a fleet are not replaced at the same time."""
    assert parse_handle(WRITTEN) == KNOWN
    assert handle_of(Op(ADOPT, MUTEX, KNOWN.name, KNOWN.id, LEASE), KNOWN.token) == WRITTEN


def test_a_handle_with_a_wrong_character_is_no_handle() -> None:
    """Whichever it is. Without this, a damaged id would look as if the handle had been used already."""
    for position in range(len("asynclock1."), len(WRITTEN)):
        wrong = "B" if WRITTEN[position] == "A" else "A"
        with pytest.raises(ConfigError, match="no handle"):
            parse_handle(WRITTEN[:position] + wrong + WRITTEN[position + 1 :])


# -- an adoption -------------------------------------------------------------------------------------------------------


class Detached:
    """A hold that one client has detached, and the client that adopts it. `missed`: the giver's acquire is still on its
    way to these nodes."""

    def __init__(self, nodes: int, missed: tuple[int, ...] = ()) -> None:
        self.giver, self.taker, self.servers = clients_over(nodes)
        self.clock = self.taker.clock
        acquiring = self.giver.acquire()
        for index in set(range(nodes)) - set(missed):
            self.giver.nodes[index].carry_out()
        self.tenure = tenure_of(acquiring)
        self.tenure.hold.detach(self.tenure)
        self.giver.machine.watchdog.stop()  # its timer

    @property
    def holders(self) -> list[list[str]]:
        """For each node: the clients that have the name there, by the first letter of their ids."""
        now = self.clock.wall()
        states = [each[NAME].at(now) for each in self.servers]
        return [[hold.id[0] for hold in state.holds] for state in states]


def error_of(adoption: Adoption) -> LockError:
    """The error that its caller gets."""
    error = adoption.future.exception()
    assert isinstance(error, LockError)
    return error


def adoptions_sent(client: SteppedClient) -> int:
    """How many are on their way to the nodes."""
    return sum(op.verb is ADOPT for node in client.nodes for op, _ in node.sent)


def test_the_token_rises_though_the_counter_is_lost_and_the_clock_is_behind() -> None:
    """The server has evicted its counter, and the adopter's clock is 5 s behind the time at which the detached hold was
    acquired."""
    found = Detached(1)
    found.servers[0][NAME] = replace(found.servers[0][NAME], fence=0, fence_ends=0.0)
    found.clock.jump_wall(-5.0)
    adopting = found.taker.adopt(found.tenure)
    found.clock.jump_wall(5.0)
    settle(found.taker)
    assert tenure_of(adopting).fence > found.tenure.fence


def test_the_token_of_an_adopter_is_not_ahead_of_its_clock() -> None:
    """Else the next token after a loss of the counter, which comes from a clock, would be smaller."""
    found = Detached(1)
    adopting = found.taker.adopt(found.tenure)
    settle(found.taker)
    adopted = tenure_of(adopting)
    assert adopted.fence <= found.clock.wall() * 1_000_000 + 1
    adopted.hold.end(adopted)
    settle(found.taker)
    del found.servers[0][NAME]
    found.clock.advance(0.001)
    acquiring = found.giver.acquire()
    settle(found.giver)
    assert tenure_of(acquiring).fence > adopted.fence


def test_a_reply_after_the_client_has_begun_to_close_makes_no_hold() -> None:
    """Its holds are released by then, so a new one would stay. The caller learns that the client was closed, and the
    name is free."""
    found = Detached(3)
    adopting = found.taker.adopt(found.tenure)
    found.taker.machine.begin_close()
    settle(found.taker)
    with pytest.raises(ConfigError, match="closed"):
        raise error_of(adopting)
    assert found.holders == [[], [], []]


def test_a_grant_that_comes_too_late_is_released() -> None:
    """No validity is left when the reply comes. The hold ends at the node, and the handle is used up."""
    found = Detached(1)
    adopting = found.taker.adopt(found.tenure)
    found.clock.block(LEASE - 0.1)
    found.taker.nodes[0].carry_out()
    assert isinstance(error_of(adopting), LockNotHeld)
    assert found.holders == [["b"]]
    settle(found.taker)
    assert found.holders == [[]]


@pytest.mark.parametrize("order", [(2, 0, 1), (0, 1, 2)], ids=["refused before the win", "refused after it"])
def test_a_late_command_of_the_giver_brings_nothing_back(order: tuple[int, ...]) -> None:
    """A node has not read the giver's acquire yet when it refuses the adoption. Nobody would release what that acquire
    takes there."""
    found = Detached(3, missed=(2,))
    adopting = found.taker.adopt(found.tenure)
    for index in order:
        found.taker.nodes[index].carry_out()
    settle(found.taker)
    found.giver.nodes[2].carry_out()
    assert found.holders == [["b"], ["b"], []]
    adopted = tenure_of(adopting)
    adopted.hold.end(adopted)
    settle(found.taker)
    assert found.holders == [[], [], []]


def test_a_node_that_grants_late_gets_no_further_command() -> None:
    """The detached hold has become that of the adopter there, so nothing is left to release."""
    found = Detached(3)
    found.taker.adopt(found.tenure)
    for node in found.taker.nodes:
        node.carry_out()
    assert [node.sent for node in found.taker.nodes] == [[], [], []]


def test_the_release_reaches_a_node_of_an_earlier_round() -> None:
    """That round failed, since two connections were lost. The next one wins without one of these nodes, which reads the
    adoption of the first round afterwards."""
    found = Detached(3)
    adopting = found.taker.adopt(found.tenure)
    lost, back, _ = found.taker.nodes
    late = lost.sent[0]
    lost.cut()
    back.cut()
    back.back()
    found.clock.advance(0.1)
    settle(found.taker)
    adopted = tenure_of(adopting)
    lost.sent.append(late)
    lost.carry_out()
    assert found.holders == [["b"]] * 3
    adopted.hold.end(adopted)
    settle(found.taker)
    lost.back()
    settle(found.taker)
    assert found.holders == [[]] * 3


# -- an outage ---------------------------------------------------------------------------------------------------------


class Outage(Detached):
    """No node was within reach when the hold was to be adopted: the adoption pauses."""

    def __init__(self, nodes: int = 3) -> None:
        super().__init__(nodes)
        for node in self.taker.nodes:
            node.cut()
        self.adopting = self.taker.adopt(self.tenure)
        self.taker.turn()


def test_an_adoption_asks_again_until_a_majority_answers() -> None:
    """The nodes come back within its patience."""
    found = Outage()
    found.clock.advance(2.0)
    settle(found.taker)
    assert not found.adopting.future.done()
    for node in found.taker.nodes:
        node.back()
    found.clock.advance(0.5)
    settle(found.taker)
    assert tenure_of(found.adopting).held
    assert found.holders == [["b"]] * 3


def test_a_node_without_the_hold_and_a_silent_one_do_not_refuse_an_adoption() -> None:
    """One of three nodes has missed the hold, and one that has it is out of reach for a time."""
    found = Detached(3, missed=(2,))
    found.taker.nodes[1].cut()
    adopting = found.taker.adopt(found.tenure)
    settle(found.taker)
    assert not adopting.future.done()
    found.taker.nodes[1].back()
    found.clock.advance(0.5)
    settle(found.taker)
    assert tenure_of(adopting).held


def test_the_error_of_an_adoption_counts_the_nodes_that_refused() -> None:
    """The one that is out of reach would be no outage alone."""
    found = Detached(3, missed=(2,))
    found.taker.nodes[1].cut()
    adopting = found.taker.adopt(found.tenure)
    ends = found.clock.now() + found.taker.settings.patience + 1.0
    while found.clock.now() < ends:
        settle(found.taker)
        found.clock.advance(0.1)
    error = error_of(adopting)
    assert isinstance(error, QuorumUnavailable)
    assert "1 of 3 nodes cast no vote, and 1 refused: " in str(error)


def test_a_node_without_the_hold_refuses_an_adoption_that_needs_it() -> None:
    """One of two nodes: no majority can grant it, whatever the other one says."""
    found = Detached(2)
    del found.servers[1][NAME]
    found.taker.nodes[0].cut()
    adopting = found.taker.adopt(found.tenure)
    settle(found.taker)
    assert isinstance(error_of(adopting), LockNotHeld)


def test_an_outage_that_lasts_longer_than_the_patience_is_an_error() -> None:
    """The patience counts from the first round that failed."""
    found = Outage()
    ends = found.clock.now() + found.taker.settings.patience
    while found.clock.now() < ends - 0.1:
        assert not found.adopting.future.done()
        found.clock.advance(0.05)
        settle(found.taker)
    found.clock.advance(0.2)
    settle(found.taker)
    assert isinstance(error_of(found.adopting), QuorumUnavailable)
    assert found.clock.armed == 0


def test_an_adoption_that_is_given_up_in_a_pause_asks_no_more() -> None:
    """It leaves no timer, and no adoption follows the release that takes it back."""
    found = Outage()
    found.adopting.abandon()
    assert found.clock.armed == 0
    for node in found.taker.nodes:
        node.back()
    found.clock.advance(found.taker.settings.patience)
    assert adoptions_sent(found.taker) == 0


def test_an_adoption_asks_no_more_once_the_client_closes() -> None:
    """Its pause ends between two slices of the close, and the nodes are back. The handle is not used up: another client
    adopts the hold."""
    found = Outage()
    for node in found.taker.nodes:
        node.back()
    found.taker.machine.begin_close()
    found.clock.advance(found.taker.settings.patience)
    assert adoptions_sent(found.taker) == 0
    assert isinstance(error_of(found.adopting), ConfigError)
    adopting = found.giver.adopt(found.tenure)
    settle(found.taker, found.giver)
    assert tenure_of(adopting).held


def test_a_pending_adoption_in_a_forked_child_is_not_told_of_a_close() -> None:
    """There `closed` means that nothing is sent any more. It gets the error of the nodes, which names the fork."""
    found = Outage()
    found.taker.closed = found.taker.forked = True
    found.clock.advance(2 * found.taker.settings.patience)
    settle(found.taker)
    assert isinstance(error_of(found.adopting), QuorumUnavailable)


def test_an_error_at_the_end_of_a_pause_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of the user has a bug. The caller would wait for ever if the error ended in the timer."""
    found, bug = Outage(), RuntimeError("bug")
    broken = found.taker.nodes[0]
    send = broken.send

    def failing(op: Op, handler: ReplyHandler) -> None:
        if op.verb is ADOPT:
            raise bug
        send(op, handler)

    monkeypatch.setattr(broken, "send", failing)
    found.clock.advance(1.0)
    assert found.adopting.future.exception() is bug
    assert found.clock.armed == 0
