"""A lease that may be None, is not awaited, or is no lease at all."""

from asynclock import Lease, Lock, LockLost, Redlock


async def forgot_to_check(lock: Lock) -> int:
    lease = await lock.acquire(timeout=1.0)
    return lease.fence  # E:


async def forgot_to_check_in_a_block(lock: Lock) -> None:
    async with await lock.acquire(timeout=0):  # E:
        pass


async def default_may_be_none(lock: Lock) -> Lease:
    return await lock.acquire()  # E:


async def forgot_to_await(lock: Lock) -> int:
    lease = lock.acquire(timeout=None)
    return lease.fence  # E:


async def forgot_to_await_the_release(lock: Lock, lease: Lease) -> None:
    lock.release()  # E:
    lease.release()  # E:
    lease.extend()  # E:


async def awaits_a_lock(redlock: Redlock) -> None:
    await redlock("order:42")  # E:


async def awaits_what_is_no_coroutine(lease: Lease) -> None:
    await lease.ensure_held()  # E:


async def positional_timeout(lock: Lock) -> None:
    await lock.acquire(2.0)  # E:


async def text_as_timeout(lock: Lock) -> None:
    await lock.acquire(timeout="2")  # E:


async def positional_extend(lease: Lease) -> None:
    await lease.extend(10)  # E:


def sync_with(lock: Lock) -> None:
    with lock:  # E:
        pass


def sets_what_is_read(lease: Lease, lock: Lock) -> None:
    lease.fence = 3  # E:
    lease.held = True  # E:
    lock.name = "other"  # E:


def calls_what_is_a_property(lease: Lease) -> bool:
    return lease.held()  # E:


async def calls_the_lock(lock: Lock) -> None:
    async with lock():  # E:
        pass


async def uses_a_block_of_a_client_as_a_lock(redlock: Redlock) -> int:
    async with redlock as lease:
        return lease.fence  # E:


def compares_a_reason_that_there_is_not(error: LockLost) -> None:
    error.reason = "timeout"  # E:
