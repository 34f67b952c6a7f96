"""A program without asyncio."""

from asynclock import Holder, LockLost, Skipped
from asynclock.blocking import Lease, Lock, LockOptions, Redlock, current_lease, redlock

options: LockOptions = {"lease": 10, "on_lost": lambda lost: print(lost.reason)}


def stop(lost: LockLost) -> None:
    print(lost)


@redlock.synchronized("order:{order_id}", timeout=3, on_lost=stop)
def pay(order_id: int) -> str:
    return str(order_id)


@redlock.once("mail:{user}", within=60)
def mail(user: int) -> int:
    return user


def main(client: Redlock) -> None:
    lock: Lock = client("a", fair=True, **options)
    with lock as lease:
        fence: int = lease.fence
        print(fence)
    maybe: Lease | None = lock.acquire(timeout=1)
    if maybe:
        with maybe:
            maybe.extend(lease=5)
    sure: Lease = lock.acquire(timeout=None)
    handle: str = sure.detach()
    client.adopt(handle).release()
    paid: str = pay(3)
    sent: int | Skipped = mail(4)
    result: int = client.lead("boss", lambda lease: lease.fence)
    holders: list[Holder] = list(client.holders("a"))
    inner: Lease | None = current_lease()
    print(paid, sent, result, holders, inner)
