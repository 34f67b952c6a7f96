"""What can go wrong, as a tree.

    LockError(Exception)                  .name: the lock's name, "" where no one lock is meant
     +-- LockTimeout (TimeoutError)       somebody else held it for the whole timeout
     +-- LockLost                         it was ours and ended under us        .reason
     +-- LockNotHeld                      we gave it back, or never had it
     +-- SelfDeadlock (RuntimeError)      this task would wait for itself
     +-- QuorumUnavailable                a majority of the nodes is out of reach   .errors
     +-- Unsupported                      this store cannot keep what was asked
     +-- ConfigError (ValueError)         the call, an option or a server's set-up is wrong

"Held by somebody" and "out of reach" are never the same answer. Every error pickles, and none shows an id, a handle
or a password.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

Reason: TypeAlias = Literal["expired", "taken", "broken", "max_hold", "closed"]

_WHY: dict[Reason, str] = {
    "expired": "its lease ran out before it could be renewed",
    "taken": "somebody else holds the name now",
    "broken": "its key was deleted on the servers, by break_lock or by hand",
    "max_hold": "it was held for max_hold seconds",
    "closed": "its client was closed",
}


class LockError(Exception):
    """The base of all errors of asynclock."""

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions pickle by their args; keyword-only state rides along as the instance's dict.
        return _rebuild, (type(self), self.args, self.__dict__)


class LockTimeout(LockError, TimeoutError):
    """Somebody else held the lock for the whole timeout."""


class LockLost(LockError):
    """The lock was ours and ended under us: what follows the loss ran unguarded."""

    reason: Reason

    def __init__(self, name: str, reason: Reason) -> None:
        super().__init__(f"lost the lock {brief(name)}: {_WHY[reason]}", name=name)
        self.reason = reason


class LockNotHeld(LockError):
    """We gave the lock back or away ourselves, or never had it."""


class SelfDeadlock(LockError, RuntimeError):
    """This task holds the name and would wait for itself."""


class QuorumUnavailable(LockError):
    """A majority of the nodes is out of reach; `errors` has what each of them said."""

    errors: Mapping[str, Exception]

    def __init__(self, message: str, *, name: str = "", errors: Mapping[str, Exception] | None = None) -> None:
        super().__init__(message, name=name)
        self.errors = dict(errors or {})


class Unsupported(LockError):
    """This store, or this option, cannot keep what was asked."""


class ConfigError(LockError, ValueError):
    """A url, name or option is wrong, or a server refuses to serve; the message says what to do."""


def brief(name: str) -> str:
    """A name as messages show it: quoted, and cut where it is huge."""
    return repr(name if len(name) <= 80 else f"{name[:77]}...")


def _rebuild(cls: type[LockError], args: tuple[Any, ...], state: dict[str, Any]) -> LockError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error
