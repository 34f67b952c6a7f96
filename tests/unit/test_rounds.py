"""What the rounds of an acquire send to the nodes, and when."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import pytest

from asynclock.locks.multi import Multi
from asynclock.protocol.hold import Tenure
from asynclock.protocol.rounds import POLLED, RoundsAtOne, Wake, fresh_for
from asynclock.protocol.terms import Terms
from asynclock.quorum.ballot import WON, Ballot
from asynclock.quorum.quorum import Quorum
from asynclock.rules.model import ACQUIRE, ID_LENGTH, RELEASE, SERVED, WAIT, Notice, Op, Part, State, polls
from asynclock.rules.mutex import MUTEX
from asynclock.rules.rwlock import READ, WRITE
from asynclock.rules.semaphore import Semaphore
from asynclock.stores.port import ReplyHandler
from tests.support.stepped_acquires import LEASE, acquiring, holds, take_away, tenure_of, tickets, under_way, waits
from tests.support.stepped_quorum import NAME, SteppedClient, SteppedNode, clients_over, settle

both = pytest.mark.parametrize("nodes", [1, 3])
HOUR = 3600.0

_Node = TypeVar("_Node", bound=SteppedNode)


# -- fences ------------------------------------------------------------------------------------------------------------


@both
def test_the_first_fence_of_a_name_is_the_time_in_microseconds(nodes: int) -> None:
    """A server that has lost the counter of a name so gives a greater fence than it did before."""
    client, _, _ = clients_over(nodes)
    assert holds(client).fence == round(client.clock.wall() * 1_000_000)


@both
def test_the_fence_of_a_waiter_is_of_the_time_when_it_is_granted(nodes: int) -> None:
    """Its first try was 20 s before, and the servers have lost the counter meanwhile."""
    client, _, servers = clients_over(nodes)
    take_away(servers, client.clock.wall() + 20.0)
    waiting = waits(client)
    while not waiting.future.done():
        client.clock.advance(0.05)
        settle(client)
    assert tenure_of(waiting).fence >= (client.clock.wall() - 0.1) * 1_000_000


@both
def test_a_counter_outlives_the_lease_by_the_fence_memory(nodes: int) -> None:
    """It counts from the grant."""
    client, _, servers = clients_over(nodes)
    holds(client)
    ends = client.clock.wall() + LEASE + client.settings.fence_memory
    assert [each[NAME].fence_ends for each in servers] == [ends] * nodes


def test_a_waiter_that_leaves_makes_the_next_one_the_holder() -> None:
    """The holder has died, and its lease has ended. The counter lasts as long as after each grant."""
    client, other, servers = clients_over(1)
    take_away(servers, client.clock.wall() + 5.0)
    leaving, next_one = waits(client), waits(other)
    client.clock.block(5.0)
    leaving.abandon()
    client.nodes[0].carry_out()
    assert isinstance(next_one.take(), Tenure)
    assert servers[0][NAME].fence_ends == client.clock.wall() + LEASE + client.settings.fence_memory


@both
@pytest.mark.parametrize(("min_hold", "fences"), [(0.0, 16), (1.0, 1)])
def test_a_hold_that_is_not_passed_on_takes_one_fence(nodes: int, min_hold: float, fences: int) -> None:
    """Behind it waits another task of its process. After a min_hold that task needs a hold of its own."""
    client, _, _ = clients_over(nodes)
    first = holds(client)
    second, _ = acquiring(client, min_hold=min_hold), acquiring(client, min_hold=min_hold)
    first.hold.end(first)
    settle(client)
    tenure = tenure_of(second)
    assert tenure.hold.last_fence - tenure.fence + 1 == fences


# -- when an op leaves -------------------------------------------------------------------------------------------------


class Buffered(SteppedNode):
    """It writes the ops of a turn of the loop together, unless it is told to write now."""

    written: Op | None = None  # the last op that was written before the end of its turn

    def flush(self) -> None:
        self.written = self.sent[-1][0]


def equipped(client: SteppedClient, servers: list[dict[str, State]], made_as: type[_Node]) -> list[_Node]:
    """The client has such nodes from now on."""
    nodes = [made_as(index, client, each) for index, each in enumerate(servers)]
    client.nodes = list(nodes)
    client.quorum = Quorum(nodes, client.clock, client.later)  # type: ignore[arg-type]
    return nodes


def left(nodes: list[Buffered]) -> bool:
    """Whether the last op to each node was written at once."""
    (written,) = {node.sent[-1][0] is node.written for node in nodes}
    return written


def carry_out(client: SteppedClient) -> None:
    """The ops that wait at each node now."""
    for node in client.nodes:
        for _ in list(node.sent):
            node.carry_out()


@both
def test_a_try_after_a_refusal_leaves_at_once(nodes: int) -> None:
    """The name may be free for a moment only. A first try leaves at the end of the turn, with other ops."""
    client, _, servers = clients_over(nodes)
    take_away(servers, None)
    some = equipped(client, servers, Buffered)
    acquiring(client)
    assert not left(some)
    carry_out(client)
    if nodes > 1:  # the first round left no ticket
        assert left(some[:2])
        carry_out(client)
    client.turn()
    client.clock.advance(0.3)  # the holder notifies nobody, so the first waiter polls
    client.turn()
    assert left(some)


@both
def test_the_renewal_of_a_ticket_leaves_at_the_end_of_the_turn(nodes: int) -> None:
    """The name is held: nothing is gained by a write of its own."""
    client, other, servers = clients_over(nodes)
    holds(other)
    some = equipped(client, servers, Buffered)
    waits(client)
    client.clock.advance(LEASE / 3)
    client.turn()
    assert not left(some)


# -- tickets -----------------------------------------------------------------------------------------------------------


@both
def test_a_ticket_is_not_served_after_its_owner_has_given_up(nodes: int) -> None:
    """Neither the first one, nor its renewal shortly before the end."""
    client, other, servers = clients_over(nodes)
    holds(other)
    ends = client.clock.wall() + 6.0
    waits(client, timeout=6.0)
    for number in (1, 2):
        found = [ticket for each in servers for ticket in tickets(each)]
        assert len(found) == nodes
        assert all(ticket.fresh == pytest.approx(ends, abs=1e-3) for ticket in found)
        assert {ticket.number for ticket in found} == {number}
        client.clock.advance(4.5)
        settle(client)


@both
@pytest.mark.parametrize("timeout", [None, 600.0])
def test_a_ticket_is_served_for_half_a_lease(nodes: int, timeout: float | None) -> None:
    """Its owner renews it after a third. If that does not come, the owner is dead, and others are served."""
    client, other, servers = clients_over(nodes)
    holds(other)
    waits(client, timeout=timeout)
    for _ in range(2):
        found = [ticket for each in servers for ticket in tickets(each)]
        ends = client.clock.wall() + LEASE / 2
        assert [ticket.fresh for ticket in found] == [pytest.approx(ends, abs=1e-3)] * nodes
        while not under_way(client, ACQUIRE, WAIT):
            client.clock.advance(0.5)
            client.turn()
        settle(client, other)


def test_a_ticket_that_is_sent_too_late_is_served_for_a_millisecond() -> None:
    """Its owner only asks whether the name is held. No time, or less than none, could mean for ever."""
    assert fresh_for(LEASE, 0.0) == fresh_for(LEASE, -5.0) == 0.001


@both
def test_a_ticket_says_how_many_tasks_of_its_client_wait(nodes: int) -> None:
    """Only the first of them asks. `inspect` shows all of them, once the ticket was renewed."""
    client, other, servers = clients_over(nodes)
    holds(other)
    waits(client)
    assert [ticket.tasks for each in servers for ticket in tickets(each)] == [1] * nodes
    for _ in range(2):
        waits(client)
    client.clock.advance(LEASE / 3)
    settle(client)
    assert [ticket.tasks for each in servers for ticket in tickets(each)] == [3] * nodes


def test_a_ticket_has_the_same_place_at_all_nodes() -> None:
    """They get it at different moments. By their own clocks two waiters could be in another order at each node."""
    client, other, servers = clients_over(3)
    take_away(servers, None)
    began = client.clock.wall()
    acquiring(client)
    carry_out(client)  # the first round leaves no ticket
    for node in client.nodes:
        client.clock.block(0.01)
        while node.sent:
            node.carry_out()
    waits(other)
    assert {tickets(each)[0].order for each in servers} == {round(began * 1_000_000)}


class Late:
    """A handler whose client handles the votes in a later turn."""

    def __init__(self, handler: ReplyHandler, later: Callable[..., object]) -> None:
        self.op, self.sent, self.deadline = handler.op, handler.sent, handler.deadline
        self._handler, self._later = handler, later

    def answer(self, index: int, vote: Any) -> None:
        self._later(self._handler.answer, index, vote)

    def fail(self, index: int, error: Exception, *, maybe: bool) -> None:
        self._later(partial(self._handler.fail, index, error, maybe=maybe))


class Behind(SteppedNode):
    """Its clock is an hour behind that of the client."""

    def send(self, op: Op, handler: ReplyHandler) -> None:
        super().send(op, Late(handler, self._client.later))

    def carry_out(self) -> None:
        self._client.clock.jump_wall(-HOUR)
        super().carry_out()
        self._client.clock.jump_wall(HOUR)


@both
def test_the_nodes_limit_how_far_ahead_a_clock_may_be(nodes: int) -> None:
    """The clock of a client is an hour ahead of theirs. They keep the ticket in a place near their own time, and later
    sendings keep that place; over several nodes the median of theirs."""
    client, _, servers = clients_over(nodes)
    take_away(servers, None, "a" * 32 + "|")
    some = equipped(client, servers, Behind)
    acquiring(client)
    for _ in range(1 if nodes == 1 else 2):  # over several nodes the first round leaves no ticket
        for node in some:
            client.clock.block(0.25)
            while node.sent:
                node.carry_out()
        client.turn()
    before = sorted(tickets(each)[0].order for each in servers)
    assert before[-1] < (client.clock.wall() - HOUR + 11.0) * 1_000_000
    for _ in range(2):
        client.clock.advance(LEASE / 3)
        settle(client)
        assert [tickets(each)[0].order for each in servers] == [before[nodes // 2]] * nodes


@both
def test_a_waiter_keeps_its_place_over_a_short_outage(nodes: int) -> None:
    """It withdraws its ticket in the outage, and leaves another one after it: before those that came later."""
    client, other, servers = clients_over(nodes)
    take_away(servers, None, "a" * 32 + "|")  # of a client that notifies
    waiting = waits(client)
    client.clock.advance(1.0)
    waits(other)
    for node in client.nodes:
        node.cut()
        node.error = OSError("down")
    client.machine.connected(True)  # it renews its ticket now
    client.clock.advance(0.1)
    settle(client)
    for node in client.nodes:
        node.back()
    client.clock.advance(1.0)
    settle(client, other)
    assert [[ticket.id[0] for ticket in tickets(each)] for each in servers] == [["a", "b"]] * nodes
    assert client.machine.tickets.all() == [waiting]  # it gets the notices


@both
def test_a_lost_connection_does_not_change_the_ticket(nodes: int) -> None:
    """It is renewed while the connection is being made again: the same ticket is sent once more then."""
    client, other, servers = clients_over(nodes)
    holds(other)
    waits(client)
    (before,) = {ticket.id for each in servers for ticket in tickets(each)}
    for node in client.nodes:
        node.cut()
        node.listens = False
    client.clock.advance(LEASE / 3)
    client.turn()
    for node in client.nodes:
        node.listens = True
        node.back()
    assert not under_way(client, RELEASE)
    client.clock.advance(1.0)
    settle(client, other)
    assert [[ticket.id for ticket in tickets(each)] for each in servers] == [[before]] * nodes


# -- grants by a notice ------------------------------------------------------------------------------------------------


class Owner:
    """It does no more than to tell its rounds of their outcome."""

    rounds: RoundsAtOne
    terms: Terms

    def notified(self, index: int, notice: Notice) -> None: ...
    def wake(self, within: float, why: Wake) -> None: ...

    def settled(self, ballot: Ballot) -> None:
        self.rounds.on_reply(ballot)


def test_a_notice_wins_a_ballot_at_the_time_of_its_sending() -> None:
    """All votes of it are counted, so the hold that is made of it waits for none."""
    client, other, _ = clients_over(1)
    holds(other)
    owner, began = Owner(), client.clock.now()
    owner.terms = waits(client).terms
    rounds = owner.rounds = RoundsAtOne(cast("Any", client), client.machine.tickets, owner.terms, owner)
    rounds.send(math.inf, math.inf, False, False, 0, None)
    settle(client)
    assert rounds.take_grant() is None
    client.clock.advance(3.0)
    rounds.grant(1, 7)
    found = rounds.take_grant()
    assert found is not None
    ballot, token = found
    assert (ballot.outcome, ballot.sent, token) == (WON, began, 7)
    assert ballot.complete


def grant_while_it_renews(client: SteppedClient, other: SteppedClient, held: Tenure) -> None:
    """The other client releases the name while the renewal of the ticket is under way."""
    client.clock.advance(LEASE / 3)
    client.turn()
    assert under_way(client, ACQUIRE)
    held.hold.end(held)
    while other.nodes[0].sent:
        other.nodes[0].carry_out()


@pytest.mark.parametrize("ended", [{"broken": True}, {"expired": True}], ids=lambda flags: next(iter(flags)))
def test_a_grant_that_has_ended_before_it_was_taken_is_none(ended: dict[str, bool]) -> None:
    """The notices of both come while the ticket is being renewed. Another client has the name by then."""
    client, other, servers = clients_over(1)
    held = holds(other)
    waiting = waits(client)
    grant_while_it_renews(client, other, held)
    (granted,) = servers[0][NAME].holds
    assert granted.id[0] == "a"
    client.machine.received(0, Notice(granted.id[:ID_LENGTH], 0, name=NAME, **ended))
    take_away(servers, None)
    settle(client)
    assert not waiting.future.done()


@both
def test_a_waiter_without_fencing(nodes: int) -> None:
    """Its first try is the server's own SET, which leaves no ticket. The next one does."""
    client, other, servers = clients_over(nodes)
    held = holds(other, fencing=False)
    waiting = waits(client, fencing=False)
    assert all(map(tickets, servers))
    held.hold.end(held)
    settle(other, client)
    assert tenure_of(waiting).held


