"""acquire in both forms: with a timeout there may be no lease; without, there is one."""

from datetime import timedelta

from asynclock import Lease, Redlock


async def try_it(redlock: Redlock) -> bool:
    lease = await redlock("order:42", lease=10).acquire(timeout=2.0)
    if lease:
        async with lease as same:
            same.ensure_held()
            return same.held and same.remaining > 0
    return False


async def wait_for_it(redlock: Redlock) -> Lease:
    return await redlock("order:42").acquire(timeout=None)


async def patient(redlock: Redlock) -> int | None:
    lease = await redlock("order:42").acquire(timeout=timedelta(minutes=1))
    if lease is None:
        return None
    await lease.release()
    return lease.fence


async def default(redlock: Redlock) -> Lease | None:
    return await redlock("order:42", timeout=1).acquire()
