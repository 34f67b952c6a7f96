"""What the nodes that refuse say of the holders, taken together. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Collection

    from asynclock._errors import Reason

Denial: TypeAlias = tuple[int, bytes]
"""What one node says: in how many ms the hold ends that is in the way (-1: it has no end; -2: nobody holds the name),
and the id of that hold."""

_NEVER = 2**53


def holder_of(denials: Collection[Denial], nodes: int) -> tuple[bytes, int] | None:
    """Who holds it on a majority of the nodes, and for how many ms at least (-1: for ever); None: nobody does."""
    majority = nodes // 2 + 1
    for holder in {whose for left, whose in denials if left != -2}:
        ends = sorted((left if left >= 0 else _NEVER for left, whose in denials if whose == holder), reverse=True)
        if len(ends) >= majority:
            return holder, -1 if ends[majority - 1] == _NEVER else ends[majority - 1]
    return None


def is_held(denials: Collection[Denial], nodes: int) -> bool:
    """Whether a majority of the nodes refuses because of a hold, whichever hold each of them names."""
    return sum(left != -2 for left, _ in denials) > nodes // 2


def first_free(denials: Collection[Denial], nodes: int) -> int:
    """In how many ms a majority of the nodes could be free at the earliest (-1: never). A node that names no hold may
    be free now."""
    ends = sorted(left if left >= 0 else _NEVER for left, _ in denials if left != -2)
    ends = [0] * (nodes - len(ends)) + ends
    return -1 if ends[nodes // 2] == _NEVER else ends[nodes // 2]


def soonest(denials: Collection[Denial]) -> float:
    """Seconds until the first of the holds ends that are in the way; a whole ms more, as Redis rounds."""
    ends = [left for left, _ in denials if left >= 0]
    return (min(ends) + 1) / 1000 if ends else math.inf


def lost_to(denials: Collection[Denial], nodes: int, broken: bool) -> Reason:
    """Why a hold is lost that these nodes deny. After an operator has broken it ("broken") other clients may hold it at
    some nodes already; it is "taken" only once one of them has a majority."""
    if broken:
        return "broken" if holder_of(denials, nodes) is None else "taken"
    return "taken" if any(left != -2 for left, _ in denials) else "broken"
