"""Notices for clients that get no push messages: on MariaDB, MySQL and SQLite, and behind a pooler.

A notice is a row, which the sender inserts in the transaction of its op. A client looks for its rows while it waits or
holds: often right after it began to wait or received a notice, and then less and less often, at least every 250 ms
while it waits.
"""

from __future__ import annotations

import asyncio
import math
import random
import secrets
from typing import TYPE_CHECKING

from asynclock.rules.model import ID_LENGTH, TAG_LENGTH
from asynclock.stores.sql.background import Background
from asynclock.stores.sql.listening import message_of, notice_of
from asynclock.stores.sql.rows import NOTICES, Row, tags_in

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from asynclock.rules.model import Notice, State
    from asynclock.stores.sql.dialects import Dialect
    from asynclock.stores.sql.lines import Line
    from asynclock.stores.sql.pool import Pool

FIRST = 0.002
"""Seconds until the first look; each pause is twice the one before ..."""
WAITING = 0.25
"""... up to this while a client waits ..."""
HOLDING = 1.0
"""... and up to this while it only holds: then a notice can only say that the hold was broken."""

MANY = 256
"""The names that have ended are removed when this remembers more than this many names, and twice as many as before."""

_SLICE = 500
"""Names that one turn of the event loop looks at."""

_KEPT = 60.0
"""Seconds after which a notice that nobody took is removed."""


async def put(dialect: Dialect, line: Line, notice: Notice, now: float, *, brief: bool) -> None:
    """Store a notice, in a transaction. The notices of a client are in the order of their names. `brief`: see
    `Dialect.insert`."""
    if not notice.number and not notice.broken:
        return  # it says that others wait for a hold: its release looks for them anyway
    name = f"{NOTICES}{notice.tag}:{int(now * 1_000_000):020d}:{secrets.token_hex(6)}"
    await dialect.insert(line, Row(name, keep_until=now + _KEPT, state=message_of(notice)), now, brief=brief)


