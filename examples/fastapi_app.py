"""A web service that charges an order once at a time, however many processes serve it. FastAPI.

Start it, as many times as you like (each on a port of its own), and charge an order:

    ASYNCLOCK_URLS=embedded: python examples/fastapi_app.py --port 8000
    curl -X POST http://127.0.0.1:8000/orders/42/charge
"""

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from shop import Shop

from asynclock import QuorumUnavailable, redlock


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Connect before the first request. After the last one, release all locks and disconnect."""
    with Shop() as app.state.shop:
        async with redlock:
            yield


app = FastAPI(lifespan=lifespan)


@app.post("/orders/{order_id}/charge")
async def charge(order_id: int, request: Request) -> Response:
    """Charge the order. The response has the fencing token of the charge."""
    lease = None
    async with while_connected(request):  # only the wait: once the charge has begun, it runs to its end
        lease = await redlock(f"order:{order_id}").acquire()
        if lease is None:  # another request charged this order for the whole timeout: the client may try again
            return JSONResponse({"detail": f"order {order_id} is being charged"}, status_code=409)
    if lease is None:
        return Response(status_code=499)  # the client has disconnected, so nobody receives this
    async with lease:
        await request.app.state.shop.charge(order_id, fence=lease.fence)
    return JSONResponse({"order": order_id, "fence": lease.fence})


@asynccontextmanager
async def while_connected(request: Request) -> AsyncIterator[None]:
    """Cancel the body when the client disconnects. Without this, uvicorn lets the handler run on."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    with anyio.CancelScope() as scope:
        watcher = asyncio.create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()


@app.exception_handler(QuorumUnavailable)
async def out_of_reach(_: Request, error: Exception) -> Response:
    """The lock servers are out of reach, so the order is not charged."""
    return JSONResponse({"detail": str(error)}, status_code=503, headers={"Retry-After": "1"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--wait", type=float, default=5.0, help="seconds to wait for an order that is being charged")
    parser.add_argument("--grace", type=int, default=10, help="seconds for running requests to end after SIGTERM")
    args = parser.parse_args()
    redlock.configure(timeout=args.wait)
    # After that time uvicorn cancels them, and each releases its lock. Without a limit it would wait for ever.
    uvicorn.run(app, port=args.port, timeout_graceful_shutdown=args.grace)
