"""What a hold sends to its nodes, and how it counts their replies."""

from __future__ import annotations

import math

import pytest

from asynclock.protocol import hold as holds
from asynclock.protocol.hold import Hold, Tenure
from asynclock.protocol.watchdog import TICK, Due
from asynclock.rules.model import ACQUIRE, RELEASE, Notice, Op, State
from tests.support.held import Held
from tests.support.stepped_acquires import LEASE, acquiring, tenure_of
from tests.support.stepped_quorum import NAME, SteppedNode, clients_over, settle


def heals(held: Held, node: SteppedNode) -> list[tuple[float, float]]:
    """For each heal that is sent to the node from now on: its lease, and the rest of the hold as it is sent."""
    found, send = list[tuple[float, float]](), node.send

    def seen(op: Op, handler: object) -> None:
        if op.verb is ACQUIRE:
            found.append((op.lease, held.hold.valid_until - held.clock.now()))
        send(op, handler)  # type: ignore[arg-type]

    node.send = seen  # type: ignore[method-assign, assignment]
    return found


def test_a_heal_after_a_contested_win_lasts_as_long_as_the_hold() -> None:
    """And not longer, but for what clocks may differ. The program has extended the hold by two leases, so no renewal is
    due when the first lease would have ended. A heal with a lease of 0 or less could leave a key without expiry."""
    held = Held(taken=[2])
    sent = heals(held, held.client.nodes[2])
    held.wait(0.5)
    held.extend(2 * LEASE)
    held.wait(LEASE + 3)
    assert len(sent) > 10
    assert all(1.02 * rest + 0.01 > lease >= rest > 0 for lease, rest in sent)


def test_a_heal_after_a_renewal_lasts_as_long_as_the_hold() -> None:
    """A node loses its key after the program has extended the hold: the next renewal is due much later."""
    held = Held()
    held.extend(10 * LEASE)
    del held.servers[2][NAME]
    sent = heals(held, held.client.nodes[2])
    held.extend(LEASE)
    assert len(sent) == 1
    assert all(lease >= rest > 9 * LEASE for lease, rest in sent)


def test_no_heal_is_sent_for_a_hold_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The renewal thread may count the last refusal while the watchdog checks the hold."""
    held = Held(taken=[2])
    sent = heals(held, held.client.nodes[2])

    def overtaken(*_: float) -> Due:
        held.hold.valid_until = -math.inf
        return Due.NOTHING

    monkeypatch.setattr(holds, "due", overtaken)
    held.hold.check(held.clock.now() + 1.0)
    assert sent == []


def test_a_hold_that_the_renewal_thread_has_lost_is_checked_at_once() -> None:
    """Its node is connected again before the loop has ended it: the loss is found, and no error is raised."""
    held = Held(1)
    held.hold.valid_until = -math.inf  # as the thread does
    held.hold.renew_soon(held.clock.now() + 1.0)
    held.clock.advance(TICK)
    assert held.client.losses == ["expired"]


def test_a_grant_of_a_ticket_that_comes_too_late_does_not_block_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The event loop was blocked when the notice came. No validity is left, but the server keeps the hold for a little
    longer: the next attempt of the waiter has another id, and finds the name free."""
    holder, waiter, _ = clients_over(1)
    holding, late = acquiring(holder), list[tuple[int, Notice]]()
    settle(holder)
    waiting = waiter.acquire()
    settle(waiter)
    with monkeypatch.context() as away:
        away.setattr(waiter.machine, "received", lambda *notice: late.append(notice))
        (tenure := tenure_of(holding)).hold.end(tenure)
        settle(holder)
    waiter.clock.block(LEASE - 0.1)
    for notice in late:
        waiter.machine.received(*notice)
    settle(waiter)
    assert isinstance(waiting.take(), Tenure)


def test_a_refusal_of_a_hold_that_the_renewal_thread_has_lost_raises_nothing() -> None:
    """It is the first refusal that the loop counts, and no majority has refused: the hold has expired."""
    held = Held()
    held.lose_key(2)
    held.hold.valid_until = -math.inf  # as the thread does
    held.hold.extend(LEASE)
    held.answer(2)
    held.clock.advance(LEASE)
    assert held.losses == ["expired"]


