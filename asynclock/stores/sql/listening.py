"""Push messages of PostgreSQL: NOTIFY on a channel for each client, and one connection that listens to those of this
event loop.

Behind a pooler that gives a connection of the server to each transaction (PgBouncer, pool_mode=transaction), LISTEN has
no effect. That is tried out: a message that another connection sends must arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
from typing import TYPE_CHECKING, Any

from asynclock.rules.model import Notice
from asynclock.stores.sql.background import Background
from asynclock.stores.sql.engines import connection_of
from asynclock.stores.sql.limits import CLOSING, in_background, keep_socket, limited
from asynclock.stores.sql.lines import SERVED, closed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

    from asynclock.stores.sql.lines import Line

LONGEST = 7900
"""Bytes of a message: PostgreSQL takes less than 8000."""

WATCH = 10.0
"""Seconds between two questions whether the connection still answers. It only listens, so without them nobody would
notice that a network has dropped it."""

ANSWER = 2.0
"""Seconds that a statement of this connection may take."""

_DEFAULTS = Notice._field_defaults

_TYPES: dict[str, Any] = {"id": str, "number": int} | {
    field: (float, int) if isinstance(default, float) else type(default) for field, default in _DEFAULTS.items()
}
"""Of the fields of a notice."""


def channel(tag: str) -> str:
    """The channel of a client."""
    return f"asynclock_{tag}"


def message_of(notice: Notice) -> str:
    """As JSON. A name that is too long is left out: then a waiter is still found by its id, and a holder learns at its
    next renewal what the notice would say."""
    fields = {field: value for field, value in notice._asdict().items() if value != _DEFAULTS.get(field)}
    text = json.dumps(fields, separators=(",", ":"))
    if len(text) > LONGEST:
        del fields["name"]
        text = json.dumps(fields, separators=(",", ":"))
    return text


def notice_of(message: str) -> Notice | None:
    """The reverse; None for a message of another program. A field that a newer version added is left out."""
    try:
        fields = json.loads(message)
        notice = Notice(**{field: fields[field] for field in Notice._fields if field in fields})
    except (RecursionError, TypeError, ValueError):
        return None
    return notice if all(isinstance(value, _TYPES[field]) for field, value in notice._asdict().items()) else None


class Listening:
    """A connection that listens. `lost` is called once when it is gone."""

    def __init__(
        self, connection: AsyncConnection, driver: Any, received: Callable[[Notice], object], lost: Callable[[], object]
    ) -> None:
        self._connection = connection
        self.driver = driver
        self._received = received
        self._lost: Callable[[], object] | None = lost
        self._alone = asyncio.Lock()  # asyncpg refuses a statement while another one runs
        driver.add_termination_listener(self._terminated)
        self._kept = keep_socket(driver)
        self._watching = Background(self._watch, "asynclock watches a connection")

    @classmethod
    async def connect(
        cls, engine: AsyncEngine, received: Callable[[Notice], object], lost: Callable[[], object]
    ) -> Listening:
        """A connection of that engine, but not of its pool: it never goes back there."""
        connection = await connection_of(engine)
        try:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            raw = await connection.get_raw_connection()
            driver: Any = raw.driver_connection
            await driver.execute(SERVED)
            await connection.run_sync(lambda each: each.detach())
        except BaseException:
            in_background(closed(connection))
            raise
        return cls(connection, driver, received, lost)

    async def answers(self) -> bool:
        """Whether it can still listen. If not, it is closed."""
        try:
            await self._run(self.driver.execute, "SELECT 1")
        except Exception:
            self.driver.terminate()
            return False
        return True

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
            if not await self.answers():
                return

    async def _run(self, do: Callable[..., Awaitable[object]], *arguments: object) -> None:
        async with self._alone, asyncio.timeout(ANSWER):
            await do(*arguments)

    async def works(self, line: Line, within: float) -> bool:
        """Whether a message arrives that another connection sends."""
        name, came = f"asynclock_{secrets.token_hex(6)}", asyncio.Event()

        def heard(*args: object) -> None:
            came.set()

        await self._run(self.driver.add_listener, name, heard)
        try:
            await line.run(f'NOTIFY "{name}"')
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within):
                    await came.wait()
        finally:
            await self._run(self.driver.remove_listener, name, heard)
        return came.is_set()  # also if it came while the loop was blocked for longer

    async def is_direct(self) -> bool:
        """Whether it is the server's own connection, and not that of a pooler, which tells another process."""
        with contextlib.suppress(Exception):
            async with self._alone, asyncio.timeout(ANSWER):
                return bool(await self.driver.fetchval("SELECT pg_backend_pid()") == self.driver.get_server_pid())
        return False

    async def add(self, tag: str) -> None:
        await self._run(self.driver.add_listener, channel(tag), self._heard)

    async def remove(self, tag: str) -> None:
        with contextlib.suppress(Exception):  # a connection that is gone
            await self._run(self.driver.remove_listener, channel(tag), self._heard)

    def _heard(self, driver: Any, pid: int, name: str, message: str) -> None:
        del driver, pid, name
        if (notice := notice_of(message)) is not None:
            self._received(notice)

    def _terminated(self, driver: Any) -> None:
        del driver
        self._watching.stop()
        lost, self._lost = self._lost, None
        if lost is not None:
            lost()

    def desert(self) -> None:
        """The event loop is closed: end the connection without it."""
        if self._kept is not None:
            self._kept.end()

    async def aclose(self) -> None:
        self._lost = None
        self._watching.stop()
        try:
            await limited(self.driver.close(timeout=CLOSING), CLOSING, cut=self.driver.terminate)
        except Exception:  # a server that is gone
            self.driver.terminate()
        await closed(self._connection)
