"""A ticket and its sendings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from asynclock._options import LockSettings
from asynclock.locks.multi import Multi
from asynclock.protocol.acquisition import Acquisition
from asynclock.protocol.rounds import Ticket, Tickets
from asynclock.protocol.terms import Terms
from asynclock.rules.model import Kind, Part, Serve
from asynclock.rules.mutex import FAIR, MUTEX
from asynclock.rules.rwlock import READ, WRITE
from asynclock.rules.semaphore import Semaphore
from spec.machine import Task
from tests.support.stepped_quorum import NAME, clients_over


def test_an_undo_puts_the_ticket_back_as_it_was() -> None:
    """All that an attempt took away: its number, its place, and how many tasks wait."""
    ticket = Ticket("a" * 32 + "|", has_own_id=True, order=7)
    ticket.send(Serve.WAKE, False, 1, 5.0, tasks=1)
    sent = ticket.send(Serve.WAKE, True, 16, 4.0, tasks=9)
    back = ticket.put_back(sent)
    assert (back.waiter, back.number, back.order) == (ticket.id, 2, 7)
    assert (back.fresh, back.span, back.tasks) == (4.0, 16, 9)
    assert sent.number == 0  # it is not sent again


def test_a_grant_of_one_of_the_last_eight_sendings_counts() -> None:
    """An older one is no longer fresh: its hold could end before the client believes."""
    ticket = Ticket("a" * 32 + "|", has_own_id=False)
    for number in range(1, 21):
        assert ticket.send(Serve.GRANT, False, 1, 5.0, tasks=1).number == number
        ticket.was_sent(100.0 + number)
    found = dict[int, tuple[float, int] | None]()
    for number in range(1, 21):
        ticket.grant(number, 7)
        found[number] = ticket.take_grant()
    assert found == {number: (100.0 + number, 7) if number > 12 else None for number in range(1, 21)}


def test_sendings_that_reached_no_node_are_not_among_the_last_eight() -> None:
    """The connection was lost meanwhile."""
    ticket = Ticket("a" * 32 + "|", has_own_id=False)
    for number in range(1, 12):
        ticket.send(Serve.GRANT, False, 1, 5.0, tasks=1)
        if number not in (3, 5, 7):
            ticket.was_sent(100.0 + number)
    ticket.grant(1, 7)
    assert ticket.take_grant() == (101.0, 7)


def test_a_grant_counts_once_and_not_after_its_end() -> None:
    """The notice of the end may come before the grant was taken."""
    ticket = Ticket("a" * 32 + "|", has_own_id=False)
    ticket.send(Serve.GRANT, False, 1, 5.0, tasks=1)
    ticket.was_sent(100.0)
    assert not ticket.granted
    ticket.grant(1, 7)
    assert ticket.granted
    assert ticket.take_grant() == (100.0, 7)
    assert ticket.take_grant() is None
    ticket.grant(1, 7)
    ticket.drop_grant()
    assert not ticket.granted
    assert ticket.take_grant() is None


@pytest.mark.parametrize(
    ("orders", "order"), [([], 50), ([9], 9), ([1, 9], 9), ([1, 5, 9], 5), ([1, 2, 5, 8, 9], 5), ([1, 2, 3, 7], 3)]
)
def test_a_ticket_takes_the_median_of_its_order_keys(orders: list[int], order: int) -> None:
    """A minority of the nodes whose clocks are wrong does not move it."""
    ticket = Ticket("a" * 32 + "|", has_own_id=True, order=50)
    ticket.set_queue_order(orders)
    assert ticket.order == order
    assert ticket.send(Serve.WAKE, False, 1, 5.0, tasks=1).order == order


def owner_of(name: str) -> Any:
    """An acquisition of that name."""
    return SimpleNamespace(terms=SimpleNamespace(name=name))


def test_the_last_ticket_of_a_name_serves_the_queue() -> None:
    """Before a close each release does. During a close none does while the client has tickets of the name."""
    tickets = Tickets()
    tickets.add("a1", owner_of("a"))
    tickets.add("a2", owner_of("a"))
    tickets.add("b1", owner_of("b"))
    assert tickets.serve_at("a", Serve.WAKE) is Serve.WAKE
    tickets.close()
    tickets.remove("a1")
    tickets.remove("a1")
    assert tickets.serve_at("a", Serve.WAKE) is Serve.NOBODY
    tickets.remove("a2")
    assert tickets.serve_at("a", Serve.WAKE) is Serve.WAKE
    assert tickets.serve_at("b", Serve.WAKE) is Serve.NOBODY
    assert tickets.serve_at("c", Serve.WAKE) is Serve.WAKE


def test_a_ticket_that_is_sent_during_a_close_counts() -> None:
    """Its owner was notified before it was closed. A renewal of the ticket does not count again."""
    tickets = Tickets()
    tickets.close()
    tickets.add("a1", owner_of("a"))
    assert tickets.serve_at("a", Serve.WAKE) is Serve.NOBODY
    tickets.add("a1", owner_of("a"))
    assert tickets.serve_at("a", Serve.WAKE) is Serve.NOBODY
    tickets.remove("a1")
    assert tickets.serve_at("a", Serve.WAKE) is Serve.WAKE


def test_a_single_node_grants_to_a_waiter_of_the_client_that_closes() -> None:
    """It grants as many places as are free, and the withdrawal of a granted ticket frees its place."""
    tickets = Tickets()
    tickets.add("a1", owner_of("a"))
    tickets.close()
    assert tickets.serve_at("a", Serve.GRANT) is Serve.GRANT


@pytest.mark.parametrize(
    ("kind", "in_order"),
    [
        (MUTEX, True),
        (FAIR, True),
        (Multi([Part("a", MUTEX), Part("b", WRITE)]), True),  # for its mutexes
        (WRITE, False),
        (READ, False),  # by its kind, in any case
        (Semaphore(2), False),
    ],
    ids=["mutex", "fair", "multi", "write", "read", "semaphore"],
)
def test_a_client_that_polls_asks_for_queue_order_where_its_kind_knows_it(kind: Kind, in_order: bool) -> None:
    """Its release may notify nobody, so a mutex does not overtake. A semaphore and a writer have no such rule on Redis,
    and no store gets an op that says otherwise."""
    client, _, _ = clients_over(1)
    client.nodes[0].listens = False
    Acquisition(client.machine, Terms(NAME, kind, LockSettings(lease=30.0), Task(), None)).start()  # type: ignore[arg-type]
    ((op, _),) = client.nodes[0].sent
    assert op.queueing.fair is in_order
