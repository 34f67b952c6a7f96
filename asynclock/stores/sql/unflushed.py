"""The releases that PostgreSQL has carried out, and that a crash or a failover may undo (`single.py`). Pure.

Their commits were not awaited. The commit of an acquire or extend that is one statement is awaited, and is behind
theirs in the log of the server. So once one is answered that was sent after them, they are on the disk. The others, as
far as they are recent, are sent again after an outage. (Transactions are awaited, too, but do not count: some write
nothing.)
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from asynclock.rules.model import TAG_LENGTH

if TYPE_CHECKING:
    from asynclock.rules.model import Op

RECENT = 15.0
"""Seconds for which a release counts. The server writes its log within 0.6 s, by default; a client may take 12 s to
notice that the server has gone."""

MOST = 1_000
"""The greatest number of them. Those of a client that acquires in between are a few."""


class Unflushed:
    """Of one event loop."""

    def __init__(self) -> None:
        self.answered = 0
        """The number of releases that were answered so far."""

        self._releases: deque[tuple[int, float, Op]] = deque(maxlen=MOST)

    def __len__(self) -> int:
        return len(self._releases)

    def released(self, op: Op, now: float) -> None:
        """A release was answered."""
        self.answered += 1
        self._releases.append((self.answered, now, op))

    def flushed(self, answered: int) -> None:
        """An op was answered whose commit is awaited. When it was sent, so many releases had been answered."""
        while self._releases and self._releases[0][0] <= answered:
            self._releases.popleft()

    def take(self, tag: str, now: float) -> list[Op]:
        """The recent ones of the client of that tag."""
        its = [each for each in self._releases if each[2].id[:TAG_LENGTH] == tag]
        self._releases = deque([each for each in self._releases if each[2].id[:TAG_LENGTH] != tag], MOST)
        return [op for _, answered, op in its if answered > now - RECENT]
