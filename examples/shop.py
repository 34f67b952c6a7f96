"""The shop that the examples protect: it must charge each order once at a time, and refuse a stale holder.

The journal is a SQLite file that all processes of one machine share ($SHOP names it). Its entries are in the order of
the events, so you can check afterwards that no two charges of one order overlapped:

    sqlite3 /tmp/asynclock-shop.sqlite "select * from journal where order_id = 42"
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

_TABLE = """CREATE TABLE IF NOT EXISTS journal (
    entry INTEGER PRIMARY KEY, order_id INTEGER NOT NULL, fence INTEGER NOT NULL, what TEXT NOT NULL)"""
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
        self._db.execute(_TABLE)
        self._db.execute("CREATE INDEX IF NOT EXISTS fences ON journal (order_id, fence)")

    async def charge(self, order_id: int, *, fence: int) -> None:
        """Charge the order. Raises StaleFence.

        Let it run to its end. A charge that is cancelled half-way is in doubt, as the journal then says: the payment
        provider has the request, and may carry it out. Then ask the provider what it did, or send the request again
        with the same idempotency key; a new request may charge the customer twice."""
        self.write(order_id, fence, "begin")
        try:
            await asyncio.sleep(LATENCY)  # the payment provider
        except asyncio.CancelledError:
            with contextlib.suppress(StaleFence):  # a later holder has written already, so this entry is not needed
                self.write(order_id, fence, "in doubt")
            raise
        self.write(order_id, fence, "charged")

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
