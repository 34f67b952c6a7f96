"""An application with FastAPI: each way to name a lock, and each kind."""

from typing import Annotated

from fastapi import FastAPI

from asynclock import Lease, Lock, LockOptions, Redlock, redlock
from asynclock.fastapi import Locked, install

app = FastAPI()
install(app, redlock, busy_status=423, ready="/readyz")
install(FastAPI())

options: LockOptions = {"timeout": 5, "metadata": "charge"}


async def tenant(tenant_id: str) -> str:
    return f"tenant:{tenant_id}"


def pool(client: Redlock, name: str) -> Lock:
    return client.semaphore(name, 3)


@app.post("/orders/{order_id}/charge")
async def charge(order_id: int, lease: Annotated[Lease, Locked("order:{order_id}", **options)]) -> dict[str, int]:
    same: Lease = lease
    return {"order": order_id, "fence": same.fence}


@app.get("/orders/{order_id}")
async def read(order_id: int, lease: Annotated[Lease, Locked("order:{order_id}", kind="read")]) -> float:
    return lease.remaining + order_id


@app.post("/orders/{order_id}/move", dependencies=[Locked("order:{order_id}", tenant, timeout=5, cancel_body=True)])
async def move(order_id: int) -> int:
    return order_id


@app.post("/reports", dependencies=[Locked("reports", kind=pool)])
async def report() -> None: ...
