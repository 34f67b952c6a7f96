"""The form that other libraries taught."""

from asynclock import Redlock


async def work() -> None: ...


async def main(redlock: Redlock) -> bool:
    lock = redlock("order:42")
    if await lock.acquire(timeout=0):
        try:
            await work()
        finally:
            await lock.release()
    return await lock.locked()