class Inbox:
    """The looks of one event loop. `deliver` gets the notices."""

    def __init__(self, dialect: Dialect, pool: Pool, deliver: Callable[[Notice], object]) -> None:
        self._dialect = dialect
        self._pool = pool
        self._deliver = deliver
        self._tags: set[str] = set()
        # By key: our tickets, by id and number, and when each of them ends, on the clock of the loop.
        self._waiting: dict[str, dict[tuple[str, int], float]] = {}
        self._holding: dict[str, dict[tuple[str, int], float]] = {}  # the same of our holds
        self._many = MANY  # beyond so many names, those that have ended are forgotten
        self._loop = asyncio.get_running_loop()
        self._look: asyncio.Event = asyncio.Event()
        self._sooner = asyncio.Event()  # set when a waiter begins to wait: this ends a long pause
        self._pause = FIRST
        self._background: Background | None = None

    def add(self, tag: str) -> None:
        """A client looks from now on."""
        self._tags.add(tag)

    def remove(self, tag: str) -> None:
        self._tags.discard(tag)

    @property
    def tags(self) -> Collection[str]:
        """Of the clients that look."""
        return self._tags

    def seen(self, key: str, state: State, now: float, looking: Collection[str]) -> None:
        """An op of a client of this loop has left that state, at `now` of the server. `looking`: with these tags; ():
        push messages arrive by now, so this looks only for what it did look for."""
        if not self.looks_for(key) and not (looking and self._tags & tags_in(state)):
            return
        tickets = {(each.id[:ID_LENGTH], each.number): each.ends for each in state.queue if self._is_ours(each.id)}
        holds = {(each.id[:ID_LENGTH], 0): each.ends for each in state.holds if self._is_ours(each.id)}
        self._note(self._waiting, key, tickets, now)
        self._note(self._holding, key, holds, now)
        if tickets:
            self._pause = FIRST
            self._sooner.set()
        if tickets or holds:
            self._look.set()
            self._begin()

    def looks_for(self, key: str) -> bool:
        """Whether a client of this loop waits for that name, or holds it, as far as is known here."""
        return key in self._holding or key in self._waiting

    def seen_plain(self, key: str, id: str, lease: float) -> None:
        """As `seen`, where nobody waits: an op has left the hold of that id for its lease; "": none."""
        self._waiting.pop(key, None)
        if not id or not self._is_ours(id):
            self._holding.pop(key, None)
            return
        self._holding[key] = {(id[:ID_LENGTH], 0): self._loop.time() + lease}
        self._look.set()
        self._begin()

    def _begin(self) -> None:
        if self._background is None:
            self._background = Background(self._run, "asynclock looks for notices")

    def _is_ours(self, id: str) -> bool:
        return id[:TAG_LENGTH] in self._tags

    def _note(
        self,
        noted: dict[str, dict[tuple[str, int], float]],
        key: str,
        ends: Mapping[tuple[str, int], float | None],
        now: float,
    ) -> None:
        if ends:
            ahead = self._loop.time() - now
            noted[key] = {each: math.inf if end is None else end + ahead for each, end in ends.items()}
        else:
            noted.pop(key, None)

    async def _run(self) -> None:
        while True:
            await self._look.wait()
            if len(self._waiting) + len(self._holding) > self._many:  # not in each look: there may be thousands
                await self._forget_ended(self._waiting)
                await self._forget_ended(self._holding)
                self._many = max(MANY, 2 * (len(self._waiting) + len(self._holding)))
            waits = self._is_any(self._waiting)
            if not waits and not self._is_any(self._holding):
                self._look.clear()
                continue
            self._pause = min(self._pause, WAITING if waits else HOLDING)
            if await self._is_hurried(self._pause * random.uniform(0.5, 1.0)):  # noqa: S311 - jitter
                await asyncio.sleep(FIRST)
            self._pause *= 2
            try:
                for tag in sorted(self._tags):
                    await self._take(tag)
            except Exception:  # the next op finds it out, and reports it
                self._pool.drop_idle()

    async def _is_hurried(self, seconds: float) -> bool:
        """Pause. Whether a waiter has ended the pause."""
        self._sooner.clear()
        try:
            async with asyncio.timeout(seconds):
                return await self._sooner.wait()
        except TimeoutError:
            return False

    def _is_any(self, noted: dict[str, dict[tuple[str, int], float]]) -> bool:
        """Whether one has not ended; those before it are forgotten."""
        while noted:
            key = next(iter(noted))
            if not self._has_ended(noted[key]):
                return True
            del noted[key]
        return False

    def _has_ended(self, ends: Mapping[tuple[str, int], float]) -> bool:
        now = self._loop.time()
        return max(ends.values(), default=now) <= now

    async def _forget_ended(self, noted: dict[str, dict[tuple[str, int], float]]) -> None:
        """In slices."""
        for number, key in enumerate(list(noted), 1):
            if key in noted and self._has_ended(noted[key]):
                del noted[key]
            if not number % _SLICE:
                await asyncio.sleep(0)

    async def _take(self, tag: str) -> None:
        begin = f"{NOTICES}{tag}:"
        async with self._pool.line() as line:
            found = await self._pool.alone(
                line,
                f"SELECT resource_name, state FROM {self._dialect.table} "  # noqa: S608
                "WHERE resource_name > :begin AND resource_name < :end ORDER BY resource_name",
                {"begin": begin, "end": f"{begin}~"},
            )
            if found:
                await self._dialect.check(line)  # a notice may be a grant
                await self._dialect.check_primary(line)
            for name, message in found:
                await self._pool.alone(
                    line,
                    f"DELETE FROM {self._dialect.table} WHERE resource_name = :name",  # noqa: S608
                    {"name": name},
                )
                self._taken(notice_of(message))  # at once: the next statement may fail

    def _taken(self, notice: Notice | None) -> None:
        if notice is not None:
            self._pause = FIRST
            if notice.fence:  # that ticket became a hold; a later one may wait for the same name
                self._waiting.get(notice.name, {}).pop((notice.id, notice.number), None)
            self._deliver(notice)

    async def aclose(self) -> None:
        if self._background is not None:
            await self._background.aclose()
