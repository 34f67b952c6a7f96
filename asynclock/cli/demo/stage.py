"""The processes of the demo, servers and workers, and the records of what they do."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from typing import IO, TYPE_CHECKING, Any, Self

from asynclock._clock import now
from asynclock._errors import ConfigError
from asynclock.cli.demo.ledger import Ledger
from asynclock.cli.demo.records import Blow, Hold, Run, Stale, Struck, Write
from asynclock.stores.embedded import server as valkey

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LEASE = 1.0
MAX_LEASE = 2.0
"""Short, so that a restarted server votes again within the demo: it casts no vote for this time and one second more."""
SILENT = MAX_LEASE + 1.0
_CONFIRM = 2.0  # the operating system must confirm a signal within this many seconds


class State(Enum):
    """The state of a server or worker, as the picture shows it."""

    STARTING = "starting"
    UP = "up"
    SILENT = "up, no vote yet"
    WAITING = "waiting"
    HOLDS = "holds"
    LOST = "lost"
    FROZEN = "frozen"
    KILLED = "killed"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Note:
    """One event, in a line."""

    at: float
    text: str
    weight: int = 0
    """0: routine; 1: an injected failure; 2: its effect."""


class Actor:
    """A process of the demo and the history of its states."""

    title = "actor"

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: subprocess.Popen[bytes] | None = None
        self.history: list[tuple[float, State]] = []
        self.become(State.STARTING)

    @property
    def name(self) -> str:
        return f"{self.title} {self.number}"

    @property
    def state(self) -> State:
        return self.history[-1][1]

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    def become(self, state: State) -> None:
        if not self.history or self.history[-1][1] is not state:
            self.history.append((now(), state))

    async def kill(self) -> bool:
        """Send SIGKILL; whether the operating system confirms that it died of that."""
        self.become(State.KILLED)
        self._signal(signal.SIGKILL)
        return await _within(_CONFIRM, lambda: self._poll() == -signal.SIGKILL)

    async def freeze(self) -> bool:
        """Send SIGSTOP; whether the operating system confirms that it is stopped."""
        self.become(State.FROZEN)
        self._signal(signal.SIGSTOP)
        return await _within(_CONFIRM, self._stopped)

    def wake(self) -> None:
        """Send SIGCONT."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """Send SIGTERM: a worker finishes its tenure and ends."""
        self._signal(signal.SIGTERM)

    def died(self) -> str:
        """How it ended, if it ended without being killed; else ""."""
        code = self._poll()
        if code is None or self.state in {State.KILLED, State.ENDED}:
            return ""
        self.become(State.ENDED)
        return f"{self.name} ended by itself with exit code {code}" if code else ""

    def gone(self) -> bool:
        return self._poll() is not None

    def _signal(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)

    def _poll(self) -> int | None:
        return self.process.poll() if self.process is not None else None

    def _stopped(self) -> bool:
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:  # it has died by itself, and `process` has its exit code
            return False
        if pid and self.process is not None and not os.WIFSTOPPED(status):
            self.process.returncode = os.waitstatus_to_exitcode(status)  # reaped: Popen must not wait for it again
        return bool(pid) and os.WIFSTOPPED(status)


class Server(Actor):
    """A real server from the embedded wheel, on a unix socket of its own."""

    title = "server"

    def __init__(self, number: int, path: Path) -> None:
        super().__init__(number)
        self.path = path

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def start(self) -> None:
        self.process = valkey.start(self.path)

    async def ready(self) -> None:
        """Return once it answers. Raises ConfigError."""
        if not await _within(5.0, lambda: self.gone() or valkey.answers(self.path)) or self.gone():
            raise ConfigError(f"{self.name}, from the embedded wheel, did not start")
        self.become(State.UP)


class Worker(Actor):
    """A worker process, and what it reports over its connection to the ledger."""

    title = "worker"

    def __init__(self, number: int, stage: Stage) -> None:
        super().__init__(number)
        self.connected = False
        self.hold: Hold | None = None
        self._stage = stage

    def start(self, command: list[str], log: IO[bytes]) -> None:
        self.become(State.STARTING)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "asynclock.cli.demo.worker", str(self.number), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # a Ctrl-C must reach the demo only, which then ends its workers
            preexec_fn=valkey.die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509 - no threads here
        )

    def receive(self, said: dict[str, Any]) -> None:
        """Record what it reported, and the reply of the ledger."""
        match said.get("say") or said["ask"]:
            case "waiting" | "hello":
                self.become(State.WAITING)
            case "holds":
                self._entered(said)
            case "renewed" if self.hold is not None:
                self.hold.until = max(self.hold.until, said["until"])
            case "left" if self.hold is not None:
                self.hold.until = max(self.hold.until, said["until"])
                self.hold.left = said["at"]
                self.become(State.WAITING)
            case "lost" if self.hold is not None:
                self.hold.lost = said["reason"]
                self.become(State.LOST)
                self._stage.note(f"{self.name} got LockLost: {said['reason']}", 2)
            case "stale":
                self._wrote_stale(said)
            case "write":
                self._wrote(said)
            case "confirmed" if said["accepted"]:
                self._stage.run.confirmed.append(said["fence"])
            case "failed":
                self._stage.note(f"{self.name}: {said['error']}", 2)
        self._stage.stir()

    def gone_quiet(self) -> None:
        self.connected = False
        self._stage.stir()

    def _entered(self, said: dict[str, Any]) -> None:
        self.hold = Hold(self.number, self.pid, said["fence"], said["at"], said["until"])
        self._stage.run.holds.append(self.hold)
        self.become(State.HOLDS)
        self._stage.note(f"{self.name} holds, fence {said['fence']}, valid for {said['until'] - said['at']:.2f} s")

    def _wrote(self, said: dict[str, Any]) -> None:
        write = Write(now(), self.number, self.pid, said["fence"], said["accepted"])
        self._stage.run.writes.append(write)
        if write.accepted:
            self._stage.note(f"{self.name} wrote {said['total']}: accepted")
        else:
            self._stage.note(
                f"{self.name} wrote {said['total']}: REFUSED, fence {write.fence} is behind {said['highest']}", 2
            )

    def _wrote_stale(self, said: dict[str, Any]) -> None:
        stale = Stale(self.pid, said["fence"], said["before"], said["refused"], said["kept"])
        self._stage.run.stale.append(stale)
        self._stage.note(f"{self.name} set a plain key: accepted, the write of fence {stale.before} is lost", 2)
        answer = "REFUSED (StaleToken)" if stale.refused else "accepted"
        self._stage.note(f"{self.name} set a fenced key: {answer}", 2)


class _Line:
    """The connection of one process. A worker that was started again has a new one."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        worker.connected = True

    def receive(self, said: dict[str, Any]) -> None:
        self._worker.receive(said)

    def gone(self) -> None:
        self._worker.gone_quiet()


