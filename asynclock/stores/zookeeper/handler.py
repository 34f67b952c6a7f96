"""The threads of kazoo, as one event loop needs them.

kazoo runs a connection in a thread of its own, and takes its sockets and its waiting from a handler. This one

- remembers why no connection comes up, since kazoo only logs that;
- reads the session timeout that the server gives, since kazoo does not tell it;
- limits the time that a server may take to accept a connection;
- hangs up on a server that does not answer for a third of the session timeout. kazoo does not notice that while it has
  requests to send, because it takes each of them for a ping;
- runs callbacks in the thread of the connection: they only wake the event loop. So they come in the order in which the
  server answered, and without a change of threads each;
- lets the session end if the event loop does not run: a session that a thread keeps alive for a loop that is blocked
  would keep the names of its locks taken, although no code runs under them.
"""

from __future__ import annotations

import logging
import math
import queue
import select
import struct
import time
from typing import TYPE_CHECKING, Any

from kazoo.handlers.threading import SequentialThreadingHandler

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("asynclock.kazoo")

_GREETING = struct.Struct(">iiiq")
"""The beginning of the first message of a server: its length, the version, the session timeout in ms, the session."""

_PAUSE = 0.02
"""Seconds between two looks at a loop that does not run."""


class _Direct(queue.Queue):  # type: ignore[type-arg]
    """A queue of callbacks that runs each at once. What is no callback tells a worker thread to stop."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if not callable(item):
            super().put(item, block, timeout)
            return
        try:
            item()
        except Exception:  # a thread of kazoo must not end by it
            log.exception("asynclock: a callback failed")


class Handler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """See the module. `silent_after`: seconds after the last beat for which the session is kept alive."""

    queue_impl = _Direct

    def __init__(
        self,
        limit: float,
        silent_after: float,
        greeted: Callable[[float, int], object],
        is_abandoned: Callable[[], bool],
    ) -> None:
        super().__init__()
        self.trouble: Exception | None = None  # why the last attempt to connect failed
        self._limit = limit
        self._silent_after = silent_after
        self._greeted = greeted
        self._is_abandoned = is_abandoned
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

    def unresolved(self, host: str, error: Exception) -> None:
        """The name of a server has no address: then kazoo does not try to connect to it."""
        self.trouble = ConnectionError(f"the host name {host} does not resolve: {error}")

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

    def select(self, rlist: list[Any], wlist: list[Any], xlist: list[Any], timeout: float | None = None) -> Any:
        while time.monotonic() - self._beat > self._silent_after and not self._is_abandoned():
            time.sleep(_PAUSE)
        sock = self._socket
        if sock is not None and timeout is not None:
            timeout = min(timeout, self._limit) if not sock.greeted else self._patience(sock, timeout)
        if not hasattr(select, "poll"):  # Windows
            return super().select(rlist, wlist, xlist, timeout)
        return _polled(rlist, wlist, timeout)

    def _patience(self, sock: _Socket, timeout: float) -> float:
        """Seconds to wait at most. Hangs up if the server has been silent for too long."""
        if sock.asked_at is None:
            return timeout
        left = sock.asked_at + self._silent_after / 3 - time.monotonic()
        if left <= 0:
            sock.hang_up()
        return max(0.0, min(timeout, left))

    def _heard(self, timeout: float, session: int) -> None:
        if timeout > 0:  # 0: the session has expired
            self.trouble = None
        self._greeted(timeout, session)


def _polled(rlist: list[Any], wlist: list[Any], timeout: float | None) -> tuple[list[Any], list[Any], list[Any]]:
    """As select.select, for any number of files; without the selector that kazoo makes for each call."""
    poller = select.poll()
    for each in wlist:
        poller.register(each, select.POLLOUT)
    for each in rlist:
        poller.register(each, select.POLLIN)
    ready = {number for number, _ in poller.poll(None if timeout is None else max(0, math.ceil(timeout * 1000)))}
    return [each for each in rlist if each.fileno() in ready], [each for each in wlist if each.fileno() in ready], []


class _Socket:
    """A socket that reads the first message along, and knows since when it waits for an answer."""

    def __init__(self, sock: Any, heard: Callable[[float, int], object]) -> None:
        self._sock = sock
        self._heard = heard
        self._head = b""
        self.greeted = False
        self.asked_at: float | None = None  # when the first message was sent that has no answer; None: there is none

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def send(self, data: Any) -> int:
        if self.asked_at is None:
            self.asked_at = time.monotonic()
        sent: int = self._sock.send(data)
        return sent

    def recv(self, size: int) -> bytes:
        data: bytes = self._sock.recv(size)
        self.asked_at = None  # a later message sets it again
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
