"""The ledger that the lock protects. It checks fencing tokens, and serves the workers over a unix socket.

A lock alone cannot stop a holder that was frozen beyond its lease and does not know it yet. The system that it writes
to can: the ledger remembers the greatest token that it has seen, and refuses every lower one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Ledger:
    """One total. Each tenure reads it, and writes it back once."""

    def __init__(self) -> None:
        self.total = 0
        self.highest = 0
        self._written = 0

    def read(self, fence: int) -> int:
        """The total. A read also counts for the token: an older hold must not overwrite what follows from this read."""
        self.highest = max(self.highest, fence)
        return self.total

    def write(self, fence: int, total: int) -> bool:
        """Write the total; whether it was accepted. A token below one seen before is refused, and so is a second write
        with the same token."""
        if fence < self.highest or fence <= self._written:
            return False
        self.highest = self._written = fence
        self.total = total
        return True


class Peer(Protocol):
    """Receives the lines of one worker's connection."""

    def receive(self, said: dict[str, Any]) -> None:
        """The worker sent this line."""

    def gone(self) -> None:
        """The connection ended, and all lines of the worker were received."""


class LedgerServer:
    """The ledger on a unix socket: one JSON line per report or question, and one line in reply to each question."""

    def __init__(self, path: Path, ledger: Ledger, meet: Callable[[dict[str, Any]], Peer]) -> None:
        self.go = asyncio.Event()  # set when all workers may begin
        self._path = path
        self._ledger = ledger
        self._meet = meet
        self._talks: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._talk, str(self._path))
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._server is not None:
            self._server.close()
        talks = list(self._talks)
        for talk in talks:
            talk.cancel()
        await asyncio.gather(*talks, return_exceptions=True)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._talks.add(task)
        peer: Peer | None = None
        try:
            hello = await reader.readline()
            if hello:
                peer = self._meet(json.loads(hello))
                await self.go.wait()
                writer.write(b'{"re": 0}\n')
                await self._listen(reader, writer, peer)
        except (ConnectionError, ValueError, asyncio.CancelledError):
            pass  # a worker was killed in the middle of a line, or the demo ends
        finally:
            if peer is not None:
                peer.gone()
            writer.close()
            if task is not None:
                self._talks.discard(task)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: Peer) -> None:
        while line := await reader.readline():
            said = json.loads(line)
            if "ask" in said:
                answer = self._answer(said)
                writer.write(json.dumps(answer | {"re": said["re"]}).encode() + b"\n")
                said |= answer
            peer.receive(said)

    def _answer(self, said: dict[str, Any]) -> dict[str, Any]:
        if said["ask"] == "read":
            return {"total": self._ledger.read(said["fence"])}
        return {"accepted": self._ledger.write(said["fence"], said["total"]), "highest": self._ledger.highest}


class LedgerClient:
    """A worker's side of the connection. It reports each reply to a write, even if the caller was cancelled."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._asked: dict[int, tuple[dict[str, Any], asyncio.Future[dict[str, Any]]]] = {}
        self._number = 0
        self._task = asyncio.create_task(self._listen())

    def say(self, what: str, **more: Any) -> None:
        """Report something; there is no reply."""
        self._send({"say": what, **more})

    async def hello(self, worker: int, pid: int) -> None:
        """Report which worker this is. Return when the other workers are there, too."""
        future = self._expect(0, {})
        self._send({"say": "hello", "worker": worker, "pid": pid})
        await future

    async def read(self, fence: int) -> int:
        """The total."""
        return int((await self._ask({"ask": "read", "fence": fence}))["total"])

    async def write(self, fence: int, total: int) -> bool:
        """Whether the ledger accepted it."""
        return bool((await self._ask({"ask": "write", "fence": fence, "total": total}))["accepted"])

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        future = self._expect(self._number, question)
        self._send({**question, "re": self._number})
        return await future

    def _expect(self, number: int, question: dict[str, Any]) -> asyncio.Future[dict[str, Any]]:
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked[number] = question, future
        return future

    def _send(self, line: dict[str, Any]) -> None:
        self._writer.write(json.dumps(line).encode() + b"\n")

    async def _listen(self) -> None:
        try:
            while line := await self._reader.readline():
                answer = json.loads(line)
                question, future = self._asked.pop(answer["re"])
                if question.get("ask") == "write":
                    self.say("confirmed", fence=question["fence"], accepted=answer["accepted"])
                if not future.done():
                    future.set_result(answer)
        finally:
            for _, future in self._asked.values():
                if not future.done():
                    future.set_exception(ConnectionError("the demo has ended"))
