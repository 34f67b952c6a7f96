"""asynclock.fastapi in a module whose annotations are strings."""

from __future__ import annotations

from typing import Annotated

import httpx
from fastapi import FastAPI

from asynclock import Lease, Redlock
from asynclock.fastapi import Locked, install

app = FastAPI()


@app.post("/orders/{order_id}")
async def charge(order_id: int, lease: Annotated[Lease, Locked("order:{order_id}")]) -> str:
    return lease.name


async def test_annotations_that_are_strings() -> None:
    """They are read as others; a route that was there before install() is found."""
    install(app, Redlock("memory:"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as web:
        assert (await web.post("/orders/07")).json() == "order:7"
