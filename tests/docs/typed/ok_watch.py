"""A long job that checks its lease by itself."""

import asyncio

from asynclock import Lease, Redlock


async def step() -> None: ...


async def alarm(lease: Lease) -> None:
    lost: bool = await lease.wait_lost()
    if lost:
        print(f"{lease.name} was lost")


async def main(redlock: Redlock) -> float:
    async with redlock("import", cancel_on_lost=False) as lease, asyncio.TaskGroup() as group:
        group.create_task(alarm(lease))
        while lease.held:
            await step()
            await lease.extend()
            await lease.extend(lease=20)
        return lease.remaining
