"""What the inbox of a database without push messages remembers of holds."""

from __future__ import annotations

import asyncio
from typing import Any

from asynclock.rules.model import ID_LENGTH, TAG_LENGTH, State, Ticket
from asynclock.stores.sql.inbox import MANY, Inbox
from tests.support.waiters import LIMIT

TAG = "t" * TAG_LENGTH
ID = TAG + "0" * (ID_LENGTH - TAG_LENGTH)


class Down:
    """The connections of a database that is down."""

    def line(self) -> Any:
        raise OSError("it is down")

    def drop_idle(self) -> None: ...


async def test_holds_that_have_ended_are_forgotten_while_a_client_waits() -> None:
    """As those that were detached or dropped: no op of this client tells of their end. One that has not ended stays."""
    pool: Any = Down()
    dialect: Any = None
    inbox = Inbox(dialect, pool, lambda notice: None)
    inbox.add(TAG)
    try:
        waits = State((), queue=(Ticket(1, ID, 1, 1e12, 1e12, 1),))
        inbox.seen("waited for", waits, 0.0, {TAG})
        inbox.seen_plain("held", ID, 60.0)
        for number in range(2 * MANY):
            inbox.seen_plain(f"order:{number}", ID, -1.0)
        async with asyncio.timeout(LIMIT):
            while any(inbox.looks_for(f"order:{number}") for number in range(2 * MANY)):
                await asyncio.sleep(0.001)
        assert inbox.looks_for("held")
        assert inbox.looks_for("waited for")
    finally:
        await inbox.aclose()
