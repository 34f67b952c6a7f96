"""What an op and its use of the queue become when they change: what a store has encoded of them is made anew."""

from __future__ import annotations

import pytest

from asynclock.rules.model import ACQUIRE, Op, Queueing, Serve
from asynclock.rules.mutex import MUTEX


@pytest.mark.parametrize("change", [Queueing.revoke, lambda each: each.serve_as(Serve.WAKE)], ids=["revoked", "serves"])
def test_a_change_of_the_queueing_is_encoded_anew(change: object) -> None:
    """A ticket that was revoked, and another way to serve."""
    queueing = Queueing(Serve.GRANT, number=3)
    queueing.packed = "as it was"
    change(queueing)  # type: ignore[operator]
    assert queueing.packed is None
    assert (queueing.number, queueing.serve) in [(0, Serve.GRANT), (3, Serve.WAKE)]


@pytest.mark.parametrize("plain", [False, True])
def test_an_acquire_that_is_sent_once_more_has_all_that_is_new(plain: bool) -> None:
    """The clock of now, the ticket, and whether it is the server's own SET."""
    op, ticket = Op(ACQUIRE, MUTEX, "name", "id", 30.0, 1_000, plain=not plain), Queueing(number=2)
    op.packed = "as it was"
    op.renew(2_000, ticket, plain=plain)
    assert (op.fence, op.queueing, op.plain, op.packed) == (2_000, ticket, plain, None)
