"""The examples as processes of their own, with one shop and its journal. The fixtures are for `tests/docs`."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from asynclock import Lease, Redlock
from tests.support import programs
from tests.support.ports import free_port
from tests.support.programs import PATIENT, PYTHONPATH

ROOT = Path(__file__).parents[2]

_T = TypeVar("_T")
Start = Callable[..., "Program"]
Serve = Callable[..., list["Program"]]
Journal = Callable[[int], list[tuple[int, str]]]
Payments = Callable[[int], int]
_numbers = itertools.count()
_IMPORTED = (
    *(*programs.LIBRARY, "asyncpg", "httpx", "sqlalchemy.ext.asyncio", "uvicorn"),
    *("aiohttp.web", "asynclock.aiohttp", "fastapi", "asynclock.fastapi"),
)


def wait_for(what: Callable[[], _T], why: str, limit: float = 30.0) -> _T:
    """What `what` answers, once it is true; fails with `why` after `limit` seconds."""
    deadline = time.monotonic() + limit
    while not (found := what()):
        assert time.monotonic() < deadline, why
        time.sleep(0.01)
    return found


class Program:
    """An example that runs in a process of its own; what it prints goes to a file."""

    def __init__(self, folder: Path, urls: list[str], example: str, args: tuple[str, ...], env: dict[str, str]) -> None:
        self.port = 0
        self._log = folder / f"{next(_numbers)}-{example}.log"
        with self._log.open("wb") as log:
            self.process = programs.Program(
                [str(ROOT / "examples" / example), *args],
                _IMPORTED,
                ("-u",),
                env={
                    **{key: value for key, value in os.environ.items() if not key.startswith("SHOP")},
                    "PYTHONPATH": PYTHONPATH,
                    "ASYNCLOCK_URLS": ",".join(urls),
                    "ASYNCLOCK_NODE_TIMEOUT": PATIENT,
                    "SHOP": str(folder / "shop.sqlite"),
                    **env,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        """All it has printed so far."""
        return self._log.read_text()

    def says(self, words: str) -> None:
        """Wait until it prints that."""
        wait_for(lambda: words in self.said or self.process.poll() is not None, f"no {words!r} in: {self.said}")
        assert words in self.said, self.said

    def serves(self) -> None:
        """Wait until it accepts connections."""
        wait_for(lambda: accepts(self.port) or self.process.poll() is not None, f"nobody on the port: {self.said}")
        assert self.process.poll() is None, self.said

    def ends(self) -> int:
        """Wait for its exit code."""
        return self.process.wait(timeout=60)

    def kill(self) -> None:
        """kill -9"""
        self.process.kill()
        self.process.wait()


def accepts(port: int) -> bool:
    """Whether a server listens there."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@pytest.fixture(params=["five"])
def urls(request: pytest.FixtureRequest, shared_urls: list[str]) -> list[str]:
    """A quorum of five, or by parameter one node."""
    return shared_urls[:1] if request.param == "one" else shared_urls


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts examples that share one shop, and ends them afterwards."""
    programs: list[Program] = []

    def program(urls: list[str], example: str, *args: str, **env: str) -> Program:
        programs.append(Program(tmp_path, urls, example, args, env))
        return programs[-1]

    yield program
    for each in programs:
        each.kill()


@pytest.fixture
def serve(start: Start) -> Serve:
    """Starts so many processes of one web app, and waits until they serve."""

    def serving(urls: list[str], example: str, count: int = 1, *, wait: float = 60.0, **env: str) -> list[Program]:
        apps = []
        for _ in range(count):
            port = free_port()
            apps.append(start(urls, example, "--port", str(port), "--wait", str(wait), **env))
            apps[-1].port = port
        for app in apps:
            app.serves()
        return apps

    return serving


@pytest.fixture
def order() -> int:
    """An order that no other test charges."""
    return os.getpid() * 1000 + next(_numbers)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Reads the shop's entries about an order: (fence, what), in the order in which things happened."""

    def entries(order: int) -> list[tuple[int, str]]:
        with contextlib.closing(sqlite3.connect(tmp_path / "shop.sqlite", timeout=10)) as shop:
            found = shop.execute("SELECT fence, what FROM journal WHERE order_id = ? ORDER BY entry", (order,))
            return found.fetchall()

    return entries


@pytest.fixture
def payments(tmp_path: Path) -> Payments:
    """How often the shop's payment provider took the money for an order."""

    def count(order: int) -> int:
        with contextlib.closing(sqlite3.connect(tmp_path / "shop.sqlite", timeout=10)) as shop:
            found: tuple[int] = shop.execute("SELECT count(*) FROM payments WHERE order_id = ?", (order,)).fetchone()
            return found[0]

    return count


async def take(urls: list[str], name: str, timeout: float) -> Lease | None:
    """Take the lock in this process, and give it back."""
    async with Redlock(*urls) as client:
        lease = await client(name).acquire(timeout=timeout)
        if lease is not None:
            await lease.release()
        return lease


def began(journal: Journal, order: int) -> bool:
    """Whether a charge of it began; not before there is a shop."""
    with contextlib.suppress(sqlite3.OperationalError):
        return bool(journal(order))
    return False


def pays(payments: Payments, order: int) -> bool:
    """Whether the payment provider has a request for it; not before there is a shop."""
    with contextlib.suppress(sqlite3.OperationalError):
        return payments(order) > 0
    return False
