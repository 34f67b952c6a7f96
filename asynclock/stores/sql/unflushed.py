"""The releases that PostgreSQL has carried out, and that a crash or a failover may undo (`single.py`). Pure.

Their commits were not awaited. An acquire or an extend is awaited, and is behind them in the log of the server. So once
one is answered that was sent after them, they are kept for good. The others are sent again after an outage.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from asynclock.rules.model import TAG_LENGTH

if TYPE_CHECKING:
    from asynclock.rules.model import Op

MOST = 10_000
"""The greatest number of them: more releases than a server carries out while it writes its log."""


class Unflushed:
    """Of one event loop."""

    def __init__(self) -> None:
        self.answered = 0
        """The number of releases that were answered so far."""

        self._releases: deque[tuple[int, Op]] = deque(maxlen=MOST)

    def __len__(self) -> int:
        return len(self._releases)

    def released(self, op: Op) -> None:
        """A release was answered."""
        self.answered += 1
        self._releases.append((self.answered, op))

    def flushed(self, answered: int) -> None:
        """An op was answered whose commit is awaited. When it was sent, so many releases had been answered."""
        while self._releases and self._releases[0][0] <= answered:
            self._releases.popleft()

    def take(self, tag: str) -> list[Op]:
        """Those of the client of that tag."""
        taken = [op for _, op in self._releases if op.id[:TAG_LENGTH] == tag]
        self._releases = deque([each for each in self._releases if each[1].id[:TAG_LENGTH] != tag], MOST)
        return taken
