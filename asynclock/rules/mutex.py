"""The mutex: one holder per name (Redlock's, https://redis.io/docs/latest/develop/use/patterns/distributed-locks/)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynclock.rules.model import Slotless

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock.rules.model import Entry


class Mutex(Slotless):
    """An attempt enters if nobody holds the name."""

    name = "mutex"
    letter = ""
    mode = ""
    shared = False
    max_per_task = 1
    deadlock_hint = "pass the Lease on instead of acquiring again"

    def __init__(self, fair: bool = False) -> None:
        self.fair = self.respects_queue = fair

    def admits(self, holds: Sequence[Entry], id: str) -> bool:
        del id
        return not holds

    def blocking_hold(self, holds: Sequence[Entry]) -> Entry:
        return holds[0]


MUTEX = Mutex()

FAIR = Mutex(fair=True)
"""A mutex in order of arrival: an attempt that finds waiters enters after them."""
