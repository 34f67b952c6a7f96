"""Asks for the credentials of a connection, takes it over from redis-py once it has logged in, and renews its login.

redis-py calls `re_auth_callback` of a client's pool with each token that a streaming credential provider renews. This
module sends the token on the connections of asynclock as well, so that a server does not close them when the old token
ends. A provider may have room for one callback, so the callback of the user's client is kept, and is called as before.
If several clients share such a provider, redis-py calls the pool of the last one only. So each token goes to all
connections that use its provider.

If a token is renewed during a login, or never arrives, the server closes the connection when the old token ends. Then
the node connects again, with the credentials that the provider gives by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from redis.credentials import CredentialProvider

from asynclock.stores.redis.encoding import pack
from asynclock.stores.redis.handlers import IgnoredCommand
from asynclock.stores.redis.stages import Stage

if TYPE_CHECKING:
    from collections.abc import Callable

    from redis.asyncio import ConnectionPool
    from redis.asyncio.connection import AbstractConnection

    from asynclock.stores.redis.connection import Connection, Owner

log = logging.getLogger("asynclock")

_LIMIT = 5.0  # seconds for the answer to AUTH
_FETCH_LIMIT = 10.0  # seconds for the answer of a credential provider


class Fetched(CredentialProvider):
    """The credentials that the user's provider gave for one connection."""

    def __init__(self, provider: Any, credentials: Any) -> None:
        self.provider = provider
        self._credentials = credentials

    def get_credentials(self) -> Any:
        return self._credentials

    async def get_credentials_async(self) -> Any:
        return self._credentials


async def fetch_credentials(
    redis: AbstractConnection, reached: Callable[[Stage], object], limit: float, late: Callable[[], object]
) -> None:
    """Ask the user's provider, before the connect begins: a provider that asks a remote service may take longer than a
    connect may. Calls `late` after `limit` seconds, and goes on waiting. Raises ConnectionError."""
    if redis.credential_provider is not None:
        reached(Stage.CREDENTIALS)
        timer = asyncio.get_running_loop().call_later(limit, late)
        try:
            redis.credential_provider = await _fetch(redis.credential_provider)
        finally:
            timer.cancel()


async def _fetch(provider: Any) -> Fetched:
    ask = getattr(provider, "get_credentials_async", None)  # redis-py 5.0 has only the other one
    limit = asyncio.timeout(_FETCH_LIMIT)
    try:
        async with limit:
            return Fetched(provider, await ask() if ask is not None else provider.get_credentials())
    except Exception as error:
        if isinstance(error, TimeoutError) and limit.expired():  # else it is an error of the provider's own
            raise ConnectionError(f"the credential provider did not answer within {_FETCH_LIMIT:g} s") from None
        raise ConnectionError(f"the credential provider failed ({type(error).__name__}: {error})") from error


class TokenStream:
    """A streaming provider, and the connections that use it."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider  # a reference, so that its id stays its own
        self._guard = threading.Lock()  # a token may arrive in another thread than a connection
        self._used: WeakKeyDictionary[Connection, _Renewal] = WeakKeyDictionary()

    def add(self, connection: Connection, renewal: _Renewal) -> None:
        """The connection has logged in. It gets all later tokens."""
        with self._guard:
            self._used[connection] = renewal

    def renewed(self, user: str | None, token: str) -> None:
        """Send a new token on each connection, in the event loop of that connection."""
        with self._guard:
            used = list(self._used.items())
        wire = pack("AUTH", user, token) if user else pack("AUTH", token)
        for connection, renewal in used:
            renewal.post(connection, wire)


class _Renewal:
    """How one connection gets a token."""

    def __init__(self, node: Owner) -> None:
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._now = node.clock.now
        self._label = node.label

    def post(self, connection: Connection, wire: bytes) -> None:
        if self._pid == os.getpid():  # after a fork the sockets belong to the parent
            with contextlib.suppress(RuntimeError):  # its loop is closed
                self._loop.call_soon_threadsafe(self._send, connection, wire)

    def _send(self, connection: Connection, wire: bytes) -> None:
        if not connection.transport.is_closing():
            now = self._now()
            connection.send(wire, _AuthReply(self._label, now, now + _LIMIT))


class _AuthReply(IgnoredCommand):
    """Logs a refusal. The connection then keeps its earlier login."""

    def __init__(self, label: str, sent: float, deadline: float) -> None:
        super().__init__(sent, deadline)
        self._label = label

    def answer(self, index: int, reply: Any) -> None:
        del index
        if isinstance(reply, Exception):
            log.warning(
                "asynclock: %s refused a renewed token (%s): it may close the connection when the old token ends; "
                "check the credential provider",
                self._label,
                reply,
            )

    def fail(self, index: int, error: Exception, *, maybe: bool) -> None: ...  # the next connection logs in again


_streams: WeakValueDictionary[int, TokenStream] = WeakValueDictionary()  # by id, since a provider may have no hash


def stream_of(pool: ConnectionPool) -> TokenStream | None:
    """The stream of the tokens of this pool; None: its provider does not stream, or it has none. The caller keeps it,
    as long as it makes connections."""
    provider = pool.connection_kwargs.get("credential_provider")
    if not callable(getattr(provider, "on_next", None)):  # a StreamingCredentialProvider, which redis-py 5.0 has not
        return None
    stream = _streams.get(id(provider)) or TokenStream(provider)
    _streams[id(provider)] = stream
    _pass_on(pool, stream)
    return stream


def _pass_on(pool: Any, stream: TokenStream) -> None:
    """Let the stream know the tokens that redis-py gives to this pool."""
    theirs = pool.re_auth_callback
    if getattr(theirs, "stream", None) is stream:
        return

    async def renewed(token: Any) -> None:
        stream.renewed(token.try_get("oid"), token.get_value())
        await theirs(token)

    renewed.stream = stream  # type: ignore[attr-defined]  # marks a pool that a second client was made of
    pool.re_auth_callback = renewed


def take_over(node: Owner, redis: AbstractConnection, connection_class: type[Connection]) -> Connection:
    """Take the transport from redis-py once it has connected and logged in. With a protocol of its own a command costs
    half the CPU, and needs no lock or timeout. redis-py has no public way to hand its transport over."""
    writer, redis._writer, redis._reader = redis._writer, None, None  # noqa: SLF001
    if writer is None:
        raise ConnectionError(f"{node.label} hung up")
    connection = connection_class(node, writer)
    connection.transport.set_protocol(connection)
    provider = redis.credential_provider
    if isinstance(provider, Fetched) and (stream := _streams.get(id(provider.provider))) is not None:
        stream.add(connection, _Renewal(node))
    return connection
