"""A worker that charges the orders on a list. Start as many as you like: each order is charged once.

Each worker takes what no other one is at:

    ASYNCLOCK_URLS=embedded: python examples/worker.py 1 2 3 4 5
"""

import argparse
import asyncio
from collections import deque

from shop import Shop

from asynclock import redlock


async def work(orders: list[int], shop: Shop, timeout: float) -> None:
    """Charge each order that nobody has charged yet."""
    todo = deque(orders)
    while todo:
        order_id = todo.popleft()
        lease = await redlock(f"order:{order_id}").acquire(timeout=timeout)
        if lease is None:
            print(f"order {order_id}: somebody else is at it", flush=True)
            todo.append(order_id)  # not done yet, and its worker may die: look again after the others
            continue
        async with lease:
            # The lock says that nobody is at it now; only the shop knows whether somebody was.
            if shop.is_charged(order_id):
                print(f"order {order_id}: done already", flush=True)
                continue
            await shop.charge(order_id, fence=lease.fence)
        print(f"order {order_id}: charged, fencing token {lease.fence}", flush=True)


async def main(orders: list[int], timeout: float) -> None:
    """Connect, work, hang up."""
    with Shop() as shop:
        async with redlock:
            await work(orders, shop, timeout)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("orders", type=int, nargs="*", default=[1, 2, 3, 4, 5])
    parser.add_argument("--timeout", type=float, default=2.0, help="how long to wait for one order, in seconds")
    parser.add_argument("--lease", type=float, default=30.0, help="how long a dead worker keeps an order, in seconds")
    args = parser.parse_args()
    redlock.configure(lease=args.lease)
    asyncio.run(main(args.orders, args.timeout))