class Stage:
    """All actors, and the records of the run. Leaving it kills every process that still runs."""

    def __init__(self, folder: Path, nodes: int, workers: int) -> None:
        self.folder = folder
        self.log = folder / "workers.log"
        self.socket = folder / "ledger"
        self.ledger = Ledger()
        self.run = Run(now())
        self.notes: list[Note] = []
        self.servers = [Server(number + 1, folder / f"s{number + 1}") for number in range(nodes)]
        self.workers = [Worker(number + 1, self) for number in range(workers)]
        self._waits: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        actors: list[Actor] = [*self.servers, *self.workers]
        valkey.stop([actor.process for actor in actors if actor.process is not None])

    def meet(self, hello: dict[str, Any]) -> _Line:
        """A worker has connected."""
        worker = self.workers[hello["worker"] - 1]
        line = _Line(worker)
        worker.receive(hello)
        return line

    def start(self, worker: Worker) -> None:
        """Start a new process for a worker."""
        urls = [server.url for server in self.servers]
        with self.log.open("ab") as log:
            worker.start([str(self.socket), str(LEASE), str(MAX_LEASE), *urls], log)

    def note(self, text: str, weight: int = 0, at: float | None = None) -> None:
        self.notes.append(Note(now() if at is None else at, text, weight))

    def strike(self, blow: Blow, actor: Actor, at: float, hold: Hold | None = None) -> None:
        """Record an injected failure that the operating system has confirmed."""
        pid, fence = (hold.pid, hold.fence) if hold else (actor.pid, 0)
        self.run.struck.append(Struck(blow, at, actor.number, pid, fence))

    def look(self) -> None:
        """Notice the changes that nobody reports: processes that die, restarted servers that vote again, time."""
        actors: list[Actor] = [*self.servers, *self.workers]
        for actor in actors:
            if accident := actor.died():
                self.run.accidents.append(accident)
                self.note(accident, 2)
        for server in self.servers:
            if server.state is State.SILENT and now() - server.history[-1][0] > SILENT:
                server.become(State.UP)
                self.note(f"{server.name} has been up for {SILENT:g} s and votes again", 1)
        self.stir()

    def stir(self) -> None:
        """Something changed: check the conditions that `until` waits for."""
        for condition, waiter in self._waits:
            if not waiter.done() and condition():
                waiter.set_result(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once the condition is true. It is checked after each report, and a few times a second."""
        if condition():
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (condition, waiter)
        self._waits.append(entry)
        try:
            await waiter
        finally:
            self._waits.remove(entry)


async def _within(limit: float, condition: Callable[[], bool]) -> bool:
    deadline = now() + limit
    while not condition():
        if now() > deadline:
            return False
        await asyncio.sleep(0.002)
    return True
