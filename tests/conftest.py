"""Fixtures: every test runs on asyncio and on uvloop, and every promise of a lock on each deployment."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import uvloop
from hypothesis import settings

from asynclock import Redlock
from asynclock._errors import ConfigError
from asynclock.stores.embedded import server as valkey
from asynclock.stores.memory import MemoryStore
from tests.support.limits import (  # noqa: F401 - hooks of pytest
    pytest_runtest_makereport,
    pytest_runtest_teardown,
    pytest_timeout_set_timer,
)
from tests.support.servers import Server, Servers, container_urls

_numbers = itertools.count()

settings.register_profile("asynclock", deadline=None)  # a busy machine is no fault; pytest-timeout bounds a test
settings.load_profile("asynclock")


def pytest_asyncio_loop_factories(config: Any, item: Any) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    del config, item
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def _shared_urls(pool: Servers) -> tuple[list[str], list[Any]]:
    if given := os.environ.get("ASYNCLOCK_TEST_URLS"):
        return given.split(","), []
    try:
        os.environ.get("ASYNCLOCK_TEST_SERVER") or valkey.binary()
    except ConfigError:
        return container_urls(5)
    return [pool.start().url for _ in range(5)], []


@pytest.fixture(scope="session")
def shared_urls() -> Iterator[list[str]]:
    """Five servers that live as long as the tests; for tests that harm none."""
    pool = Servers()
    urls, containers = _shared_urls(pool)
    yield urls
    pool.stop()
    for container in containers:
        container.stop()


@pytest.fixture
def servers() -> Iterator[Servers]:
    """Servers of the test's own, which it may freeze and kill."""
    pool = Servers()
    yield pool
    pool.stop()


@pytest.fixture
def server(servers: Servers) -> Server:
    """One server of the test's own."""
    return servers.start()


@pytest.fixture
def five(servers: Servers) -> list[Server]:
    """Five servers of the test's own."""
    return [servers.start() for _ in range(5)]


@pytest.fixture
def name() -> str:
    """A lock's name that no other test uses."""
    return f"lock:{os.getpid()}:{next(_numbers)}"


@pytest.fixture(params=["one", "five", "memory"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., Redlock]]:
    """Makes clients of one deployment, on each deployment in turn; closes them all."""
    nodes: list[Any]
    if request.param == "memory":
        nodes = [MemoryStore()]
    else:
        urls = request.getfixturevalue("shared_urls")
        nodes = urls[:1] if request.param == "one" else urls
    clients: list[Redlock] = []

    def client(**options: Any) -> Redlock:
        clients.append(Redlock(*nodes, **options))
        return clients[-1]

    yield client
    for each in clients:
        await each.aclose()


@pytest.fixture
async def redlock(make: Callable[..., Redlock]) -> Redlock:
    """A client, on each deployment in turn."""
    return make()


@pytest.fixture
def chance() -> random.Random:
    """Seeded anew each time; a failure prints the seed, which $ASYNCLOCK_SEED sets again."""
    seed = int(os.environ.get("ASYNCLOCK_SEED") or random.randrange(2**32))
    print(f"ASYNCLOCK_SEED={seed}")
    return random.Random(seed)
