"""Fixtures for pytest (docs/testing.md). Name this module with `-p asynclock.testing.plugin`, or in the conftest.py of
the root folder:

    pytest_plugins = ["asynclock.testing.plugin"]

The fixtures are plain functions, for tests of pytest-asyncio and of anyio alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from asynclock.testing.server import empty, real_server
from asynclock.testing.store import FakeStore
from asynclock.testing.using import use

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def redlock_store() -> Iterator[FakeStore]:
    """A FakeStore that all clients of the program use in this test (`asynclock.testing.use`)."""
    store = FakeStore()
    with use(store):
        yield store


@pytest.fixture(scope="session")
def _redlock_server() -> Iterator[str]:
    with real_server() as url:
        yield url


@pytest.fixture
def redlock_server(_redlock_server: str) -> str:
    """The url of a real server, which is empty. It lives as long as the session of pytest, and each worker of
    pytest-xdist has one of its own. Its source is the wheel of asynclock[embedded], or else a container."""
    empty(_redlock_server)
    return _redlock_server
