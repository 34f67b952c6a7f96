"""Host names that a test gives addresses to, name servers that are silent, and addresses that do not answer."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

GOOD, SILENT = "127.0.0.1", "127.0.0.2"


class HostNames:
    """Stands in for the name servers of this process."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._muted: dict[str, threading.Event] = {}
        self._real = socket.getaddrinfo

    def give(self, host: str, *addresses: str) -> None:
        """The host has these addresses, the preferred one first."""
        self._addresses[host] = addresses

    def mute(self, *hosts: str) -> None:
        """Lookups of these hosts get no answer."""
        for host in hosts:
            self._muted[host] = threading.Event()

    def answer(self) -> None:
        """All lookups get their answer now."""
        for each in self._muted.values():
            each.set()
        self._muted.clear()

    def getaddrinfo(self, host: Any, port: Any, *args: Any, **options: Any) -> list[Any]:
        self.asked[host] += 1
        if host in self._muted:
            self._muted[host].wait()
        if host not in self._addresses and str(host).endswith(".test"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        addresses = self._addresses.get(host, (host,))
        return [each for address in addresses for each in self._real(address, port, *args, **options)]


@pytest.fixture
def host_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostNames]:
    names = HostNames()
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    yield names
    names.answer()
    for each in threading.enumerate():  # else a lookup of the next test would be this one
        if each.name.startswith("asynclock looks up"):
            each.join()


def _listener(port: int) -> socket.socket:
    """Waits while another worker has this port: the servers of several workers are the same."""
    give_up = time.monotonic() + 30.0
    while True:
        try:
            return socket.create_server((SILENT, port), backlog=0)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # macOS
                pytest.skip(f"this machine has only one loopback address ({error})")
            if time.monotonic() > give_up:
                raise
            time.sleep(0.05)


@contextlib.contextmanager
def silent_at(port: int) -> Iterator[None]:
    """Nobody answers at this port of SILENT: the queue of connections of its listener is full, so the system drops each
    further SYN."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(_listener(port))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        yield
