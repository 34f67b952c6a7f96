"""A worker that charges the orders on a list. Start as many workers as you like: each order is charged once.

Each worker takes the orders that no other worker charges at the moment:

    ASYNCLOCK_URLS=embedded: python examples/worker.py 1 2 3 4 5

SIGTERM stops it and releases its lock at once. The shop's journal then says that its charge is in doubt. Another worker
charges the order again, with the same idempotency key, so the payment provider takes the money once.
"""

import argparse
from collections import deque

from graceful import run
from shop import Shop

from asynclock import redlock


async def work(orders: list[int], shop: Shop, timeout: float) -> None:
    """Charge each order that nobody has charged yet."""
    todo = deque(orders)
    while todo:
        order_id = todo.popleft()
        lease = await redlock(f"order:{order_id}").acquire(timeout=timeout)
        if lease is None:
            print(f"order {order_id}: another worker charges it", flush=True)
            todo.append(order_id)  # not done yet, and the other worker may die: try again after the other orders
            continue
        async with lease:
            # The lock says that no other worker charges it now. Only the shop knows whether it is charged already.
            if shop.is_charged(order_id):
                print(f"order {order_id}: done already", flush=True)
                continue
            await shop.charge(order_id, fence=lease.fence)
        print(f"order {order_id}: charged, fencing token {lease.fence}", flush=True)


async def main(orders: list[int], timeout: float) -> None:
    """Connect, work, disconnect."""
    with Shop() as shop:
        async with redlock:
            await work(orders, shop, timeout)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("orders", type=int, nargs="*", default=[1, 2, 3, 4, 5])
    parser.add_argument("--timeout", type=float, default=2.0, help="seconds to wait for one order")
    parser.add_argument("--lease", type=float, default=30.0, help="seconds for which a dead worker keeps an order")
    args = parser.parse_args()
    redlock.configure(lease=args.lease)
    run(main(args.orders, args.timeout))
