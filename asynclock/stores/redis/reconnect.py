"""How long to wait before connecting again."""

from __future__ import annotations

import math
import random

_PAUSES = (0.05, 2.0)  # seconds: first and longest between two attempts to connect
_HOPELESS = 5.0  # seconds between attempts where only the user can help


class Backoff:
    """One node's: pauses that double, jittered."""

    def __init__(self) -> None:
        self._pause = _PAUSES[0]
        self._rebuffed_at = -math.inf
        self._rebuff = 0.0

    def begin(self, now: float) -> float:
        """Seconds before the first attempt: none, unless a server that we reached there was of no use just now."""
        self._pause = _PAUSES[0]
        return self._rebuff if now - self._rebuffed_at < self._rebuff else 0.0

    def failed(self, hopeless: bool) -> float:
        """Seconds before the next one."""
        pause = _HOPELESS if hopeless else self._pause
        self._pause = min(2 * self._pause, _PAUSES[1])
        return pause * random.uniform(0.5, 1.0)  # noqa: S311 - jitter

    def rebuffed(self, now: float) -> None:
        """A server answers, but is the wrong one (a replica): to look again at once is right the first time only."""
        lately = now - self._rebuffed_at < 4 * _PAUSES[1]
        self._rebuff = min(2 * self._rebuff, _PAUSES[1]) if lately else _PAUSES[0] / 2
        self._rebuffed_at = now