# -- clients without notices -------------------------------------------------------------------------------------------


def without_notices(client: SteppedClient) -> None:
    """The nodes send it no more notices, and the ids that it makes say so."""
    made = client.new_id

    def new_id(seed: int, metadata: str, mode: str = "") -> str:
        return made(seed, metadata, mode).replace("|", "!", 1)

    client.new_id = new_id  # type: ignore[method-assign]
    for node in client.nodes:
        node.listens = False
    client.machine.connected(True)


def test_a_waiter_that_gets_no_more_notices_takes_another_ticket() -> None:
    """The node would find that nobody listens for the first one, drop it, and make the next waiter the holder. The new
    one says that its client polls, and has the same place. Further polls keep it, and nothing is left after them."""
    client, other, servers = clients_over(1)
    held = holds(other)
    waiting = waits(client)
    (before,) = tickets(servers[0])
    client.clock.advance(1.0)
    without_notices(client)
    found = set[str]()
    for _ in range(20):
        client.clock.advance(0.1)
        settle(client)
        (ticket,) = tickets(servers[0])
        assert ticket.order == before.order
        found.add(ticket.id)
    found.discard(before.id)
    assert len(found) == 1
    assert polls(found.pop())
    held.hold.end(held)
    other.nodes[0].carry_out()
    client.clock.advance(0.5)
    settle(client)
    assert tenure_of(waiting).held
    assert not client.machine.tickets.all()


