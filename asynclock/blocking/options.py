"""The options of `asynclock.blocking`: those of asynclock, and `on_lost`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from asynclock import _options
from asynclock._errors import ConfigError, LockLost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    OnLost: TypeAlias = Callable[[LockLost], object]
    OnLostNow: TypeAlias = Callable[[], OnLost | None]
    """Gives the `on_lost` of a lock when it is acquired: that of its client may have been set since it was made."""


class LockOptions(_options.LockOptions, total=False):
    """The options of every lock. Given to the client, they are the defaults of its locks. Times are in seconds.
    `cancel_on_lost` is False, always: a thread cannot be cancelled."""

    on_lost: Callable[[LockLost], object]
    """Called with the LockLost when the lease is lost, in a thread of the library. By then the owner may be anywhere in
    its work. An exception is logged."""


class ClientOptions(_options.ClientOptions, total=False):
    """The options of a client."""

    on_lost: Callable[[LockLost], object]
    """As in LockOptions."""


def split(options: Mapping[str, Any]) -> tuple[OnLost | None, Any]:
    """`on_lost`, if it is given, and the options that the async classes know. Raises ConfigError."""
    if not options:
        return None, options
    rest = dict(options)
    on_lost = rest.pop("on_lost", None)
    if "on_lost" in options and not callable(on_lost):
        raise ConfigError(f"on_lost is a function of one LockLost, not {type(on_lost).__name__}")
    if rest.get("cancel_on_lost") is True:
        raise ConfigError(
            "a thread cannot be cancelled: leave cancel_on_lost out. The block raises LockLost at its end; before "
            "that, ask lease.ensure_held(), or give on_lost="
        )
    return on_lost, rest
