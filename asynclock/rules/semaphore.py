"""A semaphore: an attempt enters if fewer than `permits` hold it. The number that the attempt brings counts.

A node alone counts the holders. Over N nodes a count at each node admits too many: a majority of 5 nodes is 3, so 10
permits counted at each node admit 16 holders. So each hold takes a *slot* there, a number below its permits, which a
majority grants to no other hold. A refusal contains the slots in use, and the next attempt asks for a slot that is free
on a majority.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asynclock.rules.model import Entry, Slots

MOST_PERMITS = 10_000
"""The greatest number of permits. A refusal visits each holder, and blocks the server meanwhile."""

_WANTS = re.compile(r".{33}s([0-9]{1,5})/([0-9]{0,5})\.", re.DOTALL)
"""Numbers with more digits than MOST_PERMITS were written by another program."""


class Semaphore:
    """A semaphore with this number of permits; for an attempt over N nodes, with its slot."""

    name = "semaphore"
    letter = "s"
    fair = False
    shared = True
    respects_queue = True
    parts = ()
    deadlock_hint = "release one before asking for more than there are"

    def __init__(self, permits: int, slot: str = "") -> None:
        self.max_per_task = self.slots = permits
        self.slot = int(slot) if slot else None
        self.mode = f"s{permits}/{slot}."

    def at(self, slot: int) -> Semaphore:
        """The kind of an attempt for this slot."""
        return Semaphore(self.max_per_task, str(slot))

    def of_mode(self, mode: str) -> Semaphore:
        permits, _ = wants(f"{'':33}{mode}")
        return Semaphore(permits)

    def choose(self, taken: Sequence[Slots], spare: int, random: Callable[[], float]) -> int | None:
        used = Counter(slot for slots in taken for slot in slots.taken)
        free = [slot for slot in range(self.slots) if used[slot] <= spare]
        return free[int(random() * len(free))] if free else None

    def admits(self, holds: Sequence[Entry], id: str) -> bool:
        permits, slot = wants(id)
        return len(holds) < permits and (slot == "" or all(wants(each.id)[1] != slot for each in holds))

    def passes(self, blocked: str, id: str) -> bool:
        return wants(blocked)[0] < wants(id)[0]

    def blocking_hold(self, holds: Sequence[Entry]) -> Entry:
        return min(holds, key=lambda each: (each.ends or 0.0, each.id))

    def taken(self, holds: Sequence[Entry]) -> tuple[int, ...]:
        """The slots in use, in the same order as in the reply of the script."""
        inside = sorted(holds, key=lambda each: (each.ends or 0.0, each.id))
        return tuple(int(slot) for each in inside if (slot := wants(each.id)[1]))


def wants(id: str) -> tuple[int, str]:
    """The permits and the slot ("": none) in an id. Pure."""
    found = _WANTS.match(id)
    return (int(found[1]), found[2]) if found else (0, "")


SEMAPHORE = Semaphore(1)
