"""The reports of a node to its client: whether it is up, sends notices, and is in quarantine, each change once; another
server at its address; and releases that its server refuses."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from asynclock._errors import brief
from asynclock._flood import Flood
from asynclock._untrusted import said
from asynclock.events import NodeDown, NodeUp, Quarantined, QuarantineEnded
from asynclock.stores.port import Busy, Reconnecting

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynclock._time import Clock
    from asynclock.events import Event

log = logging.getLogger("asynclock")


class Reports:
    """The reports of one node."""

    __slots__ = ("_busy", "_faults", "_flood", "_label", "_listens", "_quarantined", "_tell", "_up")

    def __init__(self, label: str, tell: Callable[[Event], object], clock: Clock) -> None:
        self._label = label
        self._tell = tell
        self._flood = Flood(clock, self._more_unreleased)
        self._faults: set[str] = set()
        self._busy = False
        self._up: bool | None = None  # None: nothing is known yet
        self._quarantined = False
        self._listens = True

    def up(self) -> None:
        """It is connected."""
        self._busy = False
        if self._up is not True:
            self._up = True
            self._tell(NodeUp(self._label))

    def down(self, error: Exception) -> None:
        """It cannot be asked. One that connects again is not down yet: it is if that fails."""
        if isinstance(error, Busy):
            if not self._busy:
                self._busy = True
                fields = {"asynclock_node": self._label, "asynclock_error": str(error)}
                log.warning("asynclock: no connection is left for locks at %s", said(error), extra=fields)
        elif self._up is not False and not isinstance(error, Reconnecting):
            self._up = False
            self._tell(NodeDown(self._label, said(error)))

    def notices(self, refusal: Exception | None) -> None:
        """Whether it sends notices; else why not."""
        if refusal is not None and self._listens:
            self._listens = False
            fields = {"asynclock_node": self._label, "asynclock_error": str(refusal)}
            log.warning("asynclock: %s sends no notices (%s): waiters poll it", self._label, refusal, extra=fields)
        elif refusal is None and not self._listens:
            self._listens = True
            fields = {"asynclock_node": self._label}
            log.info("asynclock: %s sends notices again: waiters do not poll it any more", self._label, extra=fields)

    def quarantine(self, left: float) -> None:
        """Its server casts no vote for so many seconds; 0: it votes."""
        if left > 0 and not self._quarantined:
            self._quarantined = True
            self._tell(Quarantined(self._label, left))
        elif left <= 0 and self._quarantined:
            self._quarantined = False
            self._tell(QuarantineEnded(self._label))

    def fault(self, method: str, failure: Exception) -> None:
        """A method of a store that a user has written failed. The log says so once of each method."""
        if method not in self._faults:
            self._faults.add(method)
            fields = {"asynclock_node": self._label, "asynclock_error": str(failure)}
            log.error(
                "asynclock: %s of the store %s raised an exception; its later ones are not logged",
                method,
                self._label,
                exc_info=failure,
                extra=fields,
            )

    def replaced(self, before: str, now: str) -> None:
        """Another server answers at the address of the only node."""
        log.warning(
            "asynclock: another server answers at %s than before (run_id %.8s, not %.8s): all leases are renewed now, "
            "and those that it does not know are lost",
            self._label,
            now,
            before,
            extra={"asynclock_node": self._label},
        )

    def unreleased(self, name: str, error: Exception) -> None:
        """Its server refuses the release of a lock."""
        if self._flood.admits(None):
            fields = {"asynclock_node": self._label, "asynclock_lock": name, "asynclock_error": str(error)}
            log.error("asynclock: %s was not released: %s", brief(name), error, extra=fields)

    def _more_unreleased(self, kind: None, count: int) -> None:
        del kind
        fields = {"asynclock_node": self._label, "asynclock_more": count}
        log.error("asynclock: and %s more locks that were not released at %s", f"{count:,}", self._label, extra=fields)

    def stop(self) -> None:
        """The node closes."""
        self._flood.stop()
