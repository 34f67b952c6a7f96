"""The ready-made client, configured once."""

from asynclock import Redlock, redlock

redlock.configure("redis://a", lease=10)
same: Redlock = redlock


async def handler(order: int) -> int:
    async with redlock(f"order:{order}", metadata="handler") as lease:
        return lease.fence
