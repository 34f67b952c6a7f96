"""Which servers answer at one address: `asynclock doctor` connects several times, and compares."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError, ResponseError

from asynclock._options import RESERVED
from asynclock.stores.redis.restarts import fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from redis.asyncio.connection import AbstractConnection

    from asynclock.stores.redis.restarts import Dialer

CONNECTIONS = 8
"""Connections to one address."""

_LIMIT = 5.0  # seconds for all of them
_KEPT = "10000"  # ms for which the key of the comparison lives if it is not deleted: longer than the comparison


async def servers_at(store: Dialer, prefix: str) -> tuple[str, ...] | None:
    """The run_ids of the servers that connections to this address reach; if the server does not tell them, "?" for each
    of the groups that share a key. None: this could not be found out. All connections are open at the same time, so
    that a balancer distributes them. Never raises for what a server says or does."""
    try:
        async with AsyncExitStack() as stack, asyncio.timeout(_LIMIT):
            connections: list[AbstractConnection] = []
            for _ in range(CONNECTIONS):
                connection = await store.dial()
                stack.push_async_callback(connection.disconnect, nowait=True)
                await connection.connect()  # type: ignore[no-untyped-call]
                connections.append(connection)
            found = [fields(await _ask(each, "INFO", "server")).get("run_id", "") for each in connections]
            if all(found):
                return tuple(dict.fromkeys(found))
            return await _by_key(connections, f"{prefix}{RESERVED}doctor~{secrets.token_hex(8)}")
    except (OSError, RedisError):
        return None


async def _by_key(connections: Sequence[AbstractConnection], key: str) -> tuple[str, ...] | None:
    """Write a key on one connection, read it on the others, and delete it."""
    first, *others = connections
    if await _ask(first, "SET", key, key, "PX", _KEPT) != b"OK":
        return None
    found = [await _ask(each, "GET", key) for each in others]
    await _ask(first, "DEL", key)
    if any(isinstance(each, ResponseError) for each in found):
        return None
    return ("?",) if all(found) else ("?", "?")


async def _ask(connection: AbstractConnection, *command: str) -> Any:
    """The answer; a refusal is one, too."""
    await connection.send_command(*command)
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error
