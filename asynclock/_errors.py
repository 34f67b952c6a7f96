"""The errors, as a tree.

    LockError(Exception)                  .name: the lock's name, "" where the error is about no single lock
     +-- LockTimeout (TimeoutError)       another owner held the lock for the whole timeout            .holder .waited
     +-- LockLost                         the lock was held, and its lease ended before its release    .reason .errors
     +-- LockNotHeld                      the lock was released already, or never acquired
     +-- SelfDeadlock (RuntimeError)      this task would wait for itself
     +-- QuorumUnavailable                a majority of the nodes is out of reach                      .errors
     +-- Unsupported                      this store cannot do what the call asks for
     +-- StaleToken                       asynclock.fencing: a later holder has written the data
     +-- ConfigError (ValueError)         the call, an option or the set-up of a server is wrong

"Another owner holds it" and "out of reach" are always two different errors. Every error pickles. No error shows an id,
a handle or a password.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from asynclock._untrusted import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asynclock.info import Holder

Reason: TypeAlias = Literal["expired", "taken", "broken", "max_hold", "closed"]
"""Why a lease was lost."""

_WHY: dict[Reason, str] = {
    "expired": "its lease expired before a renewal succeeded",
    "taken": "another owner holds the name now",
    "broken": "its key was deleted on the servers, by break_lock or by hand",
    "max_hold": "it was held for max_hold seconds",
    "closed": "its client was closed",
}

OF_PARENT = (
    "it belongs to the parent process, and goes on there and not here; acquire the lock again in this process, in an "
    "event loop of its own"
)
"""What the errors say of a forked child that uses what its parent has begun."""


class LockError(Exception):
    """The base of all errors of asynclock. `name` is the name of the lock, "" where no single lock is meant. Line feeds
    and other control characters in its message are escaped."""

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(printable(message))
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception pickles by its args alone; the instance's dict adds the keyword-only state.
        return _rebuild, (type(self), self.args, self.__dict__)


class LockTimeout(LockError, TimeoutError):
    """Another owner held the lock for the whole timeout.

    `holder` is the holder as this client last knew it, None where it knows none; of a lock with several holders it is
    one of them. `waited` is the time from the call to the error, in seconds.
    """

    holder: Holder | None
    waited: float

    def __init__(self, message: str, *, name: str = "", holder: Holder | None = None, waited: float = 0.0) -> None:
        super().__init__(message, name=name)
        self.holder = holder
        self.waited = waited


class LockLost(LockError):
    """The lock was held, and its lease ended before its release. Code that ran after the loss was not guarded.

    `reason` says why: "expired" (no renewal succeeded in time), "taken" (another owner holds the name), "broken" (the
    key was deleted), "max_hold" (the time limit of the option), "closed" (the client was closed). `errors` has what
    each node said since the last renewal that succeeded, by its address; a node without an entry said nothing. The
    message tells both.
    """

    reason: Reason
    errors: Mapping[str, Exception]

    def __init__(
        self, name: str, reason: Reason, *, why: str = "", errors: Mapping[str, Exception] | None = None
    ) -> None:
        super().__init__(f"lost the lock {brief(name)}: {why or _WHY[reason]}", name=name)
        self.reason = reason
        self.errors = dict(errors or {})


class LockNotHeld(LockError):
    """The lock was released or detached already, or never acquired."""


class SelfDeadlock(LockError, RuntimeError):
    """This task holds the name and would wait for itself."""


class QuorumUnavailable(LockError):
    """A majority of the nodes is out of reach. `errors` has the error of each node, by its address."""

    errors: Mapping[str, Exception]

    def __init__(self, message: str, *, name: str = "", errors: Mapping[str, Exception] | None = None) -> None:
        super().__init__(message, name=name)
        self.errors = dict(errors or {})


class Unsupported(LockError):
    """This store, or this option, does not support the call."""


class StaleToken(LockError):
    """The data was written under a greater fencing token: another owner held the lock after this one, and this write
    was refused. Do not try again with the same lease."""


class ConfigError(LockError, ValueError):
    """A url, a name or an option is wrong, or a server refuses a command. The message says what to do."""


def client_closed() -> ConfigError:
    """The error of a use after the close."""
    return ConfigError("this client was closed: enter it again, or make a new one")


def brief(name: str) -> str:
    """A name as messages show it: quoted, and cut at 80 characters."""
    return repr(name if len(name) <= 80 else f"{name[:77]}...")


def _rebuild(cls: type[LockError], args: tuple[Any, ...], state: dict[str, Any]) -> LockError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error
