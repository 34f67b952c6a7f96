"""The connections of redis-py, as asynclock makes them. They tell how far an attempt to connect has come, connect to
hosts with several addresses, and no forked child keeps them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection

from asynclock.stores.dialing import connected
from asynclock.stores.forks import Kept, descriptor_of, keep_from_children, number_of_forks
from asynclock.stores.lookups import Unresolved, addresses_of, is_address
from asynclock.stores.redis.stages import Stage

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

_CONNECTS = 3
"""Tries of a connect, at most, while the program forks."""


class _Followed:
    """A redis-py connection that tells how far it has come, can take a socket that is connected, and that no forked
    child has."""

    reached: Callable[[Stage], object] = staticmethod(lambda stage: None)
    limit = 1.0  # seconds for a connect
    login = Stage.HELLO  # what follows once it is connected
    sock: socket.socket | None = None
    _writer: asyncio.StreamWriter | None
    _kept: Kept | None = None

    async def connect(self) -> None:
        """A child that is forked meanwhile may have the socket, too. Then a new connection takes its place."""
        for left in reversed(range(_CONNECTS)):
            forks = number_of_forks()
            await super().connect()  # type: ignore[misc]  # of the class beside this one
            if forks == number_of_forks() or not left:
                return
            if self._kept is not None:
                self._kept.end()
            await self.disconnect(nowait=True)

    def _connection_arguments(self) -> dict[str, Any]:
        arguments = dict(super()._connection_arguments())  # type: ignore[misc]  # of the class beside this one
        if self.sock is not None:
            arguments["sock"], self.sock = self.sock, None
            host, _ = arguments.pop("host"), arguments.pop("port")
            if arguments.get("ssl"):
                arguments.setdefault("server_hostname", host)
        return arguments

    async def dial(self, host: str, port: int, *, tls: bool) -> None:
        if not is_address(host):
            self.reached(Stage.LOOKUP)
        addresses = await addresses_of(host, port)
        self.reached(Stage.CONNECT)
        self.sock = await connected(addresses, self.limit)
        if tls:
            self.reached(Stage.TLS)

    def _error_message(self, exception: BaseException) -> str:
        if isinstance(exception, Unresolved):
            return str(exception)
        return str(super()._error_message(exception))  # type: ignore[misc]

    async def disconnect(self, nowait: bool = False, **more: Any) -> None:
        """With `nowait` the socket closes at once: the end of a TLS session may take longer than its loop runs."""
        writer = self._writer
        await super().disconnect(nowait, **more)  # type: ignore[misc]
        if nowait and writer is not None:
            writer.transport.abort()

    async def on_connect(self) -> None:
        self._tell()
        await super().on_connect()  # type: ignore[misc]

    async def on_connect_check_health(self, *args: Any, **kwargs: Any) -> None:  # redis-py calls one of the two
        self._tell()
        await super().on_connect_check_health(*args, **kwargs)  # type: ignore[misc]

    def _tell(self) -> None:
        if self._writer is not None:
            self._kept = keep_from_children(descriptor_of(self._writer))
        self.reached(self.login)


_KNOWN = {"host", "port", "ssl", "server_hostname", "ssl_handshake_timeout", "ssl_shutdown_timeout", "limit"}
"""The arguments of asyncio.open_connection that matter only once a socket is connected; and its host and port."""


class _Dialed(Connection):
    """redis-py's connection over TCP, with lookups and Happy Eyeballs of asynclock. In the bases of a class it comes
    after the class of a user, and right before redis-py's own: a class that connects in another way is left alone."""

    async def _connect(self: Any) -> None:  # also a _Followed
        arguments = self._connection_arguments()
        if arguments.keys() <= _KNOWN:
            async with asyncio.timeout(self.socket_connect_timeout):
                await self.dial(arguments["host"], int(arguments["port"]), tls=bool(arguments.get("ssl")))
        await super()._connect()  # type: ignore[no-untyped-call]


_Class = TypeVar("_Class", bound=type[AbstractConnection])

_classes: dict[Any, Any] = {}


def followed(connection_class: _Class) -> _Class:
    """The same class, for connections that `follow` can follow."""
    if connection_class not in _classes:
        theirs = (connection_class,) if connection_class is not Connection else ()
        bases = (_Followed, *theirs, *((_Dialed,) if issubclass(connection_class, Connection) else ()))
        _classes[connection_class] = type(connection_class.__name__, bases, {})
    known: _Class = _classes[connection_class]
    return known


def follow(redis: AbstractConnection, reached: Callable[[Stage], object], limit: float = _Followed.limit) -> float:
    """Call `reached` with each stage of `redis.connect()`, which connects and logs in. Returns the seconds that it may
    take: `limit`, or less if the user's settings say so."""
    limit = min(redis.socket_connect_timeout or limit, limit)
    reached(Stage.TLS if isinstance(redis, SSLConnection) else Stage.CONNECT)
    if isinstance(redis, _Followed):
        redis.reached, redis.limit = reached, limit
        redis.login = Stage.LOGIN if redis.username or redis.password or redis.credential_provider else Stage.HELLO
    return limit
