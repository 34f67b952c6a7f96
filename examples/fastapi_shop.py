"""A shop that pays each order once, however many processes serve it. FastAPI and PostgreSQL; see orders.py.

ASYNCLOCK_URLS=embedded: python examples/fastapi_shop.py --port 8000
curl -X POST http://127.0.0.1:8000/orders/1/pay
"""

import argparse
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from orders import Declined, NoAnswer, open_orders

from asynclock import Lease, redlock
from asynclock.fastapi import Locked, install

logger = logging.getLogger("shop")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Connect with the database and the provider."""
    async with open_orders() as app.state.orders:
        yield


app = FastAPI(lifespan=lifespan)
install(app, redlock, ready="/ready")


@app.post("/orders/{order_id}/pay")
async def pay(
    order_id: int, request: Request, lease: Annotated[Lease, Locked("order:{order_id}")]
) -> dict[str, int | str]:
    """Pay the order, or find that it is paid."""
    try:
        receipt = await request.app.state.orders.pay(order_id)
    except Declined as declined:
        logger.warning("declined: %s", declined)
        raise HTTPException(402, "The payment was declined.") from declined
    except NoAnswer as error:
        logger.warning("no answer of the payment provider: %s", error)
        raise HTTPException(503, "The payment provider does not answer. Try again.") from error
    if receipt is None:
        raise HTTPException(404, "There is no such order.")
    return {"order": order_id, "receipt": receipt}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--wait", type=float, default=5.0, help="seconds to wait for an order that is being paid")
    parser.add_argument("--lease", type=float, default=30.0, help="seconds for which a dead process keeps an order")
    args = parser.parse_args()
    redlock.configure(timeout=args.wait, lease=args.lease)
    # Longer than the longest payment, so that SIGTERM cuts none off.
    uvicorn.run(app, port=args.port, timeout_graceful_shutdown=20)
