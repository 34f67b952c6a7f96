"""Asks a server why it hung up on an attempt to connect.

1. A server that is full, or in protected mode, says so as soon as it has accepted, and closes. A client that writes
   first may lose that sentence: its write fails, and the transport closes before it has read. So a second connection
   only listens.
2. Another server says why when it is asked, and then closes with commands unread, which loses its sentence, too. So a
   connection sends one PING and nothing else.
3. A server that speaks TLS only may close without a word. So a connection without TLS sends the greeting of TLS.
"""

from __future__ import annotations

import contextlib
import ssl
from typing import TYPE_CHECKING

from redis.asyncio.connection import SSLConnection
from redis.exceptions import AuthenticationError, InvalidResponse, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from asynclock._clock import running_for
from asynclock.stores.port import Reconnecting
from asynclock.stores.redis.connecting import follow
from asynclock.stores.redis.encoding import pack
from asynclock.stores.redis.remedies import known_cause
from asynclock.stores.redis.stages import Stage

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

_SHARE = 5
_MOST = 1.0
"""A question may take this part of the connect_timeout (a fifth), and at most this number of seconds. By default that
is 0.2 s, a round trip between continents."""

_LONG = 60.0  # seconds; the share ends sooner


async def explained(redis: AbstractConnection, error: BaseException, stage: Stage, limit: float) -> BaseException:
    """The error that says most of an attempt to connect that failed in this stage: `error`, or what the server says
    before it hangs up. `redis` is the connection of the attempt, which is closed after this. `limit`: the seconds that
    an attempt may take."""
    if stage not in (Stage.LOGIN, Stage.HELLO) or not _is_hang_up(error):
        return error
    login = redis.username or redis.password or redis.credential_provider
    await _be_silent(redis)
    follow(redis, lambda stage: None, limit)  # the error of the attempt names the stage of the attempt
    limit = min(limit / _SHARE, _MOST)
    said = await _reply(redis, limit)
    if said is None:
        said = await _reply(redis, limit, pack("PING"))
    if _is_hang_up(said) and not isinstance(redis, SSLConnection):
        said = await _reply(redis, limit, _tls_greeting())
    if said is None or _is_hang_up(said) or (login and isinstance(said, AuthenticationError)):
        return error
    answers = isinstance(said, (ResponseError, InvalidResponse, AuthenticationError))
    return said if answers or known_cause("", said) is not None else error


def _is_hang_up(error: BaseException | None) -> bool:
    """Whether the other side closed, and did not say why. uvloop raises RuntimeError for a write after that."""
    if type(error) is RedisConnectionError:
        return known_cause("", error) is None
    return isinstance(error, (Reconnecting, RuntimeError))


async def _be_silent(redis: AbstractConnection) -> None:
    """Let redis-py send nothing when it connects."""
    await redis.disconnect(nowait=True)
    redis.db, redis.redis_connect_func = 0, None
    redis.username = redis.password = redis.client_name = redis.credential_provider = None
    for each in ("driver_info", "lib_name", "lib_version"):  # which of them there are depends on its version
        setattr(redis, each, None)


async def _reply(redis: AbstractConnection, limit: float, wire: bytes = b"") -> Exception | None:
    """What the server says on a new connection, to `wire` or to nothing, if that is an error; else None."""
    try:
        async with running_for(limit):
            await redis.connect()  # type: ignore[no-untyped-call]
            if wire:
                await redis.send_packed_command(wire)
            await redis.read_response(timeout=_LONG)
    except TimeoutError:
        return None
    except (OSError, RedisError, RuntimeError) as error:
        return error
    finally:
        await redis.disconnect(nowait=True)
    return None


def _tls_greeting() -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    out = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out).do_handshake()
    return out.read()
