"""Observers: the listeners of one client, which receive the events of its sessions; and the log lines for these events.

The log lines go to the logger "asynclock". A line that repeats is counted, not printed.

Each record has the values of its event as attributes: `asynclock_event` is the name of the event's class, and
`asynclock_lock`, `_kind`, `_label`, `_node`, `_reason`, `_seconds`, `_outcome` and `_error` are those that it has.
`asynclock_more` is the count in the line that stands for several.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import threading
from dataclasses import fields
from logging import DEBUG, ERROR, INFO, WARNING
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet

from asynclock import events
from asynclock._errors import ConfigError, brief
from asynclock._flood import Flood

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynclock._time import Clock
    from asynclock.events import Event

log = logging.getLogger("asynclock")


class Observers:
    """Shared by all sessions of a client. `active` is empty while nobody listens, and while the logger does not log
    DEBUG: then no event of an acquire or a release is made. The threads of several loops may use it: it is one list,
    whose operations are atomic, and only a change of the level needs more than one of them."""

    __slots__ = ("__weakref__", "active")

    def __init__(self) -> None:
        self.active: list[Callable[[Event], object]] = [*_of_all_clients]
        _all_observers.add(self)

    @classmethod
    def of_nobody(cls) -> Observers:
        """Of a session that tells nothing any more."""
        nobody = cls.__new__(cls)
        nobody.active = []
        return nobody

    def add(self, listener: Callable[[Event], object]) -> Callable[[], None]:
        """Call `listener` with each event from now on. Returns a function that removes it. Raises ConfigError."""
        told = guarded(listener)
        self.active.append(told)
        self.look_at_level()

        def remove() -> None:
            with contextlib.suppress(ValueError):  # a second call has no effect
                self.active.remove(told)

        return remove

    def look_at_level(self) -> None:
        """Start or stop logging each acquire and release, depending on the level of the logger. A session calls this
        when it begins, and at each renewal."""
        if log.isEnabledFor(logging.DEBUG) is (write_debug in self.active):
            return
        with _changing:  # another thread may have found the same
            logs, wanted = write_debug in self.active, log.isEnabledFor(logging.DEBUG)
            if logs and not wanted:
                self.active.remove(write_debug)
            elif wanted and not logs:
                self.active.append(write_debug)

    def tell(self, event: Event) -> None:
        """Call each listener with the event. If one raises KeyboardInterrupt or SystemExit, the loop raises it in its
        next turn, so that the work in progress completes first: it may have a waiter to wake."""
        for listener in tuple(self.active):  # a listener may add or remove one
            try:
                listener(event)
            except BaseException as error:
                asyncio.get_running_loop().call_soon(_raise, error)

    def tell_caller(self, event: Event) -> None:
        """As `tell`, but raises a KeyboardInterrupt or SystemExit of a listener."""
        for listener in tuple(self.active):
            listener(event)


def observe_all(listener: Callable[[Event], object]) -> Callable[[], None]:
    """Call `listener` with each event of all clients, also of those that are made later. For `asynclock.testing`.
    Returns a function that removes it."""
    _of_all_clients.append(listener)
    for each in list(_all_observers):
        each.active.append(listener)

    def remove() -> None:
        _of_all_clients.remove(listener)
        for each in list(_all_observers):
            with contextlib.suppress(ValueError):
                each.active.remove(listener)

    return remove


_of_all_clients: list[Callable[[Event], object]] = []

_all_observers: WeakSet[Observers] = WeakSet()

_changing = threading.RLock()
"""Held while a change of the logger's level is followed. A signal handler may look at it in such a moment."""


def _after_fork() -> None:
    global _changing  # noqa: PLW0603 - another thread of the parent may have held it
    _changing = threading.RLock()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)


def _raise(error: BaseException) -> None:
    raise error


def guarded(listener: Callable[[Event], object]) -> Callable[[Event], object]:
    """The same listener, whose exceptions are logged once. Raises ConfigError if it cannot be one."""
    if not callable(listener):
        raise ConfigError(f"a listener is a function of one event, not {type(listener).__name__}")
    if inspect.iscoroutinefunction(listener) or inspect.iscoroutinefunction(type(listener).__call__):
        raise ConfigError(
            "a listener is called and not awaited: pass a plain function, which may put the event into an "
            "asyncio.Queue for a task of yours"
        )
    return _Guarded(listener)


class _Guarded:
    """A listener whose exceptions are logged once."""

    __slots__ = ("_failed", "_listener")

    def __init__(self, listener: Callable[[Event], object]) -> None:
        self._listener = listener
        self._failed = False

    def __call__(self, event: Event) -> None:
        try:
            self._listener(event)
        except (Exception, asyncio.CancelledError):
            # A CancelledError here is no cancel of a task: the listener has read the result of a cancelled future. It
            # would close the connection whose reply is being handled, or stop the watchdog's checks of a hold.
            if not self._failed:
                self._failed = True
                log.exception(
                    "asynclock: the listener %r raised an exception for %r; its later exceptions are not logged",
                    self._listener,
                    event,
                )


class LogLine(NamedTuple):
    """How an event is logged."""

    level: int
    text: str
    several: str  # the noun of the line "and N more ..."


LINES: dict[type[Event], LogLine] = {
    events.NodeDown: LogLine(WARNING, "asynclock: the node %(node)s is down: %(error)s", "times that a node went down"),
    events.Lost: LogLine(WARNING, "asynclock: %(why)s (it was held for %(seconds).3g s)", "lost leases"),
    events.ReleaseFailed: LogLine(
        WARNING,
        "asynclock: the release of %(lock)s had no majority; its lease ends by itself: %(error)s",
        "releases without a majority",
    ),
    events.LoopLagged: LogLine(
        WARNING,
        "asynclock: the event loop did not run for %(seconds).3g s; only leases with renew='thread' were renewed in "
        "that time: run code that blocks in a thread (asyncio.to_thread)",
        "times that the event loop did not run",
    ),
    events.NodeUp: LogLine(INFO, "asynclock: the node %(node)s is up", "times that a node came up"),
    events.Quarantined: LogLine(
        INFO,
        "asynclock: the server of %(node)s has restarted or was replaced, and casts no vote for %(seconds).0f s",
        "quarantines",
    ),
    events.QuarantineEnded: LogLine(INFO, "asynclock: the node %(node)s votes again", "ends of quarantines"),
    events.Broken: LogLine(INFO, "asynclock: this client broke the lock %(lock)s", "broken locks"),
    events.Acquired: LogLine(DEBUG, "asynclock: acquired %(lock)s (%(kind)s) after %(seconds).3g s", ""),
    events.TimedOut: LogLine(DEBUG, "asynclock: gave up %(lock)s (%(kind)s) after %(seconds).3g s: it is held", ""),
    events.Unavailable: LogLine(DEBUG, "asynclock: gave up %(lock)s (%(kind)s) after %(seconds).3g s: no majority", ""),
    events.Released: LogLine(DEBUG, "asynclock: released %(lock)s (%(kind)s), held for %(seconds).3g s", ""),
    events.Detached: LogLine(DEBUG, "asynclock: detached %(lock)s (%(kind)s), held for %(seconds).3g s", ""),
    events.Renewed: LogLine(DEBUG, "asynclock: the renewal of %(lock)s (%(kind)s) has the outcome %(outcome)s", ""),
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
        """Whether to log a fault of that sort now; if not, it is counted. `several`: as in LogLine."""
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
