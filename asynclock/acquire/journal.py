"""The log lines for the events of a session, on the logger "asynclock". A line that repeats is counted, not printed.

Each record has the values of its event as attributes: `asynclock_event` is the name of the event's class, and
`asynclock_lock`, `_kind`, `_label`, `_node`, `_reason`, `_seconds`, `_outcome` and `_error` are those that it has.
`asynclock_more` is the count in the line that stands for several.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from logging import DEBUG, ERROR, INFO, WARNING
from typing import TYPE_CHECKING, NamedTuple

from asynclock import events
from asynclock._errors import brief
from asynclock._flood import Flood

if TYPE_CHECKING:
    from asynclock._clock import Clock
    from asynclock.events import Event

log = logging.getLogger("asynclock")


class Line(NamedTuple):
    """How an event is logged."""

    level: int
    text: str
    several: str  # what the line calls that counts the others


LINES: dict[type[Event], Line] = {
    events.NodeDown: Line(WARNING, "asynclock: the node %(node)s is down: %(error)s", "times that a node went down"),
    events.Lost: Line(WARNING, "asynclock: %(why)s (it was held for %(seconds).3g s)", "lost leases"),
    events.ReleaseFailed: Line(
        WARNING,
        "asynclock: the release of %(lock)s had no majority; its lease ends by itself: %(error)s",
        "releases without a majority",
    ),
    events.LoopLagged: Line(
        WARNING,
        "asynclock: the event loop did not run for %(seconds).3g s; only leases with renew='thread' were renewed in "
        "that time: run code that blocks in a thread (asyncio.to_thread)",
        "times that the event loop did not run",
    ),
    events.NodeUp: Line(INFO, "asynclock: the node %(node)s is up", "times that a node came up"),
    events.Quarantined: Line(
        INFO,
        "asynclock: the server of %(node)s has restarted or was replaced, and casts no vote for %(seconds).0f s",
        "quarantines",
    ),
    events.QuarantineEnded: Line(INFO, "asynclock: the node %(node)s votes again", "ends of quarantines"),
    events.Broken: Line(INFO, "asynclock: this client broke the lock %(lock)s", "broken locks"),
    events.Acquired: Line(DEBUG, "asynclock: acquired %(lock)s (%(kind)s) after %(seconds).3g s", ""),
    events.TimedOut: Line(DEBUG, "asynclock: gave up %(lock)s (%(kind)s) after %(seconds).3g s: it is held", ""),
    events.Unavailable: Line(DEBUG, "asynclock: gave up %(lock)s (%(kind)s) after %(seconds).3g s: no majority", ""),
    events.Released: Line(DEBUG, "asynclock: released %(lock)s (%(kind)s), held for %(seconds).3g s", ""),
    events.Detached: Line(DEBUG, "asynclock: detached %(lock)s (%(kind)s), held for %(seconds).3g s", ""),
    events.Renewed: Line(DEBUG, "asynclock: the renewal of %(lock)s (%(kind)s) has the outcome %(outcome)s", ""),
}
"""All events that are logged. Those of DEBUG are made for listeners, or while the logger's level is DEBUG."""

_FIELDS = {"name": "lock", "waited": "seconds", "held_for": "seconds"}


class Journal:
    """The log of one session."""

    def __init__(self, clock: Clock) -> None:
        self._flood = Flood(clock, _write_more)

    def admits(self, event: type[Event], level: int) -> bool:
        """Whether to log an event of that class now; if not, it is counted."""
        return log.isEnabledFor(level) and self._flood.admits((event, level))

    def write(self, event: Event) -> None:
        """Log an event at its level, or count it."""
        level = LINES[type(event)].level
        if self.admits(type(event), level):
            write(event, level)

    def admits_fault(self, several: str) -> bool:
        """Whether to log a fault of that sort now; if not, it is counted. `several`: what the line calls that counts
        the others."""
        return self._flood.admits((several, ERROR))

    def stop(self) -> None:
        """The session closes."""
        self._flood.stop()


def write(event: Event, level: int, why: str = "") -> None:
    """Log an event."""
    values = {_FIELDS.get(field.name, field.name): getattr(event, field.name) for field in fields(event)}
    extra = {f"asynclock_{field}": value for field, value in values.items()}
    shown = {**values, "lock": brief(values.get("lock", "")), "why": why}
    log.log(level, LINES[type(event)].text, shown, extra={"asynclock_event": type(event).__name__, **extra})


def write_debug(event: Event) -> None:
    """A listener that logs the events of DEBUG."""
    line = LINES.get(type(event))
    if line is not None and line.level == DEBUG:
        write(event, DEBUG)


def _write_more(kind: tuple[type[Event] | str, int], count: int) -> None:
    what, level = kind
    extra: dict[str, object] = {"asynclock_more": count}
    if not isinstance(what, str):
        extra["asynclock_event"], what = what.__name__, LINES[what].several
    log.log(level, "asynclock: and %s more %s", f"{count:,}", what, extra=extra)
