"""A web service that charges each order once, however many processes serve it. aiohttp.

Start it, as many times as you like (each on a port of its own), and charge an order:

    ASYNCLOCK_URLS=embedded: python examples/aiohttp_app.py --port 8000
    curl -X POST http://127.0.0.1:8000/orders/42/charge
"""

import argparse
from collections.abc import AsyncIterator

from aiohttp import web
from shop import Shop

from asynclock import redlock
from asynclock.aiohttp import setup

SHOP = web.AppKey("shop", Shop)


async def charge(request: web.Request) -> web.Response:
    """Charge the order, or find that it is charged. The response has the fencing token of this request."""
    order_id, shop = int(request.match_info["order_id"]), request.app[SHOP]
    async with redlock(f"order:{order_id}") as lease:
        if not shop.is_charged(order_id):  # by an earlier request: a second click, or a client that tries again
            await shop.charge(order_id, fence=lease.fence)
    return web.json_response({"order": order_id, "fence": lease.fence})


async def lifespan(app: web.Application) -> AsyncIterator[None]:
    """Open the shop."""
    with Shop() as app[SHOP]:
        yield


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
    # handler_cancellation: a client that hangs up waits no longer. A charge that has begun runs to its end.
    # shutdown_timeout: after SIGTERM a request has so long to end; then its charge is cancelled. 0 is without limit.
    web.run_app(make_app(), host="127.0.0.1", port=args.port, handler_cancellation=True, shutdown_timeout=args.grace)
