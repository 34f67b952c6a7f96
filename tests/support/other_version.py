"""A client of any version of asynclock in a process of its own, and its driver. This file is the program, too.

The test writes a command as a line of JSON, and the program answers each with a line once it is carried out. The
program uses only public names that all versions have, so it runs the version that is first on PYTHONPATH."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any

import asynclock
from asynclock import Lease, Lock, Redlock

LIMIT = 20.0
"""Seconds at most for one answer. The leases of these tests are so long that nothing ends or is renewed within it."""

Words = dict[str, Any]


def lock_of(client: Redlock, kind: str, name: str) -> Lock:
    """The lock of that name: each kind that both versions have."""
    match kind:
        case "fair":
            return client(name, fair=True)
        case "reentrant":
            return client(name, reentrant=True, owner="us")
        case "read":
            return client.read(name)
        case "write":
            return client.write(name)
        case "semaphore":
            return client.semaphore(name, 1)
        case "multi":
            return client.multi(name, client.read(f"{name}:read"), client.semaphore(f"{name}:permit", 1))
        case _:
            return client(name)


# -- the program -----------------------------------------------------------------------------------------------------


class Program:
    """One client, and the leases that it has, by the name that the test gave them."""

    def __init__(self) -> None:
        self._client = Redlock("memory:")
        self._leases: dict[str, Lease] = {}

    async def serve(self) -> None:
        reader = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        say(0, module=asynclock.__file__)
        tasks = set()
        while line := await reader.readline():
            tasks.add(asyncio.create_task(self._obey(**json.loads(line))))
        pipe.close()  # the test has ended, and asyncio.run cancels what still waits

    async def _obey(self, number: int, do: str, **words: Any) -> None:
        try:
            say(number, **await getattr(self, f"do_{do}")(**words))
        except Exception as error:  # the test shows it, whatever it is
            say(number, error=repr(error))

    async def do_open(self, urls: list[str], options: Words) -> Words:
        await self._client.aclose()
        self._client = Redlock(*urls, **options)
        await self._client.__aenter__()
        return {}

    async def do_take(self, as_: str, kind: str, name: str, timeout: float | None) -> Words:
        lease = await lock_of(self._client, kind, name).acquire(timeout=timeout)
        return self._got(as_, lease)

    async def do_give(self, as_: str) -> Words:
        await self._leases.pop(as_).release()
        return {}

    async def do_extend(self, as_: str) -> Words:
        await self._leases[as_].extend()
        return {}

    async def do_detach(self, as_: str) -> Words:
        return {"handle": await self._leases.pop(as_).detach()}

    async def do_adopt(self, as_: str, handle: str) -> Words:
        return self._got(as_, await self._client.adopt(handle))

    async def do_lost(self, as_: str) -> Words:
        return {"lost": await self._leases.pop(as_).wait_lost()}

    async def do_break(self, name: str) -> Words:
        return {"broken": await self._client.break_lock(name)}

    async def do_once(self, name: str) -> Words:
        """Whether a run of `once` under that name ran, in this process and now."""

        @self._client.once(name, within=LIMIT)
        async def run() -> bool:
            return True

        return {"ran": await run() is True}

    def _got(self, as_: str, lease: Lease | None) -> Words:
        if lease is None:
            return {"fence": None}
        self._leases[as_] = lease
        return {"fence": lease.fence}


def say(number: int, **words: Any) -> None:
    print(json.dumps({"number": number, **words}), flush=True)


# -- its driver ------------------------------------------------------------------------------------------------------


class Peer:
    """The driver of such a process; it outlives the event loops of the tests that use it."""

    def __init__(self, folder: Path) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-P", __file__],  # -P: the tests' folder is no place to import from
            env=os.environ | {"PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._numbers = itertools.count(1)
        first: Future[Words] = Future()
        self._asked: dict[int, Future[Words]] = {0: first}
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        self.module = Path(first.result(3 * LIMIT)["module"])

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            words = json.loads(line)
            with contextlib.suppress(InvalidStateError):  # a test that failed waits for it no more
                self._asked.pop(words.pop("number")).set_result(words)
        for asked in list(self._asked.values()):
            with contextlib.suppress(InvalidStateError):
                asked.set_exception(EOFError("the other version's process has ended: its traceback is above"))

    async def ask(self, do: str, **words: Any) -> Words:
        """Send it a command; returns the result. Raises AssertionError for an error there, TimeoutError for silence."""
        number, asked = next(self._numbers), Future[Words]()
        self._asked[number] = asked
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps({"number": number, "do": do, **words}) + "\n")
        self._popen.stdin.flush()
        answer = await asyncio.wait_for(asyncio.wrap_future(asked), LIMIT)
        assert "error" not in answer, f"the other version: {answer['error']}"
        return answer

    async def take(self, as_: str, kind: str, name: str, timeout: float | None = None) -> int | None:
        """The fence of the lease that it then has under `as_`; None if it did not get it in that time."""
        fence: int | None = (await self.ask("take", as_=as_, kind=kind, name=name, timeout=timeout))["fence"]
        return fence

    def stop(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self._reading.join()
        for pipe in self._popen.stdin, self._popen.stdout:
            assert pipe is not None
            pipe.close()


if __name__ == "__main__":
    asyncio.run(Program().serve())
