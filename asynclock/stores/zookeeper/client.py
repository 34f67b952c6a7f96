"""kazoo's client, and the one request that it lacks: to create a node that the servers delete after a time."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from kazoo.client import KazooClient
from kazoo.protocol.serialization import Create2
from kazoo.security import OPEN_ACL_UNSAFE

if TYPE_CHECKING:
    from collections.abc import Sequence

_PERSISTENT_WITH_TTL = 5
_LONG = struct.Struct(">q")


class CreateTTL:
    """Its message (CreateTTLRequest of zookeeper.jute). The answer is that of Create2."""

    type = 21

    def __init__(self, path: str, data: bytes, acl: Sequence[Any], ttl: int) -> None:
        self._create = Create2(path, data, acl, _PERSISTENT_WITH_TTL)
        self._ttl = ttl  # ms

    def serialize(self) -> bytes:
        packed: bytes = self._create.serialize()
        return packed + _LONG.pack(self._ttl)

    @staticmethod
    def deserialize(data: bytes, offset: int) -> Any:
        return Create2.deserialize(data, offset)


class Client(KazooClient):  # type: ignore[misc]  # kazoo has no types
    """See the module."""

    def create_ttl_async(self, path: str, data: bytes, ttl: float) -> Any:
        """Create a node that stays for `ttl` seconds. It needs servers with extendedTypesEnabled."""
        result = self.handler.async_result()
        acl = self.default_acl or OPEN_ACL_UNSAFE
        self._call(CreateTTL(path, data, acl, max(1, round(ttl * 1000))), result)
        return result