@pytest.mark.parametrize(("lease", "served"), [(LEASE, POLLED), (1.2, 0.6)])
def test_the_ticket_of_a_client_that_polls_is_served_for_a_second(lease: float, served: float) -> None:
    """Or for half of the lease, if that is less: the first one, and each later one."""
    client, _, servers = clients_over(1)
    take_away(servers, None)
    without_notices(client)
    acquiring(client, lease=lease)
    numbers = set[int]()
    for _ in range(8):
        while client.nodes[0].sent:
            client.nodes[0].carry_out()
            (ticket,) = tickets(servers[0])
            assert ticket.fresh == pytest.approx(client.clock.wall() + served, abs=1e-3)
            numbers.add(ticket.number)
        client.turn()
        client.clock.advance(0.05)
        client.turn()
    assert {1, 2, 3} <= numbers


def test_the_second_of_the_docs() -> None:
    """A client that polls and is dead keeps a free name for one second."""
    assert POLLED == 1.0


def test_a_grant_without_notices_removes_the_ticket_of_before() -> None:
    """A waiter over several nodes has left a ticket. Then most of them send no more notices, so it polls without a
    ticket, and gets the name: no node keeps its ticket."""
    client, _, servers = clients_over(3)
    take_away(servers, None)
    waiting = waits(client)
    assert all(map(tickets, servers))
    without_notices(client)
    client.clock.advance(1.0)
    settle(client)
    for each in servers:
        each[NAME] = replace(each[NAME], holds=())
    client.clock.advance(1.0)
    client.turn()
    carry_out(client)
    assert tenure_of(waiting).held
    assert not any(map(tickets, servers))


