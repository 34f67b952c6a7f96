"""Observers: the listeners of one client, to which its sessions tell their events."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from typing import TYPE_CHECKING
from weakref import WeakSet

from asynclock._errors import ConfigError
from asynclock.acquire.journal import write_debug

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynclock.events import Event

log = logging.getLogger("asynclock")


class Observers:
    """Shared by all sessions of a client. `active` is empty while nobody listens, and while the logger does not log
    DEBUG: then no event of an acquire or a release is made. The threads of several loops may use it: it is one list,
    whose operations are atomic."""

    __slots__ = ("__weakref__", "active")

    def __init__(self) -> None:
        self.active: list[Callable[[Event], object]] = [*_of_all_clients]
        _all_observers.add(self)

    def add(self, listener: Callable[[Event], object]) -> Callable[[], None]:
        """Tell `listener` each event from now on. Returns a function that ends this. Raises ConfigError."""
        told = guarded(listener)
        self.active.append(told)
        self.look_at_level()

        def remove() -> None:
            with contextlib.suppress(ValueError):  # a second call has no effect
                self.active.remove(told)

        return remove

    def look_at_level(self) -> None:
        """Begin or end to log each acquire and release, by the level of the logger. A session calls this when it
        begins, and at each renewal."""
        if log.isEnabledFor(logging.DEBUG) is not (write_debug in self.active):
            if write_debug in self.active:
                self.active.remove(write_debug)
            else:
                self.active.append(write_debug)

    def tell(self, event: Event) -> None:
        """Call each listener with the event. A KeyboardInterrupt or SystemExit of one is raised by the loop in its next
        turn, so that the work goes on that the event is about: it may have a waiter to wake."""
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
    """Tell `listener` each event of all clients, also of those that are made later. For `asynclock.testing`. Returns a
    function that ends this."""
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
            # would close the connection whose reply is being handled, or end the watch over a hold.
            if not self._failed:
                self._failed = True
                log.exception(
                    "asynclock: the listener %r raised an exception for %r; its later exceptions are not logged",
                    self._listener,
                    event,
                )
