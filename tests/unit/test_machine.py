"""What the machine of a client makes of notices, of nodes that go down and come back, and of callers that have gone."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest

from asynclock._errors import ConfigError
from asynclock._options import BROKEN_BY, LockSettings
from asynclock.events import NodeDown, NodeUp, Quarantined
from asynclock.locks.multi import Multi
from asynclock.protocol.acquisition import Acquisition
from asynclock.protocol.core import SLICE
from asynclock.protocol.hold import Hold, Tenure
from asynclock.protocol.machine import end_unwanted
from asynclock.protocol.states import Asking, BackingOff, ClaimState, Queued
from asynclock.protocol.terms import Terms
from asynclock.rules.model import ID_LENGTH, RELEASE, Kind, Notice, Part, Serve
from asynclock.rules.mutex import FAIR, MUTEX
from asynclock.rules.rwlock import READ
from asynclock.rules.semaphore import Semaphore
from asynclock.stores.port import Reconnecting, WrongKind
from spec.machine import Task
from tests.support.probes import asks_again_at, in_outage
from tests.support.stepped_acquires import tenure_of
from tests.support.stepped_quorum import NAME, SteppedClient, clients_over, settle

SOON = 0.05
"""Seconds within which a few waiters ask after something has happened."""


def asked(client: SteppedClient, kind: Kind = MUTEX, name: str = NAME, timeout: float | None = None) -> Acquisition:
    """A task asks for a lock."""
    terms = Terms(name, kind, LockSettings(lease=30.0), Task(), timeout)
    give_up = math.inf if timeout is None else client.clock.now() + timeout
    acquisition = Acquisition(client.machine, terms, give_up)
    acquisition.start()
    return acquisition


def held(client: SteppedClient, kind: Kind = MUTEX, name: str = NAME) -> Tenure:
    """A task of that client has it."""
    acquisition = asked(client, kind, name)
    settle(client)
    return tenure_of(acquisition)


def waiting(nodes: int, *names: str) -> tuple[SteppedClient, list[Acquisition]]:
    """A client that waits for these names, which another client holds. It has no reason to ask again for seconds."""
    holder, client, _ = clients_over(nodes)
    for name in names or (NAME,):
        held(holder, name=name)
    waits = [asked(client, name=name) for name in names or (NAME,)]
    settle(holder, client)
    assert woken(client, waits) == 0
    return client, waits


def woken(client: SteppedClient, waits: list[Acquisition]) -> int:
    """The number of those that ask soon."""
    return sum(asks_again_at(each) <= client.clock.now() + SOON for each in waits)


def under_way(client: SteppedClient) -> int:
    """The number of ops that the client has sent."""
    return sum(len(node.sent) for node in client.nodes)


# -- nodes that go down and come back ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "down"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_waiters_ask_once_no_majority_is_left(nodes: int, down: int) -> None:
    """No notice will come, and their patience begins. A node may report twice that it is down."""
    client, waits = waiting(nodes)
    for index in range(down):
        assert woken(client, waits) == 0
        client.machine.reported(NodeDown(f"node {index}", "it is silent"))
        client.machine.reported(NodeDown(f"node {index}", "it is silent"))
    assert woken(client, waits) == 1


def test_a_node_that_came_back_is_not_down() -> None:
    """Two of three nodes were down, one after the other. Then two are at once."""
    client, waits = waiting(3)
    client.machine.reported(NodeUp("node 0"))
    for event in (NodeDown("node 0", "refused"), NodeUp("node 0"), NodeDown("node 1", "refused")):
        client.machine.reported(event)
        assert woken(client, waits) == 0
    client.machine.reported(NodeDown("node 2", "refused"))
    assert woken(client, waits) == 1


def test_a_node_in_quarantine_is_not_down() -> None:
    """It casts no vote, and still sends notices."""
    client, waits = waiting(1)
    client.machine.reported(Quarantined("node 0", 60.0))
    assert woken(client, waits) == 0


@pytest.mark.parametrize("missed", [False, True])
@pytest.mark.parametrize("up", [1, 3])
def test_tickets_are_sent_again_after_notices_may_be_lost(missed: bool, up: int) -> None:
    """Also to a node that is connected while a majority is not."""
    client, waits = waiting(3)
    for node in client.nodes[up:]:
        node.error = Reconnecting("gone")
    client.machine.connected(missed)
    assert woken(client, waits) == missed


def test_waiters_in_an_outage_ask_when_a_majority_is_connected() -> None:
    """One connection of three is no reason yet."""
    client, _, _ = clients_over(3)
    for node in client.nodes:
        node.cut()
    waits = [asked(client)]
    for _ in range(8):  # their pauses grow
        client.turn()
        client.clock.advance(asks_again_at(waits[0]) - client.clock.now())
    client.turn()
    assert in_outage(waits[0])
    for connected in range(2):
        assert woken(client, waits) == 0
        client.nodes[connected].error = None
        client.machine.connected(False)
    assert woken(client, waits) == 1


def test_a_few_waiters_are_woken_in_one_turn() -> None:
    """A slice of work is measured from its begin."""
    names = [f"{NAME}{number}" for number in range(5)]
    client, waits = waiting(1, *names)
    client.spent = lambda: 100.0  # type: ignore[method-assign]
    client.machine.reported(NodeDown("node 0", "it is silent"))
    assert woken(client, waits) == len(names)


# -- holds whose only node is connected again --------------------------------------------------------------------------


@pytest.mark.parametrize("draw", [0.0, 1.0])
def test_holds_are_renewed_when_their_only_node_is_connected_again(draw: float) -> None:
    """It may be another server by now, without them. They are renewed at different moments."""
    client, _, _ = clients_over(1)
    tenure = held(client)
    client.random = lambda: draw  # type: ignore[method-assign]
    client.machine.connected(False)
    client.turn()
    assert tenure.hold.renew_at == client.clock.now() + draw * SOON


@pytest.mark.parametrize(("nodes", "closed"), [(1, True), (2, False), (3, False)])
def test_holds_are_not_renewed_early_without_reason(nodes: int, closed: bool) -> None:
    """One of several nodes cannot lose a hold by itself, and a client that closes renews nothing."""
    client, _, _ = clients_over(nodes)
    tenure = held(client)
    before = tenure.hold.renew_at
    client.machine.connected(False)
    client.closed = closed
    client.turn()
    assert tenure.hold.renew_at == before > client.clock.now() + SOON


def test_many_holds_are_renewed_in_slices() -> None:
    """Other code of the loop runs between them. A second connection meanwhile begins nothing anew."""
    client, _, _ = clients_over(1)
    holds = [held(client, name=f"{NAME}{number}").hold for number in range(4)]
    spent, due = iter(range(1_000)), list[Callable[[], object]]()
    client.spent = lambda: 2 * SLICE * next(spent)  # type: ignore[method-assign]
    client.later = lambda call, *args: due.append(partial(call, *args))  # type: ignore[method-assign]
    client.machine.connected(False)
    for number in range(1, 5):
        client.machine.connected(False)
        assert len(due) == 1
        due.pop()()
        assert sum(hold.renew_at <= client.clock.now() + SOON for hold in holds) == number
    due.pop()()
    assert not due


# -- notices -----------------------------------------------------------------------------------------------------------


def of(hold: Hold, **what: object) -> Notice:
    """A notice for that hold."""
    return Notice(hold.op.id[:ID_LENGTH], name=NAME, **{"number": 0, **what})  # type: ignore[arg-type]


def test_a_notice_for_a_ticket_says_nothing_of_the_hold() -> None:
    """It comes late: the ticket has become the hold, or its owner has gone. The holder does not learn of waiters from
    it."""
    client, _, _ = clients_over(1)
    hold = held(client).hold
    for number in (1, 2):
        client.machine.received(0, of(hold, number=number, fence=7))
        assert not hold.contended
    client.machine.received(0, of(hold))
    assert hold.contended


@pytest.mark.parametrize("what", ["expired", "waited for", "broken"])
def test_a_notice_is_for_one_of_several_holds(what: str) -> None:
    """The others of the name go on as before."""
    client, _, _ = clients_over(1)
    first, second = held(client, Semaphore(3)), held(client, Semaphore(3))
    client.machine.received(0, of(first.hold, **({} if what == "waited for" else {what: True})))
    assert first.open is (what != "expired")
    assert second.open
    assert (first.hold.contended, second.hold.contended) == (what == "waited for", False)
    assert under_way(client) == (what == "broken")  # it asks whether it still has the hold
    assert client.losses == ["expired"] * (what == "expired")


def test_a_notice_of_a_break_ends_the_marks_of_its_run() -> None:
    """An operator wants the name to be run again. Other notices for that hold change nothing."""
    client, _, _ = clients_over(3)
    tenure, marks = held(client), client.machine.holds.done_marks
    tenure.mark_done(60.0)
    tenure.hold.end(tenure)
    client.machine.received(0, of(tenure.hold))
    assert len(marks) == 1
    client.machine.received(0, of(tenure.hold, broken=True))
    assert len(marks) == 0


@pytest.mark.parametrize(
    ("broken", "name", "said"),
    [
        (True, f"{NAME}{BROKEN_BY}812|web-3|", "web-3, pid 812 broke it"),
        (True, NAME, "an operator broke it"),
        (False, f"{NAME}{BROKEN_BY}812|web-3|", "its key is gone"),  # it does not say that anybody broke the hold
        (True, f"{NAME}2{BROKEN_BY}812|web-3|", "its key is gone"),  # of another name
    ],
)
def test_a_notice_says_who_broke_a_hold(broken: bool, name: str, said: str) -> None:
    """The error of the lease names the breaker."""
    client, _, _ = clients_over(1)
    tenure = held(client)
    client.machine.received(0, Notice(tenure.hold.op.id[:ID_LENGTH], 0, name=name, broken=broken))
    tenure.hold.lose("broken")
    assert said in str(tenure.error())


# -- names that are in use as another kind -----------------------------------------------------------------------------

BOTH = Multi([Part("x", MUTEX), Part("y", Semaphore(2))])


@pytest.mark.parametrize(("kind", "name"), [(READ, "x"), (Semaphore(2), "x"), (BOTH, "y")])
def test_a_mutex_does_not_wait_for_another_kind(kind: Kind, name: str) -> None:
    """A task of this process holds the name. The servers would refuse the mutex, too, but are not asked."""
    client, _, _ = clients_over(1)
    tenure = held(client, kind)
    with pytest.raises(WrongKind, match=f"'{name}' is in use as another kind"):
        asked(client, name=name)
    assert tenure.held


@pytest.mark.parametrize("kind", [MUTEX, FAIR, BOTH])
def test_a_mutex_waits_for_a_mutex(kind: Kind) -> None:
    """Also for a fair one, and for one that is held together with other names."""
    client, _, _ = clients_over(1)
    tenure = held(client, kind)
    assert isinstance(asked(client, name="x").state, Queued)
    assert tenure.held


def test_a_mutex_waits_for_the_end_of_a_hold_whose_time_is_over() -> None:
    """Of another kind. The client ends it a moment later, and then asks the servers."""
    client, _, _ = clients_over(1)
    tenure = held(client, READ)
    client.clock.block(31.0)
    waits = asked(client)
    assert not tenure.held
    assert isinstance(waits.state, Queued)


# -- callers that have gone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_grant_for_a_caller_that_gave_up_is_no_hold(nodes: int) -> None:
    """The round is undone, and the client has nothing to renew."""
    client, _, servers = clients_over(nodes)
    acquiring = asked(client)
    acquiring.abandon()
    settle(client)
    assert len(client.machine.holds) == 0
    assert not any(server[NAME].holds for server in servers)
    assert not client.clock.armed


@pytest.mark.parametrize("how", ["closed", "released"])
def test_what_nobody_wants_is_not_released_twice(how: str) -> None:
    """The close of the client has released it, or its owner has: by now it may be another task's."""
    client, _, _ = clients_over(1)
    tenure = held(client)
    if how == "closed":
        client.machine.begin_close()
        client.machine.close_hold(tenure.hold)
    else:
        tenure.hold.end(tenure)
    settle(client)
    end_unwanted(tenure)
    assert under_way(client) == 0