def test_one_try_leaves_no_ticket() -> None:
    """It may ask for several slots of a semaphore, one after the other. Its caller does not wait."""
    client, other, servers = clients_over(3)
    kind = Semaphore(2)
    held = holds(other, kind=kind)
    trying = acquiring(client, kind=kind, timeout=0)
    while under_way(client):
        assert not [op for op in under_way(client) if op.queueing.number]
        for node in client.nodes:
            if node.sent:
                node.carry_out()
        client.turn()
    tenure = tenure_of(trying)
    assert tenure.held
    assert held.held
    assert not any(map(tickets, servers))


@both
def test_one_try_for_a_name_that_is_held_leaves_no_ticket(nodes: int) -> None:
    """No notice could be of use to it."""
    client, other, servers = clients_over(nodes)
    holds(other)
    trying = acquiring(client, timeout=0)
    assert not [op for op in under_way(client) if op.queueing.number]
    settle(client)
    assert trying.future.done()
    assert not any(map(tickets, servers))


def test_the_first_ticket_becomes_the_hold_without_a_question() -> None:
    """The notice of a single node is enough."""
    client, other, _ = clients_over(1)
    held = holds(other)
    waiting = waits(client)
    held.hold.end(held)
    other.nodes[0].carry_out()
    assert tenure_of(waiting).held
    assert not under_way(client)


