"""The calls of operators."""

from asynclock import Holder, LockInfo, Redlock, Waiter


async def main(redlock: Redlock) -> bool:
    info: LockInfo = await redlock.inspect("pool")
    waiters: tuple[Waiter, ...] = info.waiters
    tasks: int = sum(waiter.tasks for waiter in waiters)
    free: int | None = info.free
    held: list[Holder] = [holder async for holder in redlock.holders()]
    broken: bool = await redlock.break_lock("pool") or await redlock.break_lock("pool", foreign=True)
    locked: bool = await redlock.semaphore("pool", 3).locked()
    return bool(tasks and free and held and broken and locked)