@pytest.mark.parametrize("lost", [False, True])
def test_what_nobody_wants_is_released(lost: bool) -> None:
    """Also a hold that was lost, since some node may still have it."""
    client, _, _ = clients_over(3)
    tenure = held(client)
    if lost:
        tenure.hold.lose("expired")
    end_unwanted(tenure)
    assert under_way(client) == 3
    assert not tenure.open


def test_a_grant_that_came_too_late_is_no_hold() -> None:
    """Its lease has ended by then. It is released, and the next try gets a hold."""
    client, _, _ = clients_over(3)
    acquiring = asked(client)
    client.clock.advance(31.0)
    for _ in range(10):
        settle(client)
        client.clock.advance(0.1)
    tenure = tenure_of(acquiring)
    assert tenure.held


# -- a client that closes ----------------------------------------------------------------------------------------------


def test_a_client_that_closes_starts_no_waiting_task() -> None:
    """Its hold is released, and the task behind the holder gets the error of the close instead."""
    client, _, _ = clients_over(1)
    tenure, waits = held(client), asked(client)
    client.machine.begin_close()
    client.machine.close_hold(tenure.hold)
    settle(client)
    assert isinstance(waits.state, Queued)
    assert client.losses == ["closed"]


def test_a_client_that_closes_does_not_notify_itself() -> None:
    """It has a hold of the name, and a ticket. The withdrawal of the ticket, which follows, notifies the others."""
    client, _, _ = clients_over(3)
    tenure = held(client, Semaphore(1))
    asked(client, Semaphore(1))
    settle(client)
    client.machine.begin_close()
    client.machine.close_hold(tenure.hold)
    assert [[op.queueing.serve for op, _ in node.sent] for node in client.nodes] == [[Serve.NOBODY]] * 3


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_client_that_closes_asks_no_more(nodes: int) -> None:
    """Its hold is released, and its waiters end in later turns of the loop. Before that, one of them is to send its
    ticket again, since a node was connected: the servers would notify those before it. It withdraws its ticket."""
    client, _, _ = clients_over(nodes)
    tenure = held(client, Semaphore(1))
    waits = asked(client, Semaphore(1))
    settle(client)
    client.machine.connected(True)
    client.machine.begin_close()
    client.machine.close_hold(tenure.hold)
    client.clock.advance(1.0)
    client.turn()
    assert {op.verb for node in client.nodes for op, _ in node.sent} == {RELEASE}
    assert isinstance(waits.future.exception(), ConfigError)


