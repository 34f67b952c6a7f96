"""A url of PostgreSQL may name several hosts, of which one is the primary: `?host=a:5432&host=b:5432`.

A driver tries them in turn, and one that is silent, as a machine that is switched off, would take the whole time of
each connect. Here the next one is tried as well once the first has not answered for its share of that time. The host of
the last connection comes first: so all connections lead to the same server, also if an older primary is back.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from asynclock._loop import own_task
from asynclock.stores.sql.errors import Meaning, is_crowded, meaning, reason
from asynclock.stores.sql.limits import abandon_task, discard

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence


class Hosts:
    """Those of one engine. `connect` takes the options of a driver. `limit`: seconds that a connect may take; the
    caller enforces it."""

    def __init__(self, connect: Callable[..., Awaitable[Any]], limit: float) -> None:
        self._connect = connect
        self._limit = limit
        self._last: Mapping[str, Any] | None = None  # the host of the last connection

    async def connected(self, *args: Any, **options: Any) -> Any:
        """A connection to one of them. Raises the error of the driver, or ConnectionError if no host can be used."""
        hosts = sorted(hosts_of(options), key=lambda host: host != self._last)
        if len(hosts) < 2:
            return await self._connect(*args, **options)
        running: dict[asyncio.Task[Any], Mapping[str, Any]] = {}
        failed: list[str] = []
        try:
            for host in hosts:
                running[own_task(self._to(args, {**options, **host}))] = host
                if (found := await self._first(running, failed, self._limit / len(hosts))) is not None:
                    return found
            while running:
                if (found := await self._first(running, failed, None)) is not None:
                    return found
        finally:
            for task in running:
                abandon_task(task, late=discard)
        raise ConnectionError(f"none of its hosts can be used: {'; '.join(failed)}")

    async def _to(self, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        return await self._connect(*args, **options)

    async def _first(
        self, running: dict[asyncio.Task[Any], Mapping[str, Any]], failed: list[str], seconds: float | None
    ) -> Any:
        """The first connection of these, within that time; None: there is none yet."""
        done, _ = await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in [each for each in running if each in done]:  # the preferred host first
            host = running.pop(task)
            if (error := task.exception()) is None:
                self._last = host
                return task.result()
            if not _is_of_host(error):
                raise error
            failed.append(f"{host['host']}:{host['port']}: {_said(error)}")
        return None


def hosts_of(options: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The options that name each host, as asyncpg has them (lists) or psycopg (texts with commas). Pure."""
    hosts, ports = (_listed(options.get(name)) for name in ("host", "port"))
    if len(ports) == 1:
        ports = ports * len(hosts)
    if "hostaddr" in options or len(hosts) != len(ports):
        return []
    return [{"host": host, "port": port} for host, port in zip(hosts, ports, strict=True)]


def _listed(value: object) -> list[Any]:
    return value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]


def _is_of_host(error: BaseException) -> bool:
    """Whether another host may do: this one cannot be reached, serves nobody at present, or is not the primary. What a
    server says about the login or the database holds for all of them."""
    return not is_crowded(error) and (meaning(error) is Meaning.LOST or _is_other_kind(error))


def _is_other_kind(error: BaseException) -> bool:
    """Of asyncpg: the server is not what `target_session_attrs` asks for."""
    return type(error).__name__ == "TargetServerAttributeNotMatched"


def _said(error: BaseException) -> str:
    return "it is not what target_session_attrs asks for" if _is_other_kind(error) else reason(error)
