"""Fixtures of several test modules of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial

import pytest

from asynclock import _options
from asynclock._options import ClientSettings
from tests.support.embedded_box import box
from tests.support.operators import Operated, operated_mariadb, operated_postgresql
from tests.support.proxy import TcpProxy
from tests.support.services.zookeeper import ZooKeeper, ZooKeepers

__all__ = ["box"]


@pytest.fixture
def zookeepers() -> Iterator[ZooKeepers]:
    """Servers of the test's own, which it may freeze and kill."""
    pool = ZooKeepers()
    yield pool
    pool.stop()


@pytest.fixture
async def zookeeper_proxy(shared_zookeeper: ZooKeeper) -> AsyncIterator[TcpProxy]:
    """In front of the shared server."""
    async with TcpProxy(shared_zookeeper.port) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def patient_connects(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client gives a connect one second, unless it is told otherwise. A busy machine may need more for a database, or
    for a first session of ZooKeeper, and then a healthy server counts as down. A test of the time itself sets
    connect_timeout."""
    if "sql" in request.path.name or "zookeeper" in request.path.name:
        monkeypatch.setattr(_options, "ClientSettings", partial(ClientSettings, connect_timeout=5.0))


@pytest.fixture
async def postgresql(postgresql_url: str) -> AsyncIterator[Operated]:
    """A PostgreSQL with a table of the test's own, and an operator."""
    async with operated_postgresql(postgresql_url) as operated:
        yield operated


@pytest.fixture
async def mariadb(mariadb_url: str) -> AsyncIterator[Operated]:
    """The same of MariaDB."""
    async with operated_mariadb(mariadb_url) as operated:
        yield operated
