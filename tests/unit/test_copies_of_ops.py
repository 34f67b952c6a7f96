"""The copy of an op that a store keeps while the op waits."""

from __future__ import annotations

from dataclasses import fields

from asynclock.rules.model import ACQUIRE, MARKS_FREE, Op, Queueing, Serve
from asynclock.rules.mutex import MUTEX
from asynclock.stores.deciding import copy_of

FOR_STORES = {"packed", "sent", "revoked", "queueing"}
"""What is no part of the request, and what is copied, too."""


def test_a_copy_has_all_that_an_op_asks_for() -> None:
    """Its owner changes the op, and the copy stays."""
    queueing = Queueing(Serve.GRANT, True, 3, "w", 4, 5.0, 6, True, 7, True)
    op = Op(ACQUIRE, MUTEX, "name", "id", 1.0, 2, 3.0, 4.0, True, True, queueing, MARKS_FREE, 5.0)
    copied = copy_of(op)
    for each in set(Op.__slots__) - FOR_STORES:
        assert getattr(copied, each) == getattr(op, each)
    for field in fields(Queueing):
        if field.name != "packed":
            value = getattr(copied.queueing, field.name)
            assert value == getattr(queueing, field.name) != getattr(Queueing(), field.name)
    queueing.revoke()
    assert copied.queueing.number == 4
