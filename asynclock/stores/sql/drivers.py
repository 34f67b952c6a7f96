"""How drivers connect: with lookups and Happy Eyeballs of asynclock (`stores/dialing.py`), where a driver allows it. It
takes an event loop, and that one connects in another way; nothing else of the driver changes."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import TYPE_CHECKING, Any

from asynclock.stores.dialing import DialingLoop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def creator_of(driver: str, limit: float) -> Callable[..., Awaitable[Any]] | None:
    """For the option `async_creator_fn` of SQLAlchemy: connects with a driver, with the arguments of its `connect`.
    `limit`: seconds that a connect may take. None: the driver takes no event loop."""
    connect = _DRIVERS.get(driver)
    if connect is None:
        return None

    async def created(*args: Any, **options: Any) -> Any:
        return await connect(DialingLoop(asyncio.get_running_loop(), limit), *args, **options)

    return created


async def _asyncpg(loop: DialingLoop, *args: Any, **options: Any) -> Any:
    import asyncpg  # type: ignore[import-untyped]

    return await asyncpg.connect(*args, loop=loop, **options)


async def _asyncmy(loop: DialingLoop, *args: Any, **options: Any) -> Any:
    connection = _asyncmy_class()(loop, *args, **options)
    await connection.connect()
    return connection


@cache
def _asyncmy_class() -> Callable[..., Any]:
    from asyncmy.connection import Connection

    class Dialed(Connection):
        """Of asyncmy, which has no argument for the loop. Before 0.2.13 it connects without the loop."""

        def __init__(self, loop: DialingLoop, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)  # type: ignore[no-untyped-call]
            self._loop = loop

    return Dialed


_DRIVERS: dict[str, Callable[..., Awaitable[Any]]] = {"asyncpg": _asyncpg, "asyncmy": _asyncmy}