# -- names that were released to other clients -------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "yields"), [(1, False), (2, True), (3, True)])
def test_a_name_that_was_released_to_waiters_elsewhere_is_yielded(nodes: int, yields: bool) -> None:
    """Over N nodes they are notified, and could be overtaken. A single node grants it to one of them."""
    client, _, _ = clients_over(nodes)
    client.machine.yielded.add(MUTEX, NAME)
    assert client.machine.yielded.take(NAME) is yields


@pytest.mark.parametrize(("left", "state"), [(0.125, BackingOff), (0.0625, Asking)])
def test_a_task_with_little_time_left_yields_to_nobody(left: float, state: type[ClaimState]) -> None:
    """Less than 0.1 s: the pause could take half of it."""
    client, _, _ = clients_over(3)
    client.machine.yielded.add(MUTEX, NAME)
    assert type(asked(client, timeout=left).state) is state


# -- tickets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_ticket_is_served_for_longer_than_its_renewal_takes(nodes: int) -> None:
    """For half of the lease; it is renewed when a third of the lease has passed."""
    holder, client, servers = clients_over(nodes)
    held(holder)
    waits = asked(client)
    settle(holder, client)
    fresh = [server[NAME].queue[0].fresh - client.clock.wall() for server in servers]
    assert fresh == pytest.approx([15.0] * nodes)
    assert asks_again_at(waits) < client.clock.now() + 10.0
