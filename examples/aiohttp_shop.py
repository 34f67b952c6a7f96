"""A shop that pays each order once, however many processes serve it. aiohttp and PostgreSQL; see orders.py.

ASYNCLOCK_URLS=embedded: python examples/aiohttp_shop.py --port 8000
curl -X POST http://127.0.0.1:8000/orders/1/pay
"""

import argparse
import logging
from collections.abc import AsyncIterator

from aiohttp import web
from orders import Declined, NoAnswer, Orders, open_orders

from asynclock import redlock
from asynclock.aiohttp import setup

ORDERS = web.AppKey("orders", Orders)
logger = logging.getLogger("shop")


async def pay(request: web.Request) -> web.Response:
    """Pay the order, or find that it is paid."""
    order_id = int(request.match_info["order_id"])
    try:
        async with redlock(f"order:{order_id}"):
            receipt = await request.app[ORDERS].pay(order_id)
    except Declined as declined:
        logger.warning("declined: %s", declined)
        raise web.HTTPPaymentRequired(text="The payment was declined.") from declined
    except NoAnswer as error:
        logger.warning("no answer of the payment provider: %s", error)
        raise web.HTTPServiceUnavailable(text="The payment provider does not answer. Try again.") from error
    if receipt is None:
        raise web.HTTPNotFound(text="There is no such order.")
    return web.json_response({"order": order_id, "receipt": receipt})


async def lifespan(app: web.Application) -> AsyncIterator[None]:
    """Connect with the database and the provider."""
    async with open_orders() as app[ORDERS]:
        yield


def make_app() -> web.Application:
    """The shop."""
    app = web.Application()
    setup(app, redlock, ready="/ready")
    app.cleanup_ctx.append(lifespan)
    app.router.add_post(r"/orders/{order_id:\d+}/pay", pay)
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--wait", type=float, default=5.0, help="seconds to wait for an order that is being paid")
    parser.add_argument("--lease", type=float, default=30.0, help="seconds for which a dead process keeps an order")
    args = parser.parse_args()
    redlock.configure(timeout=args.wait, lease=args.lease)
    # shutdown_timeout: longer than the longest payment, so that SIGTERM cuts none off.
    web.run_app(make_app(), host="127.0.0.1", port=args.port, handler_cancellation=True, shutdown_timeout=20)
