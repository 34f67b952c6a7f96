"""The threads of kazoo, as one event loop needs them.

kazoo runs a connection in a thread of its own, and takes its sockets and its waiting from a handler. This one

- remembers why no connection comes up, since kazoo only logs that;
- reads the session timeout that the server gives, since kazoo does not tell it;
- limits the time that a server may take to accept a connection;
- lets the session end if the event loop does not run: a session that a thread keeps alive for a loop that is blocked
  would keep the names of its locks taken, although no code runs under them.
"""

from __future__ import annotations

import math
import struct
import time
from typing import TYPE_CHECKING, Any

from kazoo.handlers.threading import SequentialThreadingHandler

if TYPE_CHECKING:
    from collections.abc import Callable

_GREETING = struct.Struct(">iiiq")
"""The beginning of the first message of a server: its length, the version, the session timeout in ms, the session."""

_PAUSE = 0.02
"""Seconds between two looks at a loop that does not run."""


class Handler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """See the module. `silent_after`: seconds after the last beat for which the session is kept alive."""

    def __init__(self, limit: float, silent_after: float, greeted: Callable[[float, int], object]) -> None:
        super().__init__()
        self.trouble: Exception | None = None  # why the last attempt to connect failed
        self._limit = limit
        self._silent_after = silent_after
        self._greeted = greeted
        self._beat = math.inf
        self._socket: Any = None

    def beat(self) -> None:
        """The event loop runs."""
        self._beat = time.monotonic()

    def rest(self) -> None:
        """The loop beats no more: the client closes."""
        self._beat = math.inf

    def hang_up(self) -> None:
        """Close the connection, as a network does."""
        sock = self._socket
        if sock is not None:
            sock.hang_up()

    def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["timeout"] = min(kwargs.get("timeout") or self._limit, self._limit)
        address = kwargs.get("address") or args[0]
        try:
            made = super().create_connection(*args, **kwargs)
        except Exception as error:
            self.trouble = ConnectionError(f"{address[0]}:{address[1]}: {error}")
            raise
        self.trouble = ConnectionError(f"{address[0]}:{address[1]} accepts connections, but opens no session")
        self._socket = _Socket(made, self._heard)
        return self._socket

    def select(self, *args: Any, **kwargs: Any) -> Any:
        while time.monotonic() - self._beat > self._silent_after:
            time.sleep(_PAUSE)
        sock = self._socket
        if sock is not None and not sock.greeted and len(args) == 4 and args[3] is not None:
            args = (*args[:3], min(args[3], self._limit))
        return super().select(*args, **kwargs)

    def _heard(self, timeout: float, session: int) -> None:
        if timeout > 0:  # 0: the session has expired
            self.trouble = None
        self._greeted(timeout, session)


class _Socket:
    """A socket that reads the first message along."""

    def __init__(self, sock: Any, heard: Callable[[float, int], object]) -> None:
        self._sock = sock
        self._heard = heard
        self._head = b""
        self.greeted = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def recv(self, size: int) -> bytes:
        data: bytes = self._sock.recv(size)
        if not self.greeted:
            self._head += data
            if len(self._head) >= _GREETING.size:
                self.greeted = True
                _, _, timeout, session = _GREETING.unpack_from(self._head)
                self._heard(timeout / 1000, session)
        return data

    def hang_up(self) -> None:
        """From any thread."""
        try:
            self._sock.shutdown(2)
        except OSError:
            return  # it is closed
