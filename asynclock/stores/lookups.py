"""Looks up host names, in threads of its own (`shared_calls.py`): `getaddrinfo` cannot be cancelled, and takes 15 s or
longer if the name server is silent. There is one lookup per host at a time."""

from __future__ import annotations

import contextlib
import socket
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from asynclock.stores.shared_calls import Call, SharedCalls, result_of, wait_for_call

if TYPE_CHECKING:
    from collections.abc import Sequence

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


class _Lookup(Call[list[Address]]):
    """Of one host."""

    def __init__(self, host: str) -> None:
        super().__init__()
        self._host = host
        self.thread_name, self.purpose = f"asynclock looks up {host}", f"the lookup of {host}"

    def work(self) -> list[Address]:
        try:
            found = socket.getaddrinfo(self._host, 0, 0, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        except Exception as error:  # a name that cannot be encoded is a UnicodeError
            why = error.strerror if isinstance(error, OSError) else None
            raise Unresolved(f"the host name {self._host} does not resolve: {why or error}") from None
        return [tuple(each) for each in found]


_lookups = SharedCalls[_Lookup]()


def _start(host: str) -> _Lookup:
    return _lookups.start(host, partial(_Lookup, host))


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
    lookup = _start(host)
    await wait_for_call(lookup)
    return _with_port(_result(lookup), port)


def addresses_within(hosts: Sequence[tuple[str, int]], limit: float) -> list[list[Address] | OSError]:
    """As `addresses_of`, for a thread that may block, and for several hosts and their ports: the addresses of each, or
    its error. Waits for `limit` seconds at most, and once there is an address, for a moment."""
    lookups = {host: _start(host) for host, _ in hosts if not is_address(host)}
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


def _result(lookup: _Lookup) -> list[Address]:
    """Raises Unresolved, or TimeoutError for one that has not ended."""
    try:
        return result_of(lookup)
    except ConnectionError as error:  # no thread
        raise Unresolved(str(error)) from None


def _numeric(host: str) -> list[Address]:
    """The address of a host that is written as one; []: it is a name."""
    for family, rest in ((socket.AF_INET, ()), (socket.AF_INET6, (0, 0))):
        with contextlib.suppress(OSError, ValueError):
            socket.inet_pton(family, host)
            return [(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, 0, *rest))]
    return []


def _with_port(found: list[Address], port: int) -> list[Address]:
    return [(*each[:4], (each[4][0], port, *each[4][2:])) for each in found]
