"""Fixtures of the tests of asynclock.blocking."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asynclock.blocking import Redlock
from tests.support.patient_connects import patient_connects  # noqa: F401 - a fixture


@pytest.fixture
def client(shared_urls: list[str]) -> Iterator[Redlock]:
    """A client of one server."""
    with Redlock(shared_urls[0]) as client:
        yield client


@pytest.fixture
def other(shared_urls: list[str]) -> Iterator[Redlock]:
    """Another client of that server, as another process would have it."""
    with Redlock(shared_urls[0]) as client:
        yield client
