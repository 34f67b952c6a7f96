"""A client for a web application, and a look at its locks from outside."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from asynclock import Redlock
from tests.support.patient_connects import patient_connects  # noqa: F401 - a fixture


@pytest.fixture
async def client(shared_urls: list[str]) -> AsyncIterator[Redlock]:
    """The client of the application."""
    async with Redlock(shared_urls[0]) as made:
        yield made


@pytest.fixture
async def other(shared_urls: list[str]) -> AsyncIterator[Redlock]:
    """A client of another process, as far as the server knows."""
    async with Redlock(shared_urls[0]) as made:
        yield made
