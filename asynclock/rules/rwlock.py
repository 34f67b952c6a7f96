"""Many readers or one writer per name. A writer that waits holds back the readers that come after it; a release admits
as many waiters from the head of the queue as can hold together.

After Courtois, Heymans and Parnas, "Concurrent Control with Readers and Writers" (CACM 14, 1971), second problem, with
a lease for each reader: a reader that dies blocks the writers until its lease ends, and no longer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynclock.rules.model import Slotless, letter_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock.rules.model import Entry


class ReadWrite(Slotless):
    """One side of the lock. Its mode is "r." for readers, "w." for writers."""

    fair = False
    shared = True
    respects_queue = True
    max_per_task = 1
    deadlock_hint = "release it first (and look again at what was read), or ask to write from the start"

    def __init__(self, name: str, mode: str) -> None:
        self.name = name
        self.letter = mode[:1]
        self.mode = mode

    def admits(self, holds: Sequence[Entry], id: str) -> bool:
        return not holds or (letter_of(id) == "r" and all(letter_of(each.id) == "r" for each in holds))

    def blocking_hold(self, holds: Sequence[Entry]) -> Entry:
        return max(holds, key=lambda each: (each.ends or 0.0, each.id))


READ = ReadWrite("read", "r.")
WRITE = ReadWrite("write", "w.")
