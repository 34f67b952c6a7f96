"""Fixtures of several test modules of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.embedded_box import box
from tests.support.no_looks import no_looks
from tests.support.operators import Operated, operated_mariadb, operated_postgresql
from tests.support.patient_connects import patient_connects
from tests.support.proxy import TcpProxy
from tests.support.services.zookeeper import ZooKeeper, ZooKeepers
from tests.support.waiters import LIMIT

__all__ = ["box", "no_looks", "patient_connects"]


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
def patient_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """A database gives a client its first push message within 0.25 s, or the client looks for its notices. A busy
    machine may need more. Behind a pooler this is tried once."""
    monkeypatch.setattr("asynclock.stores.sql.push._PUSH", 2.0)


@pytest.fixture
def patient_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A close gives an engine its connections back, for as long as the test waits."""
    monkeypatch.setattr("asynclock.stores.sql.pool._RETURNING", LIMIT)


@pytest.fixture
def long_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A close has 4.5 s for its releases, and not 1.8: a test process may stand still for a second. It is less than the
    limit of a transaction."""
    monkeypatch.setattr("asynclock.stores.transactional.AT_MOST", 4.5)
    monkeypatch.setattr("asynclock.runtime.shutdown.CLOSING", LIMIT)


@pytest.fixture
def patient_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release has more than 3 s before ReleaseFailed is told."""
    monkeypatch.setattr("asynclock.protocol.hold.RELEASE_TIMEOUT", LIMIT)


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
