"""One worker process of the demo. Until SIGTERM it takes the lock, reads the ledger, works, and writes back.

Started as `python -m asynclock.cli.demo.worker NUMBER LEDGER_SOCKET LEASE MAX_LEASE URL...`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import warnings

from asynclock import Lease, LockError, LockLost, Redlock
from asynclock._clock import now
from asynclock.cli.demo.data import Data
from asynclock.cli.demo.ledger import LedgerClient

INVOICE = "invoice:42"
WORK = (0.3, 0.75)
"""The shortest and longest work of a tenure, in leases. Work of more than a third of a lease needs a renewal."""
_LOOK = 0.03  # seconds between two checks for a renewal


class Worker:
    """Takes the lock, works and releases it, in a loop; reports each step to the ledger."""

    def __init__(self, ledger: LedgerClient, data: Data, redlock: Redlock, lease: float) -> None:
        self._ledger = ledger
        self._data = data
        self._redlock = redlock
        self._length = lease
        self._task = asyncio.current_task()
        self._waiting = False
        self._stopping = False
        self._lease: Lease | None = None
        self._until = 0.0
        self._total = 0

    def stop(self) -> None:
        """Give up waiting, or finish the tenure and end."""
        self._stopping = True
        if self._waiting and self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        looking = asyncio.create_task(self._report_renewals())
        try:
            while not self._stopping:
                await self._tenure()
                await asyncio.sleep(self._length * random.uniform(0.02, 0.12))  # noqa: S311 - others get their chance
        finally:
            looking.cancel()

    async def _tenure(self) -> None:
        self._ledger.say("waiting")
        self._waiting = True
        mine: Lease | None = None
        try:
            async with self._redlock(INVOICE) as mine:
                await self._hold(mine)
        except LockLost as lost:
            if mine is None:  # it ended before the block began
                return
            self._ledger.say("lost", fence=mine.fence, reason=lost.reason)
            # A program that has not noticed the loss would make these writes now. The fencing token must stop them.
            self._ledger.say("stale", fence=mine.fence, **await self._data.write(mine))
            await self._ledger.write(mine.fence, self._total + 1)
        except LockError as error:
            self._waiting = False
            self._ledger.say("failed", error=str(error))
        finally:
            self._lease = None

    async def _hold(self, lease: Lease) -> None:
        entered = now()
        self._waiting = False
        self._lease = lease
        self._until = now() + lease.remaining
        self._ledger.say("holds", fence=lease.fence, at=entered, until=self._until)
        self._total = await self._ledger.read(lease.fence)
        await asyncio.sleep(self._length * random.uniform(*WORK))  # noqa: S311 - the work
        await self._data.write(lease)  # first: a write that the ledger has accepted is in the data
        await self._ledger.write(lease.fence, self._total + 1)
        self._see_validity()
        left = now()  # read last: from here on another worker may hold
        self._ledger.say("left", fence=lease.fence, at=left, until=self._until)

    def _see_validity(self) -> bool:
        """Whether the validity now ends later than was reported."""
        if self._lease is None or not (remaining := self._lease.remaining):
            return False
        before, self._until = self._until, max(self._until, now() + remaining)
        return self._until > before + 0.01

    async def _report_renewals(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            if self._see_validity() and self._lease is not None:
                self._ledger.say("renewed", fence=self._lease.fence, until=self._until)


async def work(number: int, path: str, lease: float, max_lease: float, urls: list[str]) -> None:
    """Work until SIGTERM, or until the demo is gone."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if task is not None:
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    ledger = LedgerClient(*await asyncio.open_unix_connection(path))
    try:
        await ledger.hello(number, os.getpid())
        # The demo never kills the first server, so the data can be there.
        async with Data(urls[0]) as data, Redlock(*urls, lease=lease, max_lease=max_lease) as redlock:
            worker = Worker(ledger, data, redlock, lease)
            loop.add_signal_handler(signal.SIGTERM, worker.stop)
            await worker.run()
    except ConnectionError:
        pass  # the demo is gone
    finally:
        await ledger.aclose()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=r"\d+ nodes survive")  # the demo has printed that already
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(work(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), sys.argv[5:]))
