"""Every option there is, of a client and of a lock, as numbers and as timedeltas."""

from datetime import timedelta

from asynclock import ClientOptions, LockOptions, Redlock

client: ClientOptions = {
    "prefix": "lock:",
    "max_lease": 120,
    "node_timeout": None,
    "patience": 5.0,
    "max_block": 30,
    "fence_memory": timedelta(hours=1),
    "renew": "thread",
    "trust_restarts": False,
    "lease": timedelta(seconds=90),
}
redlock = Redlock("valkey://a", **client)

careful: LockOptions = {"renew": "thread", "max_hold": 60, "metadata": "nightly"}
lock = redlock(
    "order:42",
    lease=10,
    timeout=timedelta(minutes=1),
    renew=False,
    max_hold=None,
    min_hold=0.5,
    cancel_on_lost=False,
    metadata="by hand",
    fencing=True,
)
other = redlock("order:43", **careful)
name: str = lock.name
