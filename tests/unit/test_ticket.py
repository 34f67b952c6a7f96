"""A ticket and its sendings."""

from __future__ import annotations

from asynclock.protocol.rounds import Ticket
from asynclock.rules.model import Serve


def test_an_undo_puts_the_ticket_back_as_it_was() -> None:
    """All that an attempt took away: its number, its place, and how many tasks wait."""
    ticket = Ticket("a" * 32 + "|", has_own_id=True, order=7)
    ticket.send(Serve.WAKE, False, 1, 5.0, tasks=1)
    sent = ticket.send(Serve.WAKE, True, 16, 4.0, tasks=9)
    back = ticket.put_back(sent)
    assert (back.waiter, back.number, back.order) == (ticket.id, 2, 7)
    assert (back.fresh, back.span, back.tasks) == (4.0, 16, 9)
    assert sent.number == 0  # it is not sent again
