"""The shop that the examples protect: it must charge each order once, and refuse a stale holder.

The journal is a SQLite file that all processes of one machine share ($SHOP names it). Its entries are in the order of
the events, so you can check afterwards that no two charges of one order overlapped, and that one payment was made:

    sqlite3 /tmp/asynclock-shop.sqlite "select * from journal where order_id = 42"
    sqlite3 /tmp/asynclock-shop.sqlite "select * from payments where order_id = 42"
"""

import asyncio
import contextlib
import os
import sqlite3
import tempfile
from pathlib import Path
from typing import Self

JOURNAL = Path(os.environ.get("SHOP") or Path(tempfile.gettempdir(), "asynclock-shop.sqlite"))
LATENCY = float(os.environ.get("SHOP_LATENCY", "0.002"))
"""How long the payment provider takes, in seconds."""

_TABLES = """
CREATE TABLE IF NOT EXISTS journal (
    entry INTEGER PRIMARY KEY, order_id INTEGER NOT NULL, fence INTEGER NOT NULL, what TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS fences ON journal (order_id, fence);
CREATE TABLE IF NOT EXISTS payments (key TEXT PRIMARY KEY, order_id INTEGER NOT NULL)"""  # those of the provider
# One statement, so that no other process writes between the check and the write.
_WRITE = """INSERT INTO journal (order_id, fence, what) SELECT :order_id, :fence, :what
    WHERE NOT EXISTS (SELECT 1 FROM journal WHERE order_id = :order_id AND fence > :fence)"""


class StaleFence(Exception):
    """A later holder of the lock has written already, so the holder of this token has lost its lease."""


class Shop:
    """The charges. It refuses a fencing token that is smaller than one seen before."""

    def __init__(self, path: Path = JOURNAL) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, timeout=10.0)  # calls are short, so they need no thread
        self._db.execute("PRAGMA synchronous = OFF")  # the data survive a crash of the program, not of the machine
        self._db.executescript(_TABLES)

    async def charge(self, order_id: int, *, fence: int) -> None:
        """Charge the order. Raises StaleFence.

        Let it run to its end. A charge that is cancelled half-way, or whose process dies, is in doubt: the payment
        provider has the request, and may carry it out. The next charge of the order sends the same idempotency key, so
        it takes no money again."""
        self.write(order_id, fence, "begin")
        try:
            await self._provider_takes(order_id, key=f"order-{order_id}")
        except asyncio.CancelledError:
            with contextlib.suppress(StaleFence):  # a later holder has written already, so this entry is not needed
                self.write(order_id, fence, "in doubt")
            raise
        self.write(order_id, fence, "charged")

    async def _provider_takes(self, order_id: int, key: str) -> None:
        """The payment provider takes the money once for each key. Its answer comes later."""
        self._db.execute("INSERT OR IGNORE INTO payments (key, order_id) VALUES (?, ?)", (key, order_id))
        await asyncio.sleep(LATENCY)

    def write(self, order_id: int, fence: int, what: str) -> None:
        """Write an entry. Raises StaleFence."""
        if not self._db.execute(_WRITE, {"order_id": order_id, "fence": fence, "what": what}).rowcount:
            raise StaleFence(f"order {order_id}: fencing token {fence} is stale; nothing was written")

    def is_charged(self, order_id: int) -> bool:
        """Whether any process has charged the order."""
        return any(what == "charged" for _, what in self.journal(order_id))

    def journal(self, order_id: int) -> list[tuple[int, str]]:
        """The entries of the order (fence, what), oldest first."""
        return self._db.execute(
            "SELECT fence, what FROM journal WHERE order_id = ? ORDER BY entry", (order_id,)
        ).fetchall()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()
