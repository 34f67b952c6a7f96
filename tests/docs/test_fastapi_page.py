"""docs/fastapi.md: its programs run as they stand, on a real server."""

import asyncio
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from sqlalchemy import text

import asynclock
from asynclock import Redlock
from tests.support.waiters import LIMIT

PAGE = Path(__file__).parents[2] / "docs" / "fastapi.md"
FIRST, SESSION, TESTS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def run(snippet: str, name: str) -> dict[str, Any]:
    """The names of a module with this text."""
    module = sys.modules[name] = ModuleType(name)
    exec(compile(snippet, name, "exec"), module.__dict__)
    return module.__dict__


@pytest.fixture
def configured(shared_urls: list[str], name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ready-made client of the programs has a prefix of its own."""
    monkeypatch.setattr(asynclock, "redlock", Redlock(shared_urls[0], prefix=name))
    return name


def http(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop")


async def test_the_first_program(configured: str) -> None:
    """It charges an order, and is ready."""
    app = run(FIRST, "first")["app"]
    async with app.router.lifespan_context(app), http(app) as web:
        assert (await web.post("/orders/07/charge")).json()["order"] == 7
        async with asyncio.timeout(LIMIT):
            while not (await web.get("/readyz")).json()["ready"]:
                pass


async def test_the_session_commits_under_the_lock(
    configured: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty requests at once for one order: each reads what the last one has committed."""
    monkeypatch.chdir(tmp_path)
    world = run(SESSION, "session")
    async with world["engine"].begin() as connection:
        await connection.execute(text("CREATE TABLE orders (id INTEGER PRIMARY KEY, charges INTEGER)"))
        await connection.execute(text("INSERT INTO orders VALUES (7, 0)"))
    app = world["app"]
    async with app.router.lifespan_context(app), http(app) as web:
        answers = await asyncio.gather(*(web.post("/orders/7/charge") for _ in range(50)))
    assert {each.status_code for each in answers} == {200}
    async with world["engine"].connect() as connection:
        assert (await connection.execute(text("SELECT charges FROM orders"))).scalar() == 50
    await world["engine"].dispose()


def test_the_test_of_the_page() -> None:
    """It passes."""
    run(TESTS, "tests_of_a_user")["test_charge"]()