def test_the_number_of_fences_of_a_ticket_stays_the_same() -> None:
    """At a single node any sending of a ticket may be granted. Another task waits behind its owner by the time of the
    renewal, and the first sending is granted while that is under way: its owner has one fence, above all before."""
    client, other, _ = clients_over(1)
    held = holds(other)
    first, _ = waits(client), waits(client)
    grant_while_it_renews(client, other, held)
    settle(client)
    tenure = tenure_of(first)
    assert held.fence < tenure.fence == tenure.hold.last_fence


@both
def test_more_waiters_enter_than_one_op_serves(nodes: int) -> None:
    """One release notifies 64 readers. The last of them let the nodes go on with the others at once."""
    client, other, _ = clients_over(nodes)
    held = holds(other, kind=WRITE)
    readers = [waits(client, kind=READ) for _ in range(SERVED + 6)]
    held.hold.end(held)
    settle(other, client)
    assert all(tenure_of(each).held for each in readers)


def test_a_permit_over_several_nodes_has_a_slot_that_is_drawn() -> None:
    """Clients that ask at the same time so ask for different slots, and their votes are not split."""
    client, _, _ = clients_over(3)
    kind = Semaphore(4)
    for slot in range(4):
        client.random = partial(float, slot / 4 + 0.1)  # type: ignore[method-assign]
        tenure = holds(client, kind=kind)
        assert tenure.hold.op.kind.mode == kind.at(slot).mode
        assert tenure.hold.op.id.partition("|")[2].startswith(kind.at(slot).mode)


# -- several names ----------------------------------------------------------------------------------------------------


def multi(*names: str) -> Multi:
    return Multi([Part(each, MUTEX) for each in names])


def test_a_try_for_several_names_notifies_the_next_waiter_of_another_name_once() -> None:
    """It is refused, because one of its names is held, and gives back the place that it had at the other one. Each
    notice more makes that waiter ask once in vain."""
    holder, client, servers = clients_over(1)
    first, next_one = (SteppedClient(letter, servers, client.clock, client.clients) for letter in "cd")
    holds(holder, kind=multi("held", "other"))
    waits(client, kind=multi(NAME, "held"))
    before = holds(first, kind=multi(NAME, "a"))
    waits(next_one, kind=multi(NAME, "b"))
    before.hold.end(before)
    settle(first)
    notices = list[Notice]()
    next_one.machine.received = lambda index, notice: notices.append(notice)  # type: ignore[method-assign]
    while not client.nodes[0].sent:
        client.clock.advance(0.1)
        client.turn()
    client.nodes[0].carry_out()
    assert len(notices) == 1
