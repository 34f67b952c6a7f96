"""Conclusions from the refusals of several nodes about the holders of a name. Pure."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from asynclock.stores.port import Refused

if TYPE_CHECKING:
    from collections.abc import Collection

    from asynclock._errors import Reason
    from asynclock.rules.model import Kind


def holder_of(denials: Collection[Refused], nodes: int) -> Refused | None:
    """The holder on a majority of the nodes, with the time for which it holds there at least; None: there is none."""
    majority = nodes // 2 + 1
    for holder in {each.holder for each in denials if each.left is not None}:
        ends = sorted((each.left for each in denials if each.holder == holder and each.left is not None), reverse=True)
        if len(ends) >= majority:
            return Refused(ends[majority - 1], holder)
    return None


def most_named(denials: Collection[Refused]) -> Refused | None:
    """The refusal with the holder that most nodes name, and that holds longest; None: no node names one."""
    named = [each for each in denials if each.holder and each.left is not None]
    count = Counter(each.holder for each in named)
    return max(named, key=lambda each: (count[each.holder], each.left), default=None)


def is_held(denials: Collection[Refused], nodes: int) -> bool:
    """Whether a majority of the nodes refuses because of a hold. They may name different holds."""
    return sum(each.left is not None for each in denials) > nodes // 2


def would_refuse(replies: Collection[Refused], nodes: int, kind: Kind) -> bool:
    """Whether an attempt would be refused now, from the replies of the nodes to a peek. Over N nodes each hold of a
    kind with slots needs one slot that a majority grants."""
    entering = [each for each in replies if each.rank < 0]
    spare = len(entering) - (nodes // 2 + 1)
    if spare < 0:
        return True
    if nodes == 1 or not kind.slots or kind.parts:
        return False
    return kind.choose([each.slots for each in entering if each.slots is not None], spare, lambda: 0.0) is None


def first_free(denials: Collection[Refused], nodes: int) -> float:
    """The seconds until a majority of the nodes can be free at the earliest (math.inf: never). A node that names no
    hold can be free now."""
    ends = sorted(each.left for each in denials if each.left is not None)
    ends = [0.0] * (nodes - len(ends)) + ends
    return ends[nodes // 2]


def soonest(denials: Collection[Refused]) -> float:
    """The seconds until the first of the blocking holds ends."""
    return min((each.left for each in denials if each.left is not None), default=math.inf)


def lost_to(denials: Collection[Refused], nodes: int, broken: bool) -> Reason:
    """Why a hold is lost, from the refusals of these nodes. After an operator broke it, other clients may already hold
    the name at some nodes: the reason is "taken" only if one of them has a majority."""
    if broken:
        return "broken" if holder_of(denials, nodes) is None else "taken"
    return "taken" if any(each.left is not None for each in denials) else "broken"
