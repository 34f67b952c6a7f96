"""`embedded:`, one server for all processes of a user on one machine. The first client starts it.

`embedded:name` is another server, separate from the first. `finding.py` has how it is found, and how long it lives.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from redis.asyncio.connection import UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from asynclock._errors import ConfigError
from asynclock.stores.embedded.home import Home
from asynclock.stores.embedded.searches import socket_of
from asynclock.stores.redis.connecting import followed
from asynclock.stores.redis.identity import Identity
from asynclock.stores.redis.node import RedisNode
from asynclock.stores.redis.stages import Stage
from asynclock.stores.urls import trimmed

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

    from asynclock.stores.port import NodeConfig


class EmbeddedNode(RedisNode):
    """Its server may have to be found, and started, before each connection."""

    def __init__(self, store: EmbeddedStore, config: NodeConfig) -> None:
        super().__init__(store, config)
        self._finds = store

    async def _dial(self) -> AbstractConnection:
        self._reached(Stage.CONNECT)
        return await self._finds.dial(self._config.connect_timeout)


class EmbeddedStore:
    """A server of this user. The first process starts it; it ends after the last process that uses it."""

    clock = None
    thread_safe = True

    def __init__(self, url: str = "embedded:") -> None:
        name = trimmed(url).partition(":")[2].strip("/") or "default"
        if not re.fullmatch(r"[\w.-]{1,32}", name):
            raise ConfigError(
                "an embedded server's name, after 'embedded:', is 1 to 32 letters, digits, '.', '_' and '-'"
            )
        self.run_id = ""
        self.replaced = "", 0.0
        self.identity = Identity()
        self.label = f"embedded:{name}"
        self._home = Home(name)

    def __repr__(self) -> str:
        return f"<EmbeddedStore {self.label}>"

    def open(self, config: NodeConfig) -> RedisNode:
        return EmbeddedNode(self, config)

    async def dial(self, limit: float = 1.0) -> AbstractConnection:
        """`limit`: seconds for which it waits for a server that hangs. A server that starts may take longer."""
        path = await socket_of(self._home, limit)
        return followed(UnixDomainSocketConnection)(path=str(path), protocol=2, retry=Retry(NoBackoff(), 0))
