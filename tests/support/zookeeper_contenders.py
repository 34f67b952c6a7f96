"""The contenders of a ZooKeeper node, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from asynclock.rules.model import ACQUIRE, Op
from asynclock.rules.mutex import MUTEX
from asynclock.stores.port import NodeConfig
from asynclock.stores.zookeeper.connection import SessionState
from asynclock.stores.zookeeper.contender import Contender
from asynclock.stores.zookeeper.node import ZooKeeperNode
from asynclock.stores.zookeeper.settings import settings_of
from tests.support.fake_clock import FakeClock


def node_with(count: int) -> tuple[ZooKeeperNode, list[Contender]]:
    """A node whose session 1 has a node of each of so many contenders."""
    listener: Any = SimpleNamespace(connected=lambda *_, **__: None, received=lambda *_: None)
    node = ZooKeeperNode(
        settings_of("zookeeper://a:2181", "kazoo", 30.0, None, True),
        NodeConfig(0, "", FakeClock(), listener, {}, None),
    )
    contenders = [Contender(Op(ACQUIRE, MUTEX, "x", f"{number:05}", 30.0)) for number in range(count)]
    for each in contenders:
        node._contenders[each.id] = each
        created_in(each, 1)
    return node, contenders


def created_in(contender: Contender, session: int) -> None:
    """Its node belongs to that session."""
    contender.session = session
    contender.keep([f"/locks/x/{contender.id}"], session)


def expire_into(node: ZooKeeperNode, session: int) -> None:
    """The session has expired, and there is another one already."""
    node._connection = SimpleNamespace(session=session, timeout=30.0, state=SessionState.CONNECTED)  # type: ignore[assignment]
    node._session_expired()
