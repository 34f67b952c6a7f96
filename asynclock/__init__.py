"""Distributed locks for asyncio: leases, a watchdog, fencing tokens; over Redis, a database or ZooKeeper.

from asynclock import Redlock

redlock = Redlock("redis://a", "redis://b", "redis://c")

async with redlock("order:42") as lease:
    await charge(fence=lease.fence)

The public modules are this one, `asynclock.stores`, `asynclock.events`, `asynclock.info`, `asynclock.aiohttp`,
`asynclock.fastapi`, `asynclock.fencing`, `asynclock.otel`, `asynclock.blocking` (the locks for code without asyncio),
`asynclock.testing` and `asynclock.testing.plugin`. All other modules are private, whatever their names.
"""

from asynclock._errors import (
    ConfigError,
    LockError,
    LockLost,
    LockNotHeld,
    LockTimeout,
    QuorumUnavailable,
    SelfDeadlock,
    Unsupported,
)
from asynclock._options import ClientOptions, LockOptions
from asynclock.client import Redlock, redlock
from asynclock.info import Health, Holder, LockInfo, NodeHealth, Waiter
from asynclock.locks.decorators import Skipped
from asynclock.locks.lease import Lease, current_lease
from asynclock.locks.lock import Lock
from asynclock.stores.port import Store

__all__ = [
    "ClientOptions",
    "ConfigError",
    "Health",
    "Holder",
    "Lease",
    "Lock",
    "LockError",
    "LockInfo",
    "LockLost",
    "LockNotHeld",
    "LockOptions",
    "LockTimeout",
    "NodeHealth",
    "QuorumUnavailable",
    "Redlock",
    "SelfDeadlock",
    "Skipped",
    "Store",
    "Unsupported",
    "Waiter",
    "current_lease",
    "redlock",
]


def __getattr__(name: str) -> str:
    """`__version__`, read at first use: an import does not pay for it."""
    if name == "__version__":
        from asynclock._version import version

        return version()
    raise AttributeError(f"module 'asynclock' has no attribute {name!r}")