def releases(held: Held) -> list[float]:
    """The lease of each release that is under way."""
    return [op.lease for node in held.client.nodes for op, _ in node.sent if op.verb is RELEASE]


@pytest.mark.parametrize("extensions", [(), (10 * LEASE, LEASE)])
def test_a_release_is_kept_for_the_longest_lease_that_was_asked_for(extensions: tuple[float, ...]) -> None:
    """A node that cannot be reached keeps an undelivered release for the lease that it names, and its key for the
    longest lease. A shorter extension after a longer one does not shorten it."""
    held = Held()
    for length in extensions:
        held.extend(length)
    held.hold.end(held.tenure)
    assert releases(held) == [max(LEASE, *extensions, 0.0)] * 3


def test_the_release_of_a_client_that_closes_is_kept_for_the_longest_lease() -> None:
    """Its nodes keep what they cannot deliver, too."""
    held = Held()
    held.extend(10 * LEASE)
    held.client.machine.begin_close()
    held.client.machine.close_hold(held.hold)
    assert releases(held) == [10 * LEASE] * 3


@pytest.mark.parametrize("ends", ["released", "given up"])
def test_the_release_of_an_adopted_hold_is_kept_for_the_longest_lease_of_all(ends: str) -> None:
    """A node that grants an adoption does not shorten what the detached hold had left there, which the adopter does not
    know. The same goes for an adoption that is given up."""
    held = Held()
    giver, held.client = held.client, held.client.clients[1]
    held.hold.detach(held.tenure)
    adopting = held.client.adopt(held.tenure)
    if ends == "released":
        settle(giver, held.client)
        adopted = tenure_of(adopting)
        adopted.hold.end(adopted)
    else:
        adopting.abandon()
    assert releases(held) == [held.client.settings.max_lease] * 3


def test_a_grant_counts_while_the_renewal_thread_forgets_the_errors() -> None:
    """The thread sets them to None between two lines of the loop."""
    held = Held()
    found = [{0: OSError("away")}]

    class Forgetful(Hold):
        __slots__ = ()

        @property
        def _errors(self) -> dict[int, OSError] | None:
            return found.pop() if found else None

        @_errors.setter
        def _errors(self, errors: object) -> None: ...

    held.clock.advance(1.0)
    held.hold.__class__ = Forgetful
    before = held.hold.valid_until
    held.extend(LEASE)
    assert not found
    assert held.hold.valid_until == before + 1.0


def test_a_second_refusal_in_a_round_does_not_end_the_hold_before_the_round() -> None:
    """Two of five nodes have got the hold again, and count from the next round. In that round two other nodes refuse
    first. The hold is at three nodes all the time, and their grants come 30 ms later."""
    held = Held(5)
    for each in (3, 4):
        del held.servers[each][NAME]
    held.extend(LEASE)
    for each in (0, 1):
        del held.servers[each][NAME]
    held.hold.extend(LEASE)
    for each in (0, 1):
        held.client.nodes[each].carry_out()
    held.clock.advance(0.03)
    for each in (2, 3, 4):
        held.client.nodes[each].carry_out()
    assert held.tenure.held
    assert held.client.losses == []


def test_a_hold_that_max_hold_ends_is_not_sent_to_more_nodes() -> None:
    """It was due for the nodes that refused a contested win in the same check."""
    held = Held(taken=[2])
    held.tenure.until = held.clock.now() + 0.001
    held.hold.watch()
    held.servers[2][NAME] = State()
    sent = heals(held, held.client.nodes[2])
    held.clock.block(1.0)
    held.clock.advance(0.0)
    assert held.client.losses == ["max_hold"]
    assert sent == []


def test_max_hold_ends_a_hold_before_the_end_of_a_round_with_a_refusal() -> None:
    """A refusal moves the next check to the end of its round, but not beyond max_hold."""
    held = Held()
    del held.servers[0][NAME]
    held.hold.extend(LEASE)
    held.tenure.until = held.clock.now() + 0.5
    held.client.nodes[0].carry_out()
    held.clock.advance(0.5 + TICK)
    assert held.client.losses == ["max_hold"]
