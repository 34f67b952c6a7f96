"""A service that is handed its client, and a helper that is handed a lock."""

from contextlib import AsyncExitStack
from typing import Unpack

from asynclock import Lock, LockOptions, Redlock


class Orders:
    def __init__(self, redlock: Redlock) -> None:
        self._redlock = redlock

    def lock(self, number: int, **options: Unpack[LockOptions]) -> Lock:
        return self._redlock(f"order:{number}", **options)

    async def pay(self, number: int) -> int:
        async with self.lock(number, timeout=5) as lease:
            return lease.fence

    async def pay_all(self, *numbers: int) -> list[int]:
        async with AsyncExitStack() as stack:
            return [(await stack.enter_async_context(self.lock(number))).fence for number in sorted(numbers)]
