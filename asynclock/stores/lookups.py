"""Looks up host names, in threads of its own.

`getaddrinfo` cannot be cancelled, and takes 15 s or longer if the name server is silent. In the default executor of the
event loop it would take the threads that the program needs for `asyncio.to_thread`, and `asyncio.run` would wait for
it. So

- each lookup has a daemon thread, which does not hold up the end of the program;
- there is one lookup per host at a time. All connects of the process wait for the same one, in any thread and event
  loop. A connect that is cancelled leaves the lookup to the others;
- a forked child starts its own lookups, because it has no copy of the threads of its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from asynclock._clock import wake

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Address: TypeAlias = tuple[Any, ...]
"""What getaddrinfo returns: family, type, protocol, canonical name, socket address."""

NO_ANSWER = "no answer to the lookup of its host name"
"""The reason of a connect that ended before the lookup did."""

ADVICE = "check the host name and the name servers (/etc/resolv.conf)"
"""What to do about it."""

_GRACE = 0.25
"""Seconds for which a thread waits for the other lookups, after the first one has ended."""


class Unresolved(OSError):
    """The name of a host has no address, or could not be looked up."""


class _Lookups:
    """Those of this process that are under way, by host."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._running: dict[str, Future[list[Address]]] = {}

    def get(self, host: str) -> Future[list[Address]] | None:
        return self._running.get(host)

    def start(self, host: str) -> Future[list[Address]]:
        """The lookup of a host that is under way, or a new one. Without a thread it has failed already."""
        with self._guard:
            lookup = self._running.get(host)
            if lookup is None:
                lookup = Future()
                name = f"asynclock looks up {host}"
                try:
                    threading.Thread(target=self._run, args=(host, lookup), name=name, daemon=True).start()
                except RuntimeError as error:
                    lookup.set_exception(Unresolved(f"no thread for the lookup of {host}: {error}"))
                    return lookup
                self._running[host] = lookup
            return lookup

    def _run(self, host: str, lookup: Future[list[Address]]) -> None:
        settle: Callable[[], None]
        try:
            found = socket.getaddrinfo(host, 0, 0, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            settle = partial(lookup.set_result, [tuple(each) for each in found])
        except Exception as error:  # a name that cannot be encoded is a UnicodeError
            why = error.strerror if isinstance(error, OSError) else None
            settle = partial(lookup.set_exception, Unresolved(f"the host name {host} does not resolve: {why or error}"))
        with self._guard:
            self._running.pop(host, None)  # absent if an interrupt hit `start`
        settle()


_lookups = _Lookups()


def _after_fork() -> None:
    global _lookups  # noqa: PLW0603 - its lock may be held by a thread that the child does not have
    _lookups = _Lookups()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)


def is_address(host: str) -> bool:
    """Whether it needs no lookup."""
    return bool(_numeric(host))


def lookup_under_way(host: str | None) -> str:
    """The end of the error of a connect that took too long: says whether the lookup of its host has not ended yet."""
    return f": {NO_ANSWER}; {ADVICE}" if host is not None and _lookups.get(host) is not None else ""


async def addresses_of(host: str, port: int) -> list[Address]:
    """The addresses of a host, in the order of preference. Raises Unresolved."""
    if found := _numeric(host):
        return _with_port(found, port)
    lookup, loop = _lookups.start(host), asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def tell(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(wake, ended)

    lookup.add_done_callback(tell)
    await ended
    return _with_port(_result(lookup), port)


def addresses_within(hosts: Sequence[tuple[str, int]], limit: float) -> list[list[Address] | OSError]:
    """As `addresses_of`, for a thread that may block, and for several hosts and their ports: the addresses of each, or
    its error. Waits for `limit` seconds at most, and once there is an address, for a moment."""
    lookups = {host: _lookups.start(host) for host, _ in hosts if not is_address(host)}
    if all(host in lookups for host, _ in hosts):
        wait(lookups.values(), limit, FIRST_COMPLETED)
    wait(lookups.values(), min(limit, _GRACE))
    found: list[list[Address] | OSError] = []
    for host, port in hosts:
        try:
            found.append(_with_port(_result(lookups[host]) if host in lookups else _numeric(host), port))
        except TimeoutError:
            found.append(TimeoutError(f"{host}: {NO_ANSWER}; {ADVICE}"))
        except Unresolved as error:
            found.append(error)
    return found


def _result(lookup: Future[list[Address]]) -> list[Address]:
    """Raises Unresolved, or TimeoutError for one that has not ended."""
    error = lookup.exception(0.0)
    if error is not None:
        raise Unresolved(str(error))  # an exception of its own for each connect, with the traceback of that connect
    return lookup.result()


def _numeric(host: str) -> list[Address]:
    """The address of a host that is written as one; []: it is a name."""
    for family, rest in ((socket.AF_INET, ()), (socket.AF_INET6, (0, 0))):
        with contextlib.suppress(OSError, ValueError):
            socket.inet_pton(family, host)
            return [(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, 0, *rest))]
    return []


def _with_port(found: list[Address], port: int) -> list[Address]:
    return [(*each[:4], (each[4][0], port, *each[4][2:])) for each in found]
