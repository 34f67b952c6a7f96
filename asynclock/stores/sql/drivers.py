"""How drivers connect: with lookups and Happy Eyeballs of asynclock (`stores/dialing.py`), where a driver allows it. It
takes an event loop, and that one connects in another way; nothing else of the driver changes. Where a url names several
hosts, none of them holds up the others (`hosts.py`)."""

from __future__ import annotations

import asyncio
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from asynclock.stores.dialing import DialingLoop
from asynclock.stores.sql.hosts import Hosts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def creator_of(driver: str, limit: float) -> Callable[..., Awaitable[Any]] | None:
    """For the option `async_creator_fn` of SQLAlchemy: connects with a driver, with the arguments of its `connect`.
    `limit`: seconds that a connect may take. None: the driver connects by itself."""
    connect = _DRIVERS.get(driver)
    return None if connect is None else Hosts(partial(connect, limit), limit).connected


async def _asyncpg(limit: float, *args: Any, **options: Any) -> Any:
    import asyncpg  # type: ignore[import-untyped]

    return await asyncpg.connect(*args, loop=_AsyncpgLoop(asyncio.get_running_loop(), limit), **options)


class _AsyncpgLoop(DialingLoop):
    """asyncpg first asks whether the server speaks TLS, with a protocol that has a future for the answer. If the
    connect is cancelled before asyncpg awaits this future, the end of the connection sets an error there, which asyncio
    logs as never retrieved. So the future is cancelled as well."""

    async def create_connection(self, factory: Callable[[], asyncio.BaseProtocol], *args: Any, **options: Any) -> Any:
        made: list[asyncio.BaseProtocol] = []

        def make() -> asyncio.BaseProtocol:
            made.append(factory())
            return made[-1]

        try:
            return await super().create_connection(make, *args, **options)
        except asyncio.CancelledError:
            for answer in (getattr(each, "on_data", None) for each in made):
                if isinstance(answer, asyncio.Future):
                    answer.cancel()
            raise


async def _asyncmy(limit: float, *args: Any, **options: Any) -> Any:
    connection = _asyncmy_class()(DialingLoop(asyncio.get_running_loop(), limit), *args, **options)
    await connection.connect()
    return connection


async def _aiomysql(limit: float, *args: Any, **options: Any) -> Any:
    from aiomysql.connection import Connection  # type: ignore[import-not-found,import-untyped,unused-ignore]

    del limit  # it takes no event loop
    connection = Connection(*args, **options)
    try:
        await connection._connect()  # noqa: SLF001 - as its connect() does, which leaves the socket open in a cancel
    except BaseException:
        connection.close()
        raise
    return connection


async def _psycopg(limit: float, *args: Any, **options: Any) -> Any:
    import psycopg  # type: ignore[import-not-found,unused-ignore]

    del limit  # it takes no event loop
    return await psycopg.AsyncConnection.connect(*args, **options)


@cache
def _asyncmy_class() -> Callable[..., Any]:
    from asyncmy.connection import Connection

    class Dialed(Connection):
        """Of asyncmy, which has no argument for the loop. Before 0.2.13 it connects without the loop."""

        def __init__(self, loop: DialingLoop, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)  # type: ignore[no-untyped-call]
            self._loop = loop

    return Dialed


_DRIVERS: dict[str, Callable[..., Awaitable[Any]]] = {
    "asyncpg": _asyncpg,
    "psycopg": _psycopg,
    "asyncmy": _asyncmy,
    "aiomysql": _aiomysql,
}
