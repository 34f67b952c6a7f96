"""For tests that block their event loop: clients in other threads, which go on meanwhile, and a proxy of threads."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from asynclock import Lock, Redlock
from tests.support.probes import session_of
from tests.support.waiters import LIMIT, decided

THREAD = "asynclock renewals"
"""The name of the thread that renews leases."""


def lag_of(client: Redlock) -> Any:
    """How late the client finds its event loop."""
    return session_of(client).lag


def try_elsewhere(
    nodes: Any, name: str, timeout: float, lock: Callable[[Redlock, str], Lock] = Redlock.__call__, **options: Any
) -> bool:
    """Block this thread, so its event loop, while a client in another thread tries to acquire. Whether it got the lock;
    then it has released it again."""

    async def attempt() -> bool:
        async with Redlock(*nodes, **options) as rival:
            lease = await decided(lambda: lock(rival, name).acquire(timeout=timeout))
            if lease is not None:
                await lease.release()
            return lease is not None

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, attempt()).result()


def block_until(true: Callable[[], object]) -> None:
    """Block this thread until it is true."""
    tick, pause = threading.Event(), 0.001
    while not true():
        tick.wait(pause)
        pause = min(1.01 * pause, 0.01)


def callbacks_due() -> int:
    """How many callbacks the running event loop has to call in its next turn. Only asyncio's own loop tells it."""
    loop: Any = asyncio.get_running_loop()
    return len(loop._ready)


def renewal_threads() -> list[threading.Thread]:
    """Those that live."""
    return [each for each in threading.enumerate() if each.name == THREAD]


class ThreadedProxy:
    """Before a real server, in threads of its own, so that it works while the loop of the test is blocked. It can hold
    back one request."""

    def __init__(self, front: Path, back: Path) -> None:
        self.url = f"unix://{front}"
        self._front = front
        self._back = back
        self._listener = socket.socket(socket.AF_UNIX)
        self._sockets: list[socket.socket] = [self._listener]
        self._wanted: bytes | None = None
        self._go_on = threading.Event()
        self.caught = threading.Event()  # the request is held back
        self.answered = threading.Event()  # the server has answered it

    def __enter__(self) -> Self:
        self._listener.bind(str(self._front))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._go_on.set()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def catch(self, part: bytes) -> None:
        """Hold back the next request that contains this, and what follows it on its connection."""
        self._wanted = part

    def let_go(self) -> None:
        """The request goes on; returns once the server has answered it."""
        self._go_on.set()
        assert self.answered.wait(LIMIT)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(str(self._back))
                self._sockets += [client, server]
                held = threading.Event()
                threading.Thread(target=self._requests, args=(client, server, held), daemon=True).start()
                threading.Thread(target=self._replies, args=(server, client, held), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, held: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if self._wanted is not None and self._wanted in data:
                    self._wanted = None
                    held.set()
                    self.caught.set()
                    self._go_on.wait(LIMIT)
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def _replies(self, server: socket.socket, client: socket.socket, held: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if held.is_set():
                    self.answered.set()
                with contextlib.suppress(OSError):  # the client may have hung up
                    client.sendall(data)
            client.shutdown(socket.SHUT_WR)
