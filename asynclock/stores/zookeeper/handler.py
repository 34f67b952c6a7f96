"""The threads of kazoo, as one event loop needs them.

kazoo runs a connection in a thread of its own, and takes its sockets and its waiting from a handler. This one

- remembers why no connection comes up, since kazoo only logs that;
- reads the session timeout that the server gives, since kazoo does not tell it;
- limits the time that a lookup of a host may take, and that a server may take to accept a connection and to open the
  session; if it does not accept, another address of its host is tried as well;
- hangs up on a server that sends nothing for a third of the session timeout, counted from the first request after the
  last byte from it. kazoo does not notice that while it has requests to send, because it takes each of them for a ping;
- wakes that thread without a write that could block: kazoo writes a byte for each request;
- sends requests that are ready together, and reads many answers at once: kazoo makes eight system calls for each;
- runs callbacks in the thread of the connection: they only wake the event loop. So they come in the order in which the
  server answered, and without a change of threads each;
- lets the session end if the event loop does not run: a session that a thread keeps alive for a loop that is blocked
  would keep the names of its locks taken, although no code runs under them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import select
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

from kazoo.handlers.threading import SequentialThreadingHandler

from asynclock.stores.dialing import connected, dial
from asynclock.stores.lookups import ADVICE, NO_ANSWER, addresses_within, is_address

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from asynclock.stores.lookups import Address

log = logging.getLogger("asynclock.kazoo")

_GREETING = struct.Struct(">iiiq")
"""The beginning of the first message of a server: its length, the version, the session timeout in ms, the session."""

_CHUNK = 1 << 16
"""Bytes to read at once, at least."""

_PAUSE = 0.02
"""Seconds between two looks at a loop that does not run."""


class _Direct:
    """A queue of callbacks that runs each at once. So it needs no worker thread."""

    def put(self, callback: Callable[[], object]) -> None:
        """Run it."""
        try:
            callback()
        except Exception:  # a thread of kazoo must not end by it
            log.exception("asynclock: a callback failed")


class Handler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """See the module. `limit`: seconds for a server to open a session; `again`: to open it again, while it lives on.
    `silent_after`: seconds after the last beat for which the session is kept alive."""

    queue_impl = _Direct

    def __init__(
        self,
        limit: float,
        again: float,
        silent_after: float,
        greeted: Callable[[float, int], object],
        is_abandoned: Callable[[], bool],
    ) -> None:
        super().__init__()
        self.trouble: Exception | None = None  # why the last attempt to connect failed, at each server
        self._troubles: dict[tuple[str, int], str] = {}  # the same, by address
        self._limits = limit, again
        self._has_session = False
        self._silent_after = silent_after
        self._greeted = greeted
        self._is_abandoned = is_abandoned
        self._beat = math.inf
        self._socket: Any = None
        self._known: dict[tuple[str, int], tuple[str, list[Address]]] = {}  # by address: its host, and all of that
        self._connecting: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None  # a connect under way
        self._ends = False

    def start(self) -> None:
        """kazoo would start two threads here, which wait for callbacks."""
        self._running = True

    def stop(self) -> None:
        """The end of `start`."""
        self._running = False

    @property
    def _limit(self) -> float:
        """Seconds for a server to accept a connection and to open the session. One that has just started may accept it,
        and never answer. The session must not end while the client waits for that."""
        return self._limits[self._has_session]

    def beat(self) -> None:
        """The event loop runs."""
        self._beat = time.monotonic()

    def end(self) -> None:
        """The client closes: the loop beats no more, and a connect ends at once. Else its thread, and its socket, would
        be there for as long as a server has to accept a connection."""
        self._beat, self._ends = math.inf, True
        if (connecting := self._connecting) is not None:
            loop, task = connecting
            with contextlib.suppress(RuntimeError):  # it has ended, and its loop is closed
                loop.call_soon_threadsafe(task.cancel)

    def create_socket_pair(self) -> tuple[_Bell, _Bell]:
        bell = _Bell()
        return bell, bell

    def hang_up(self) -> None:
        """Close the connection, as a network does."""
        sock = self._socket
        if sock is not None:
            sock.hang_up()

    def addresses(self, hosts: Sequence[tuple[str, int]]) -> list[tuple[str, str, int]]:
        """The addresses of all hosts: name, address, port."""
        hosts = [(host.strip(), port) for host, port in hosts]
        before, names = self.trouble, [host for host, _ in hosts if not is_address(host)]
        if names and before is None:  # else what the last attempt has found out says more, until this one has ended
            self.trouble = ConnectionError(f"{', '.join(names)}: {NO_ANSWER}; {ADVICE}")
        self._known.clear()
        every = addresses_within(hosts, self._limit)
        self.trouble = before
        for (host, _), found in zip(hosts, every, strict=True):
            if isinstance(found, OSError):
                self.trouble = ConnectionError(str(found))
                continue
            for at, each in enumerate(found):  # the others of its name follow it
                self._known[each[4][:2]] = host, [each, *found[:at], *found[at + 1 :]]
        self._troubles = {address: why for address, why in self._troubles.items() if address in self._known}
        return [(host, *address) for address, (host, _) in self._known.items()]

    def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        limit = min(kwargs.get("timeout") or self._limit, self._limit)
        address = kwargs.get("address") or args[0]
        try:
            made = self._connect(address, limit)
        except TimeoutError:
            self._failed(address, f": no connection within {limit:g} s")
            raise
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else error  # asyncio does not say what the number means
            self._failed(address, f": {why}")
            raise
        why = "its ensemble may have no quorum, or it has just started"
        self._failed(address, f" accepts connections, but opens no session: {why}")  # unless it does
        self._socket = _Socket(made, self._heard)
        return self._socket

    def _failed(self, address: tuple[str, int], why: str) -> None:
        self._troubles[address] = f"{address[0]}:{address[1]}{why}"
        self.trouble = ConnectionError("; ".join(self._troubles.values()))

    def _connect(self, address: tuple[str, int], limit: float) -> socket.socket:
        """Connect to an address, or to another one of its host if that is silent."""

        async def connect() -> socket.socket:
            task: Any = asyncio.current_task()
            self._connecting = asyncio.get_running_loop(), task
            if self._ends:
                raise asyncio.CancelledError
            async with asyncio.timeout(limit):
                return await (connected(known[1], limit) if known is not None else dial(*address, limit))

        known = self._known.get(address)
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            try:
                return runner.run(connect())
            except asyncio.CancelledError:
                raise ConnectionAbortedError("the client closes") from None
            finally:
                self._connecting = None

    def select(self, rlist: list[Any], wlist: list[Any], xlist: list[Any], timeout: float | None = None) -> Any:
        """kazoo asks before each send whether the socket is writable. It always is, because `_Socket` has a buffer. The
        buffer is sent when kazoo is about to wait."""
        while time.monotonic() - self._beat > self._silent_after and not self._is_abandoned():
            time.sleep(_PAUSE)
        if wlist:
            return [], wlist, []
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not (ready := [each for each in rlist if each.has_more]):
            unsent = [each for each in rlist if not each.flush()]
            if any(each.has_more for each in rlist):
                continue
            left = max(0.0, until - time.monotonic())
            sock = self._socket
            if sock is not None:
                left = min(left, self._limit) if not sock.greeted else self._patience(sock, left)
            within = None if left == math.inf else left
            if not hasattr(select, "poll"):  # Windows
                ready, writable, _ = super().select(rlist, unsent, xlist, within)
            else:
                ready, writable = _polled(rlist, unsent, within)
            if ready or not writable:  # else the rest of the requests can be sent
                break
        return ready, [], []

    def _patience(self, sock: _Socket, timeout: float) -> float:
        """Seconds to wait at most. Hangs up if the server has been silent for too long."""
        if sock.asked_at is None:
            return timeout
        left = sock.asked_at + self._silent_after / 3 - time.monotonic()
        if left <= 0:
            sock.hang_up()
        return max(0.0, min(timeout, left))

    def _heard(self, timeout: float, session: int) -> None:
        self._has_session = timeout > 0  # 0: it has expired
        if timeout > 0:
            self.trouble = None
            self._troubles.clear()
        self._greeted(timeout, session)


def _polled(rlist: list[Any], wlist: list[Any], timeout: float | None) -> tuple[list[Any], list[Any]]:
    """As select.select, for any number of files; without the selector that kazoo makes for each call."""
    poller = select.poll()
    for each in rlist:
        poller.register(each, select.POLLIN | select.POLLOUT if each in wlist else select.POLLIN)
    found = dict(poller.poll(None if timeout is None else max(0, math.ceil(timeout * 1000))))
    events = {each: found.get(each.fileno(), 0) for each in rlist}
    return [each for each in rlist if events[each] & ~select.POLLOUT], [each for each in wlist if events[each]]


class _Bell:
    """Both ends of the pipe by which kazoo is woken. It writes a byte for each request that it puts into its queue, and
    reads one for each that it takes out. They are counted here, and the pipe has at most one byte: `flush` takes it out
    before each wait. So a write never blocks: some kilobytes fill a pipe, and its reader may wait for the thread that
    writes.

    kazoo closes it when its thread has ended. If that takes too long, kazoo gives up, and the collector closes it."""

    def __init__(self) -> None:
        self._reads = self._writes = -1  # the collector closes it also if there is no pipe
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._reads, False)
        self._lock = threading.Lock()
        self._count = 0  # below 0: a request was taken out before its byte was written
        self._is_rung = False  # a byte is in the pipe

    def fileno(self) -> int:
        return self._reads

    def send(self, data: bytes) -> int:
        with self._lock:
            self._count += 1
            if self._count > 0 and not self._is_rung:
                self._is_rung = True
                os.write(self._writes, data)
        return len(data)

    def recv(self, size: int) -> bytes:
        with self._lock:
            self._count -= 1
        return bytes(size)

    @property
    def has_more(self) -> bool:
        """Whether a request is in the queue."""
        return self._count > 0

    def flush(self) -> bool:
        """kazoo is about to wait: empty the pipe. True, as of a socket that has sent all."""
        with self._lock:
            if self._is_rung:
                self._is_rung = False
                with contextlib.suppress(BlockingIOError):  # a signal interrupted `send` before its write
                    os.read(self._reads, 1)
        return True

    def close(self) -> None:
        ends, self._reads, self._writes = {self._reads, self._writes} - {-1}, -1, -1
        for end in ends:
            os.close(end)

    __del__ = close


class _Socket:
    """A socket with a buffer for what is sent, until `flush`, and one for what was read beyond what was asked for. It
    reads the first message along, and knows since when it waits for an answer."""

    def __init__(self, sock: Any, heard: Callable[[float, int], object]) -> None:
        self._sock = sock
        self._heard = heard
        self._head = b""
        self._unsent = bytearray()
        self._unread = bytearray()
        self.greeted = False
        self.asked_at: float | None = None  # when the first message was sent that has no answer; None: there is none

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def send(self, data: Any) -> int:
        self._unsent += data
        return len(data)

    def flush(self) -> bool:
        """Send what there is. False: not all of it could be sent."""
        while self._unsent:
            if self.asked_at is None:
                self.asked_at = time.monotonic()
            try:
                sent = self._sock.send(self._unsent)
            except BlockingIOError:
                return False
            except OSError:  # the connection is lost. kazoo reads what came before, and then the same error
                self._unsent.clear()
                return True
            del self._unsent[:sent]
        return True

    @property
    def has_more(self) -> bool:
        """Whether an answer can be read at once."""
        return bool(self._unread)

    def recv(self, size: int) -> bytes:
        if not self._unread:
            self._unread += self._sock.recv(max(size, _CHUNK))
            self.asked_at = None  # a later message sets it again
            if not self.greeted:
                self._greet()
        data = bytes(self._unread[:size])
        del self._unread[:size]
        return data

    def _greet(self) -> None:
        self._head += self._unread
        if len(self._head) >= _GREETING.size:
            self.greeted = True
            _, _, timeout, session = _GREETING.unpack_from(self._head)
            self._heard(timeout / 1000, session)

    def hang_up(self) -> None:
        """From any thread."""
        try:
            self._sock.shutdown(2)
        except OSError:
            return  # it is closed
