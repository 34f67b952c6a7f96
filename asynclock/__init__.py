"""Distributed locks for asyncio: leases, a watchdog, fencing tokens; over one Redis or a quorum of them.

from asynclock import Redlock

redlock = Redlock("redis://a", "redis://b", "redis://c")

async with redlock("order:42") as lease:
    await charge(fence=lease.fence)
"""

from asynclock._decorators import Skipped
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
from asynclock._info import Health, Holder, LockInfo, NodeHealth, Waiter
from asynclock._lease import Lease
from asynclock._lock import Lock
from asynclock._options import ClientOptions, LockOptions
from asynclock._ports import Store
from asynclock.client import Redlock, redlock

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
    "redlock",
]
