"""Fixtures of several test modules of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.embedded_box import box
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
