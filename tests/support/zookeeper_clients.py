"""Clients of a ZooKeeper server of the tests."""

from __future__ import annotations

from typing import Any

from asynclock import Redlock
from tests.support.proxy import TcpProxy
from tests.support.services.zookeeper import ZooKeeper
from tests.support.waiters import LIMIT

SHORT = 2.0
"""Seconds of a session that is to expire."""

SOON = 12.0
"""Seconds that are far less than the 30 s of a usual session."""


def behind(proxy: TcpProxy, session: float = 30.0) -> Redlock:
    """A client behind a proxy."""
    url = f"zookeeper://127.0.0.1:{proxy.port}/locks?session_timeout={session:g}"
    return Redlock(url, lease=session, node_timeout=1.0, connect_timeout=LIMIT / 2, patience=LIMIT)


def client_of(server: ZooKeeper, session: float = 30.0, **options: Any) -> Redlock:
    options = {"connect_timeout": LIMIT / 2, "patience": LIMIT, **options}
    return Redlock(server.url(session_timeout=session), lease=session, **options)
