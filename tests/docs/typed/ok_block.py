"""The first ten lines of every reader of the README."""

import asyncio

from asynclock import Lease, Redlock

redlock = Redlock("redis://a", "redis://b", "redis://c", lease=30.0)


async def charge(*, fence: int) -> str:
    await asyncio.sleep(0)
    return f"charged under {fence}"


async def main() -> str:
    async with redlock("order:42") as lease:
        same: Lease = lease
        return await charge(fence=same.fence)


if __name__ == "__main__":
    print(asyncio.run(main()))
