"""A web service that charges an order once at a time, however many processes serve it. aiohttp.

Start it, as many times as you like (each on a port of its own), and charge an order:

    ASYNCLOCK_URLS=embedded: python examples/aiohttp_app.py --port 8000
    curl -X POST http://127.0.0.1:8000/orders/42/charge
"""

import argparse
import asyncio
from collections.abc import AsyncIterator

from aiohttp import web
from shop import Shop

from asynclock import Lease, redlock
from asynclock.aiohttp import setup

SHOP = web.AppKey("shop", Shop)
CHARGES = web.AppKey("charges", set[asyncio.Task[None]])


async def charge(request: web.Request) -> web.Response:
    """Charge the order. The response has the fencing token of the charge."""
    order_id = int(request.match_info["order_id"])
    lease = await redlock(f"order:{order_id}").acquire()  # if the client disconnects, this wait is cancelled
    if lease is None:  # another request charged this order for the whole timeout: the client may try again
        return web.json_response({"detail": f"order {order_id} is being charged"}, status=409)
    # The charge has a task of its own: if the client disconnects, it runs to its end all the same.
    charges, task = request.app[CHARGES], asyncio.create_task(charge_under(lease, order_id, request.app[SHOP]))
    charges.add(task)
    task.add_done_callback(charges.discard)
    await asyncio.shield(task)
    return web.json_response({"order": order_id, "fence": lease.fence})


async def charge_under(lease: Lease, order_id: int, shop: Shop) -> None:
    """Charge the order, then release the lock."""
    async with lease:
        await shop.charge(order_id, fence=lease.fence)


async def lifespan(app: web.Application) -> AsyncIterator[None]:
    """Open the shop. After the last request, cancel the charges that are left: each releases its lock."""
    charges = app[CHARGES] = set()
    with Shop() as app[SHOP]:
        yield
        for task in charges:
            task.cancel()
        await asyncio.gather(*charges, return_exceptions=True)


def make_app() -> web.Application:
    """The service."""
    app = web.Application()
    setup(app, redlock, ready="/ready")
    app.cleanup_ctx.append(lifespan)
    app.router.add_post(r"/orders/{order_id:\d+}/charge", charge)
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--wait", type=float, default=5.0, help="seconds to wait for an order that is being charged")
    parser.add_argument("--grace", type=float, default=10, help="seconds for running requests to end after SIGTERM")
    args = parser.parse_args()
    redlock.configure(timeout=args.wait)
    # handler_cancellation: when a client disconnects, its handler is cancelled and waits no longer.
    # shutdown_timeout: after SIGTERM a request has so long to end; then its charge is cancelled. 0 is without limit.
    web.run_app(make_app(), host="127.0.0.1", port=args.port, handler_cancellation=True, shutdown_timeout=args.grace)
