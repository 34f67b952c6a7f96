"""A web service that charges each order once, however many processes serve it. FastAPI.

Start it, as many times as you like (each on a port of its own), and charge an order:

    ASYNCLOCK_URLS=embedded: python examples/fastapi_app.py --port 8000
    curl -X POST http://127.0.0.1:8000/orders/42/charge
"""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import uvicorn
from fastapi import FastAPI, Request
from shop import Shop

from asynclock import Lease, redlock
from asynclock.fastapi import Locked, install


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Open the shop."""
    with Shop() as app.state.shop:
        yield


app = FastAPI(lifespan=lifespan)
install(app, redlock, ready="/ready")


@app.post("/orders/{order_id}/charge")
async def charge(
    order_id: int, request: Request, lease: Annotated[Lease, Locked("order:{order_id}")]
) -> dict[str, int]:
    """Charge the order, or find that it is charged. The response has the fencing token of this request."""
    shop: Shop = request.app.state.shop
    if not shop.is_charged(order_id):  # by an earlier request: a second click, or a client that tries again
        await shop.charge(order_id, fence=lease.fence)
    return {"order": order_id, "fence": lease.fence}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--wait", type=float, default=5.0, help="seconds to wait for an order that is being charged")
    parser.add_argument("--grace", type=int, default=10, help="seconds for running requests to end after SIGTERM")
    args = parser.parse_args()
    redlock.configure(timeout=args.wait)
    # After that time uvicorn cancels them, and each releases its lock. Without a limit it would wait for ever.
    uvicorn.run(app, port=args.port, timeout_graceful_shutdown=args.grace)
