"""Options misspelt or of the wrong type, and a client without asyncio that is used as one with it."""

from asynclock import LockLost, blocking
from asynclock.blocking import ClientOptions, Lease, Lock, LockOptions, Redlock

redlock = Redlock("redis://a")

redlock("order:42", leese=30)  # E:
redlock("order:42", lease="30")  # E:
redlock("order:42", prefix="x")  # E:
redlock(42)  # E:
Redlock("redis://a", max_lease=None)  # E:
Redlock(6379)  # E:
redlock.configure("redis://a", retry_count=3)  # E:

options: LockOptions = {"on_lost": "stop"}  # E:
client: ClientOptions = {"lease": "30"}  # E:


def takes_nothing() -> None: ...


def takes_text(lost: str) -> None: ...


def takes_two(lost: LockLost, name: str) -> None: ...


redlock("order:42", on_lost=takes_nothing)  # E:
redlock("order:42", on_lost=takes_text)  # E:
Redlock("redis://a", on_lost=takes_two)  # E:
blocking.redlock.configure(on_lost=None)  # E:


async def awaits_it(lock: Lock) -> None:
    await lock.acquire(timeout=1)  # E:


async def awaits_the_release(lease: Lease) -> None:
    await lease.release()  # E:


async def enters_it_as_async(lock: Lock) -> None:
    async with lock:  # E:
        pass


def forgot_to_check(lock: Lock) -> int:
    lease = lock.acquire(timeout=1)
    return lease.fence  # E:


def closes_as_async(client: Redlock) -> None:
    client.aclose()  # E:
