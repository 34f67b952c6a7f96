"""The end of holds that are not extended: the session lives on, so the client deletes their nodes itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from asynclock._time import Clock, Timer
    from asynclock.stores.zookeeper.contender import Contender


class Expiry:
    """Of the contenders of one node. `end` is called with each hold whose time is over."""

    def __init__(
        self, clock: Clock, contenders: Callable[[], Iterable[Contender]], end: Callable[[Contender], object]
    ) -> None:
        self._clock = clock
        self._contenders = contenders
        self._end = end
        self._timer: Timer | None = None

    def ends_at(self, contender: Contender, ends: float) -> None:
        """The hold ends then, unless it is extended."""
        contender.ends = ends if contender.ends == math.inf else max(ends, contender.ends)
        if self._timer is None:
            self._timer = self._clock.call_at(contender.ends, self._sweep)

    def _sweep(self) -> None:
        self._timer, now, soonest = None, self._clock.now(), math.inf
        for contender in self._contenders():
            if not contender.granted or contender.given_up:
                continue
            if contender.ends <= now:
                self._end(contender)
            else:
                soonest = min(soonest, contender.ends)
        if soonest < math.inf:
            self._timer = self._clock.call_at(soonest, self._sweep)

    def stop(self) -> None:
        """The node closes."""
        if self._timer is not None:
            self._timer.cancel()
