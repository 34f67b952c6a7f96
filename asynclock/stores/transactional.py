"""What stores share that run `decide` themselves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from asynclock.rules.model import Slots, Verdict
from asynclock.stores.port import UNDONE, Refused

if TYPE_CHECKING:
    from asynclock.rules.model import Reply
    from asynclock.stores.port import Grant, Undone

_MARGIN = 0.001
"""So many seconds after the end of a hold the name is free on any store: a waiter that asks then finds it so."""


def vote_of(reply: Reply, now: float, part: int = 0) -> Grant | Refused | Undone:
    """What `decide` answered at `now`, or `decide_all` for the name `part`, as it crosses the port. Pure."""
    match reply.verdict:
        case Verdict.YES:
            return reply.fence, reply.marked
        case Verdict.UNDONE:
            return UNDONE
    slots = None if reply.taken is None else Slots(reply.taken, part)
    if reply.holder is None:
        return Refused(None, "", reply.rank, reply.order, slots)
    left = math.inf if reply.holder.ends is None else reply.holder.ends - now + _MARGIN
    return Refused(left, reply.holder.id, reply.rank, reply.order, slots)
