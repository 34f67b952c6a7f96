"""The locks of asynclock for code without asyncio: the same names, options and errors, without `async` and `await`.

    from asynclock.blocking import Redlock

    redlock = Redlock("redis://a", "redis://b", "redis://c")

    with redlock("order:42") as lease:
        charge(fence=lease.fence)

All clients of a process share one background thread, which runs an event loop: there leases are renewed, and notices
received. Any thread may use a client. The owner of a lease is the thread that acquired it. A forked child has a thread
of its own, and holds nothing that its parent holds. At the exit of the interpreter the holds are released.

A loss cannot cancel a thread: the block raises LockLost at its end. Long work asks `lease.ensure_held()`, or gives the
lock a function to call, with the option `on_lost`.
"""

from asynclock.blocking.client import Redlock, redlock
from asynclock.blocking.lease import Lease, current_lease
from asynclock.blocking.lock import Lock
from asynclock.blocking.options import ClientOptions, LockOptions

__all__ = ["ClientOptions", "Lease", "Lock", "LockOptions", "Redlock", "current_lease", "redlock"]
