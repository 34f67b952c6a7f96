"""The failures that the demo injects into its own servers and workers, and their times."""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import TYPE_CHECKING

from asynclock._clock import now
from asynclock.cli.demo.records import Blow
from asynclock.cli.demo.stage import LEASE, State

if TYPE_CHECKING:
    from asynclock.cli.demo.records import Hold
    from asynclock.cli.demo.stage import Server, Stage, Worker


class Step(Enum):
    """One step of the demo's plan."""

    KILL_SERVER = "kill a server"
    RESTART_SERVER = "restart it"
    FREEZE_SERVER = "freeze a server"
    THAW_SERVER = "thaw it"
    KILL_HOLDER = "kill a holder"
    FREEZE_HOLDER = "freeze a holder, and wake it"


_TOGETHER = (
    (0.07, Step.KILL_SERVER),
    (0.15, Step.FREEZE_SERVER),
    (0.25, Step.KILL_HOLDER),
    (0.45, Step.RESTART_SERVER),
    (0.50, Step.FREEZE_HOLDER),
    (0.80, Step.THAW_SERVER),
)
_IN_TURN = (
    (0.07, Step.FREEZE_SERVER),
    (0.20, Step.THAW_SERVER),
    (0.28, Step.KILL_SERVER),
    (0.35, Step.KILL_HOLDER),
    (0.55, Step.FREEZE_HOLDER),
    (0.80, Step.RESTART_SERVER),
)


def plan(nodes: int) -> tuple[tuple[float, Step], ...]:
    """The steps, each with its time as a share of the whole. A majority stays up all the time: where only one server
    may fail, the frozen server goes on before another one is killed. Pure."""
    return _TOGETHER if (nodes - 1) // 2 >= 2 else _IN_TURN


class Chaos:
    """Carries out the plan. It kills and freezes holders while they hold, and records only what the operating system
    confirms."""

    def __init__(self, stage: Stage, seconds: float) -> None:
        self._stage = stage
        self._seconds = seconds
        self._doomed = stage.servers[1]
        self._sleepy = stage.servers[-1]

    async def wreak(self) -> None:
        """Carry out the whole plan. Return when a later hold has written after the last step."""
        for share, step in plan(len(self._stage.servers)):
            await self._at(share)
            await self._do(step)
        last = self._stage.run.struck[-1].at if self._stage.run.struck else now()
        await self._stage.until(lambda: self._stage.run.later(last) > 0)
        await self._at(1.0)

    async def _at(self, share: float) -> None:
        await asyncio.sleep(self._stage.run.start + share * self._seconds - now())

    async def _do(self, step: Step) -> None:
        match step:
            case Step.KILL_SERVER:
                await self._kill_server(self._doomed)
            case Step.RESTART_SERVER:
                await self._restart_server(self._doomed)
            case Step.FREEZE_SERVER:
                await self._freeze_server(self._sleepy)
            case Step.THAW_SERVER:
                self._thaw_server(self._sleepy)
            case Step.KILL_HOLDER:
                await self._kill_holder()
            case Step.FREEZE_HOLDER:
                await self._freeze_holder()

    # -- servers -------------------------------------------------------------------------------------------------

    async def _kill_server(self, server: Server) -> None:
        self._stage.note(f"{server.name} is killed (SIGKILL)", 1)
        at = now()
        if await server.kill():
            self._stage.strike(Blow.SERVER_KILLED, server, at)

    async def _restart_server(self, server: Server) -> None:
        server.start()
        await server.ready()
        server.become(State.SILENT)
        self._stage.note(f"{server.name} is up again, empty: its vote does not count yet", 1)
        self._stage.strike(Blow.SERVER_RESTARTED, server, now())

    async def _freeze_server(self, server: Server) -> None:
        self._stage.note(f"{server.name} is frozen (SIGSTOP)", 1)
        at = now()
        if await server.freeze():
            self._stage.strike(Blow.SERVER_FROZEN, server, at)

    def _thaw_server(self, server: Server) -> None:
        self._stage.note(f"{server.name} goes on (SIGCONT)", 1)
        server.wake()
        server.become(State.UP)
        self._stage.strike(Blow.SERVER_THAWED, server, now())

    # -- holders -------------------------------------------------------------------------------------------------

    async def _holder(self) -> tuple[Worker, Hold]:
        """A worker in the middle of a tenure, and its hold."""
        stage = self._stage
        while True:
            known = len(stage.run.holds)
            await stage.until(lambda known=known: len(stage.run.holds) > known)  # type: ignore[misc]
            await asyncio.sleep(0.15 * LEASE)
            hold = stage.run.holds[-1]
            if hold.open and now() < hold.until:
                return stage.workers[hold.worker - 1], hold

    async def _kill_holder(self) -> None:
        """Kill a holder. The name stays taken until its lease ends; then the next worker holds."""
        stage = self._stage
        while True:
            worker, hold = await self._holder()
            at = now()
            stage.note(f"{worker.name} is killed (SIGKILL) while it holds", 1)
            killed = await worker.kill()
            # Its last reports may still be on their way.
            await stage.until(lambda worker=worker: not worker.connected)  # type: ignore[misc]
            if killed and hold.open:
                stage.strike(Blow.HOLDER_KILLED, worker, at, hold)
            await asyncio.sleep(0.8 * LEASE)
            stage.start(worker)
            stage.note(f"{worker.name} is started again")
            if killed and hold.open:
                return

    async def _freeze_holder(self) -> None:
        """Freeze a holder beyond its lease, until another worker has written. Then it wakes, and believes that it
        still holds."""
        stage = self._stage
        while True:
            worker, hold = await self._holder()
            at = now()
            stopped = await worker.freeze()
            await asyncio.sleep(0.05)  # its reports from before the signal are in the socket already
            if stopped and hold.open:
                break
            worker.wake()
            worker.become(State.WAITING)
        stage.note(f"{worker.name} is frozen (SIGSTOP) while it holds", 1, at)
        stage.strike(Blow.HOLDER_FROZEN, worker, at, hold)
        await stage.until(lambda: now() > hold.until + 0.3 * LEASE and self._others_wrote(hold))
        stage.note(f"{worker.name} wakes (SIGCONT), {now() - hold.until:.2f} s past its lease", 1)
        stage.strike(Blow.HOLDER_WOKEN, worker, now(), hold)
        worker.become(State.HOLDS)  # the worker believes that it holds
        worker.wake()
        await stage.until(lambda: bool(hold.lost) and any(write.fence == hold.fence for write in stage.run.writes))

    def _others_wrote(self, hold: Hold) -> bool:
        return any(write.fence > hold.fence for write in self._stage.run.accepted())
