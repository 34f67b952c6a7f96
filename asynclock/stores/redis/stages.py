"""The states of a node, and how far an attempt to connect has come."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from redis.asyncio.connection import AbstractConnection, SSLConnection

if TYPE_CHECKING:
    from collections.abc import Callable


class NodeState(Enum):
    """Whether commands can be sent."""

    NEW = "new"
    UP = "up"
    DOWN = "down"
    CLOSED = "closed"


class Stage(Enum):
    """What an attempt to connect waits for. The value is the part of its error that says so."""

    CREDENTIALS = "no answer of the credential provider"
    CONNECT = "no connection"
    TLS = "no TLS connection"
    LOGIN = "no reply to AUTH"
    HELLO = "no reply to HELLO"


class _Followed:
    """A redis-py connection that tells when it is connected, before it logs in."""

    on_connected: Callable[[], object] | None = None

    async def on_connect(self) -> None:
        self._tell()
        await super().on_connect()  # type: ignore[misc]  # of the class beside this one

    async def on_connect_check_health(self, *args: Any, **kwargs: Any) -> None:  # redis-py calls one of the two
        self._tell()
        await super().on_connect_check_health(*args, **kwargs)  # type: ignore[misc]

    def _tell(self) -> None:
        if self.on_connected is not None:
            self.on_connected()


_Class = TypeVar("_Class", bound=type[AbstractConnection])

_classes: dict[Any, Any] = {}


def followed(connection_class: _Class) -> _Class:
    """The same class, for connections that `follow` can follow."""
    if connection_class not in _classes:
        _classes[connection_class] = type(connection_class.__name__, (_Followed, connection_class), {})
    known: _Class = _classes[connection_class]
    return known


def follow(redis: AbstractConnection, reached: Callable[[Stage], object]) -> None:
    """Call `reached` with each stage of `redis.connect()`, which connects and logs in."""
    reached(Stage.TLS if isinstance(redis, SSLConnection) else Stage.CONNECT)
    login = redis.username or redis.password or redis.credential_provider
    if isinstance(redis, _Followed):
        redis.on_connected = lambda: reached(Stage.LOGIN if login else Stage.HELLO)
