"""kazoo's client, to which requests are given as they are; the requests that it lacks: to create a node that the
servers delete after a time, and to end a watch; and lookups of host names that do not block its thread for as long as a
name server is silent."""

from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING, Any

from kazoo.client import KazooClient
from kazoo.exceptions import EXCEPTIONS, ZookeeperError
from kazoo.protocol.connection import ConnectionHandler
from kazoo.protocol.serialization import CloseInstance, Create, Create2, Delete, GetChildren, GetData, SetData
from kazoo.security import OPEN_ACL_UNSAFE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asynclock.stores.zookeeper.pipeline import Answer

_EPHEMERAL_AND_SEQUENTIAL = 3
_PERSISTENT_WITH_TTL = 5
_LONG = struct.Struct(">q")

LONGEST_TTL = (2**40 - 1) / 1000
"""Seconds that a node can live (EphemeralType.TTL of ZooKeeper): 34 years."""


class CreateTTL:
    """Its message (CreateTTLRequest of zookeeper.jute). The answer is that of Create2."""

    type = 21

    def __init__(self, path: str, data: bytes, acl: Sequence[Any], ttl: int) -> None:
        self.path = path
        self._create = Create2(path, data, acl, _PERSISTENT_WITH_TTL)
        self._ttl = ttl  # ms

    def serialize(self) -> bytes:
        packed: bytes = self._create.serialize()
        return packed + _LONG.pack(self._ttl)

    @staticmethod
    def deserialize(data: bytes, offset: int) -> Any:
        return Create2.deserialize(data, offset)


class _NoWatcherError(ZookeeperError):  # type: ignore[misc]
    """The server has no such watch: it has fired."""


EXCEPTIONS.setdefault(-121, _NoWatcherError)  # kazoo 2.10 lacks it, and its thread ends by an error without a class


class RemoveWatches:
    """Its message (RemoveWatchesRequest of zookeeper.jute). The answer says nothing. `removed` is called in the thread
    of kazoo if the server had the watch."""

    type = 18

    def __init__(self, path: str, removed: Callable[[], object], *, children: bool) -> None:
        self.path = path
        self._removed = removed
        self._kind = 1 if children else 2  # WatcherType of ZooKeeper: of the children, of the data

    def serialize(self) -> bytes:
        path = self.path.encode()
        return struct.pack(f">i{len(path)}si", len(path), path, self._kind)

    def deserialize(self, data: bytes, offset: int) -> None:
        del data, offset
        self._removed()


_PERMISSIONS = (
    ((GetChildren, GetData), "READ", False),
    ((SetData,), "WRITE", False),
    ((Create, Create2, CreateTTL), "CREATE", True),
    ((Delete,), "DELETE", True),
)
"""Kinds of requests, the permission that they need, and whether it is one on the parent of their node."""


def permission_of(request: Any) -> str:
    """The permission that a request needs, and on which path; "": none. Pure."""
    for kinds, permission, on_parent in _PERMISSIONS:
        if isinstance(request, kinds):
            path = request.path.rpartition("/")[0] if on_parent else request.path
            return f"{permission} on {path or '/'}"
    return ""


class _ConnectionHandler(ConnectionHandler):  # type: ignore[misc]  # kazoo has no types
    """kazoo's, which looks up the host names before each attempt to connect."""

    def _expand_client_hosts(self) -> list[tuple[str, str, int]]:
        """The addresses of all hosts, in a random order: name, address, port."""
        found: list[tuple[str, str, int]] = self.handler.addresses(self.client.hosts)
        random.shuffle(found)
        return found

    @property
    def runs(self) -> bool:
        """Whether its thread is alive."""
        return self._connection_routine is not None and self._connection_routine.is_alive()

    def wake(self) -> None:
        """Its thread looks for requests."""
        if self._write_sock is not None:
            self._write_sock.send(b"\0")


class Client(KazooClient):  # type: ignore[misc]
    """See the module. Paths are complete: it has no chroot."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._connection.__class__ = _ConnectionHandler  # kazoo has no option for it

    def send(self, request: Any, answer: Answer) -> None:
        """Send a request. What its methods would do besides, they do in the thread of kazoo."""
        self._call(request, answer)

    def unwatch(self, path: str, watcher: object, *, children: bool) -> RemoveWatches:
        """The request that ends a watch. With its answer kazoo drops the watcher: in its own thread, which also adds
        watchers with the answers of requests."""

        def removed() -> None:
            known = self._child_watchers if children else self._data_watchers
            if (watchers := known.get(path)) is not None:
                watchers.discard(watcher)
                if not watchers:
                    del known[path]

        return RemoveWatches(path, removed, children=children)

    @property
    def runs(self) -> bool:
        """Whether kazoo's thread is alive."""
        return bool(self._connection.runs)

    def stop_soon(self) -> None:
        """As `stop`, without waiting: kazoo's thread closes the session and ends."""
        self._stopped.set()
        self._queue.append((CloseInstance, None))
        self._connection.wake()

    @property
    def _acl(self) -> Any:
        return self.default_acl or OPEN_ACL_UNSAFE

    def ephemeral(self, path: str, data: bytes, *, with_stat: bool = False) -> Any:
        """The request for an ephemeral, sequential node."""
        kind = Create2 if with_stat else Create
        return kind(path, data, self._acl, _EPHEMERAL_AND_SEQUENTIAL)

    def persistent(self, path: str) -> Any:
        """The request for a node that stays."""
        return Create(path, b"", self._acl, 0)

    def persistent_for(self, path: str, data: bytes, seconds: float) -> Any:
        """The request for a node that stays so long. It needs servers with extendedTypesEnabled."""
        return CreateTTL(path, data, self._acl, max(1, round(seconds * 1000)))
