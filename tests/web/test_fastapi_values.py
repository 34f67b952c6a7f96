"""asynclock.fastapi and the values of a request: what its validation leaves to the endpoint, and values that name no
lock."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import pytest
from fastapi import FastAPI, WebSocket
from fastapi.testclient import TestClient
from pydantic import BaseModel, model_validator

from asynclock import LockTimeout, Redlock
from asynclock.fastapi import Locked, install
from asynclock.stores import MemoryStore
from tests.support.web import http


class Payment(BaseModel):
    """In cents, of a request that has euros; the validator changes the JSON that it gets."""

    id: int
    cents: int

    @model_validator(mode="before")
    @classmethod
    def _converted(cls, data: Any) -> Any:
        data["cents"] = data.pop("euros") * 100
        data["id"] = data.pop("orderId")
        return data


@pytest.fixture
def app() -> FastAPI:
    made = FastAPI()
    install(made, Redlock(MemoryStore()))
    return made


async def test_the_endpoint_gets_the_body_as_without_a_lock(app: FastAPI) -> None:
    """A validator that changes its input sees the JSON of the request each time: for the name and for the endpoint."""

    @app.post("/pay")
    async def pay(payment: Payment, lease: Annotated[Any, Locked("order:{payment.id}")]) -> tuple[str, int]:
        return lease.name, payment.cents

    async with http(app) as web:
        assert (await web.post("/pay", json={"orderId": 7, "euros": 5})).json() == ["order:7", 500]


@pytest.mark.parametrize("value", ["", "%ED%A0%80"], ids=["empty", "surrogate"])
async def test_a_value_that_names_no_lock(app: FastAPI, value: str) -> None:
    """The request is wrong, and not the server: 422."""

    @app.get("/x")
    async def look(shop: str, lease: Annotated[Any, Locked("shop:{shop}")]) -> str:
        return str(lease.name)

    async with http(app) as web:
        answer = await web.get(f"/x?shop={value}")
        assert (await web.get("/x?shop=7")).json() == "shop:7"
    if value:
        assert answer.status_code == 200  # the replacement character is a name as any other
    else:
        assert answer.status_code == 422
        assert answer.json()["detail"][0]["type"] == "lock_name"
        assert "shop:" not in answer.text


async def test_a_name_that_is_reserved(app: FastAPI) -> None:
    """The same for the whole name."""

    @app.get("/x")
    async def look(name: str, lease: Annotated[Any, Locked("{name}")]) -> None: ...

    async with http(app) as web:
        assert (await web.get("/x?name=asynclock~x")).status_code == 422


class Repeats:
    """A middleware that has read the body, and gives it again at each receive, without an await."""

    def __init__(self, app: Any, body: bytes) -> None:
        self.app, self.body = app, body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        del receive

        async def again() -> Any:
            return {"type": "http.request", "body": self.body, "more_body": False}

        await self.app(scope, again, send)


@pytest.mark.parametrize("body", [b"", b"x"], ids=["empty", "one byte"])
async def test_a_middleware_that_repeats_the_body(app: FastAPI, body: bytes) -> None:
    """It never disconnects. The request is served, and the event loop goes on."""
    app.add_middleware(Repeats, body=body)

    @app.post("/")
    async def pay(lease: Annotated[Any, Locked("x", cancel_body=True)]) -> str:
        await asyncio.sleep(0.01)
        return str(lease.name)

    async with http(app) as web:
        assert (await web.post("/", content=body)).json() == "x"


def test_an_error_of_a_lock_in_a_websocket(app: FastAPI) -> None:
    """It reaches the server as any other exception: a websocket that was accepted has no HTTP answer."""

    @app.websocket("/ws")
    async def talk(socket: WebSocket) -> None:
        await socket.accept()
        raise LockTimeout("busy", name="x", waited=0.0)

    with pytest.raises(LockTimeout, match="busy"), TestClient(app).websocket_connect("/ws") as socket:
        socket.receive_text()
