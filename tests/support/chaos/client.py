"""The program of a client host. It uses a few names until SIGTERM, and writes what it did as lines of JSON.

The oracle is a file for each name: who is in the body has it locked (flock), a reader shared. The kernel knows of every
holder on this machine, whatever the locks say. The lock on the file ends before the release is sent."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asynclock import Lease, Lock, LockError, LockLost, LockTimeout, QuorumUnavailable, Redlock
from asynclock.events import Event, Quarantined

KINDS = {"m0": "mutex", "m1": "mutex", "m2": "mutex", "f0": "fair", "rw0": "read-write"}
"""The names that all use. Task 0 of each host uses a name of its own, which no other host can be in the way of: a host
that is cut off in a body keeps the name for a lease."""

EXPECTED = (LockTimeout, LockLost, QuorumUnavailable)
"""What a lock may raise while servers fail. All else is a violation."""

_BODY, _PAUSE = 0.004, 0.02  # seconds at most
_READY = 30.0


@dataclass(frozen=True)
class Settings:
    """What a client is told, as JSON in its argument."""

    urls: list[str]
    host: int
    tasks: int
    lease: float
    prefix: str
    trust_restarts: bool
    seed: int
    folder: str

    def client(self) -> Redlock:
        options: Any = {"lease": self.lease, "prefix": self.prefix}
        if len(self.urls) > 1:
            options |= {"max_lease": self.lease, "trust_restarts": self.trust_restarts}
        return Redlock(*self.urls, **options)

    def write_quarantine(self, event: Event) -> None:
        """If it is the begin of one."""
        if isinstance(event, Quarantined):
            node = next(number for number, url in enumerate(self.urls) if event.node in url)
            write(quarantined=node, seconds=event.seconds)

    def command(self, what: str) -> list[str]:
        return [sys.executable, "-m", "tests.support.chaos.client", what, json.dumps(asdict(self))]


def write(**words: Any) -> None:
    print(json.dumps({"at": time.monotonic(), **words}), flush=True)


class Told(logging.Handler):
    """Log lines, as the rest is written."""

    def emit(self, record: logging.LogRecord) -> None:
        write(log=record.levelname, text=self.format(record)[:2000])


class Client:
    def __init__(self, settings: Settings, redlock: Redlock) -> None:
        self._settings = settings
        self._redlock = redlock
        self._stopped = False

    async def run(self) -> None:
        """Until SIGTERM. The tasks end after the body that they are in."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stop)
        async with asyncio.timeout(_READY):
            while not all(each.ok for each in (await self._redlock.health()).nodes):
                await asyncio.sleep(
                    0.1
                )  # it must have met each server: a new client takes servers that are empty for new ones
        write(ready=True)
        async with asyncio.TaskGroup() as group:
            for task in range(self._settings.tasks):
                group.create_task(self._work(task))

    def _stop(self) -> None:
        self._stopped = True

    async def _work(self, task: int) -> None:
        chance = random.Random(f"{self._settings.seed} {self._settings.host} {task}")
        while not self._stopped:
            name = chance.choice(list(KINDS)) if task else own_name(self._settings.host)
            shared = kind_of(name) == "read-write" and chance.random() < 0.7
            timeout = chance.choice([None, None, 0.3])
            try:
                async with self._lock(name, shared=shared, timeout=timeout) as lease:
                    await self._body(lease, task, name, shared=shared, lasts=chance.uniform(0.0, _BODY))
                await asyncio.sleep(chance.uniform(0.0, _PAUSE))
            except EXPECTED as error:
                write(failed=word_for(error), text=str(error)[:500])
                await asyncio.sleep(chance.uniform(0.0, 0.1))
            except Exception:
                write(unexpected=traceback.format_exc())
                raise

    def _lock(self, name: str, *, shared: bool, timeout: float | None) -> Lock:
        kind = kind_of(name)
        if kind == "read-write":
            make = self._redlock.read if shared else self._redlock.write
            return make(name, timeout=timeout)
        return self._redlock(name, fair=kind == "fair", timeout=timeout)

    async def _body(self, lease: Lease, task: int, name: str, *, shared: bool, lasts: float) -> None:
        """`until` is the end of validity, without renewals: by it the verdict knows whether the body outlived it."""
        began = time.monotonic()
        entry = {"name": name, "shared": shared, "task": task, "fence": lease.fence, "began": began}
        entry["until"] = began + lease.remaining
        try:
            with self._alone(name, shared=shared) as alone:
                if not alone:
                    write(conflict=name, **entry)
                await asyncio.sleep(lasts)
        finally:
            write(**entry, ended=time.monotonic())

    @contextmanager
    def _alone(self, name: str, *, shared: bool) -> Iterator[bool]:
        """Whether nobody else is in a body of that name whom this one excludes."""
        file = os.open(Path(self._settings.folder) / name, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError:
            alone = False
        try:
            yield alone
        finally:
            os.close(file)


def own_name(host: int) -> str:
    return f"own{host}"


def kind_of(name: str) -> str:
    """The kind of lock of a name."""
    return KINDS.get(name, "mutex")


def word_for(error: LockError) -> str:
    """One word for errors that are counted together."""
    if isinstance(error, LockLost):
        return f"LockLost ({error.reason})"
    return type(error).__name__


async def look(settings: Settings) -> None:
    """Write which names still have a holder or a waiter, as a new client sees them."""
    names = sorted(os.listdir(settings.folder))  # each that was used has a file
    try:
        async with settings.client() as redlock:
            left = [name for name in names if (found := await redlock.inspect(name)).holders or found.waiters]
    except LockError as error:
        left = [f"a new client cannot look: {error}"]
    write(left=left)


async def use(settings: Settings) -> None:
    for logger in ("asynclock", "asyncio"):  # asyncio logs exceptions that nobody retrieved
        log = logging.getLogger(logger)
        log.addHandler(Told())
        log.setLevel(logging.INFO)
    try:
        async with settings.client() as redlock:
            redlock.subscribe(settings.write_quarantine)
            await Client(settings, redlock).run()
    except QuorumUnavailable as error:
        write(unexpected=str(error))
    write(closed=True)


if __name__ == "__main__":
    asyncio.run({"use": use, "look": look}[sys.argv[1]](Settings(**json.loads(sys.argv[2]))))
