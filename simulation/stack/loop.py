"""An event loop of asyncio for one process, in virtual time and without I/O. The loops of all processes share the true
time; each has a clock of its own, which differs from it.

Everything that decides the order of things is drawn from the seed: tasks and futures have hashes of their own, because
asyncio keeps some of them in sets, whose order depends on addresses otherwise."""

from __future__ import annotations

import asyncio
import math
from asyncio import events
from contextvars import Context
from heapq import heappop
from itertools import count
from typing import TYPE_CHECKING, Any

from simulation.loop import WALL

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from simulation.loop import Schedule
    from simulation.stack.network import Network, Socket

TURN = 2e-5
"""Seconds that a turn of a loop takes. So time passes for a task that waits turn by turn, too."""


class _Task(asyncio.Task[Any]):
    """A task whose hash does not depend on its address."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], *, loop: StackLoop, **more: Any) -> None:
        self.number = next(loop.numbers)
        super().__init__(coroutine, loop=loop, **more)

    def __hash__(self) -> int:
        return self.number


class _Future(asyncio.Future[Any]):
    """A future whose hash does not depend on its address."""

    def __init__(self, *, loop: StackLoop) -> None:
        self.number = next(loop.numbers)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


class _NoFiles:
    """What the loop asks for files that are ready: the network posts its events itself."""

    @staticmethod
    def select(timeout: float | None = None) -> list[Any]:
        del timeout
        return []


class StackLoop(asyncio.BaseEventLoop):
    """The loop of one process. The world calls `turn` at the time that `next_at` says."""

    _run_once: Callable[[], None]
    _ready: Any
    _scheduled: list[Any]
    _timer_cancelled_count: int

    def __init__(
        self, schedule: Schedule, network: Network, name: str, *, rate: float, offset: float, wall_offset: float
    ) -> None:
        super().__init__()
        self.schedule = schedule
        self.network = network
        self.name = name
        self.numbers = count(1)
        self.runs_since = 0.0  # the true time since which it was not stopped; math.inf: it is
        self.dead = False  # its process was killed
        self.errors: list[str] = []  # what reached the exception handler
        self._rate, self._offset, self._wall_offset = rate, offset, wall_offset
        self._busy_until = 0.0
        self._stops = 0
        self._selector = _NoFiles()
        self._clock_resolution = 1e-9
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._fault)

    # -- clocks ----------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._offset + self._rate * self.schedule.now

    def wall(self) -> float:
        return WALL + self.schedule.now + self._wall_offset

    def step_wall(self, seconds: float) -> None:
        self._wall_offset += seconds

    def true_time(self, when: float) -> float:
        """The true time at which the clock of this process shows `when`."""
        return (when - self._offset) / self._rate

    # -- turns -----------------------------------------------------------------------------------------------------

    def next_at(self) -> float:
        """The true time of its next turn; math.inf: nothing is to do."""
        if self.dead or self._stops or self.is_closed():
            return math.inf
        if self._ready:
            return max(self.schedule.now, self._busy_until)
        while self._scheduled and self._scheduled[0]._cancelled:
            self._timer_cancelled_count = max(0, self._timer_cancelled_count - 1)
            heappop(self._scheduled)._scheduled = False
        if not self._scheduled:
            return math.inf
        return max(self.true_time(self._scheduled[0].when()) + 2e-9, self._busy_until, self.schedule.now)

    def turn(self) -> None:
        """What asyncio does in one turn."""
        events._set_running_loop(self)
        try:
            self._run_once()
        finally:
            events._set_running_loop(None)
        self._busy_until = self.schedule.now + TURN

    def stop_for(self, seconds: float) -> None:
        """The process is stopped, or a call blocks the loop."""
        self._stops += 1
        self.runs_since = math.inf
        self.schedule.at(self.schedule.now + seconds, self._go_on)

    def _go_on(self) -> None:
        self._stops -= 1
        if not self._stops:
            self.runs_since = self.schedule.now

    @property
    def is_stopped(self) -> bool:
        return self._stops > 0

    @property
    def timers(self) -> list[Any]:
        """The timers that are neither cancelled nor over."""
        return [each for each in self._scheduled if not each.cancelled()]

    def post(self, call: Callable[..., object], *args: object) -> None:
        """An event from outside the process."""
        if not self.dead and not self.is_closed():
            self.call_soon(call, *args, context=Context())

    # -- what asyncio asks of a loop ---------------------------------------------------------------------------------

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        **more: Any,
    ) -> asyncio.Future[Any]:
        del loop
        work: Any = coroutine
        return _Task(work, loop=self, **more)

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def call_soon_threadsafe(  # type: ignore[override]  # the types of a variable number of arguments
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def _process_events(self, event_list: list[Any]) -> None:
        del event_list

    def _write_to_self(self) -> None: ...

    def _fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        del loop
        error = context.get("exception")
        self.errors.append(f"{context.get('message')}: {error!r}")

    async def sock_connect(self, sock: Any, address: Any) -> None:
        await self.network.connect(self, sock, address[0], address[1])

    async def create_connection(  # type: ignore[override]  # only with a socket that `sock_connect` has connected
        self, protocol_factory: Callable[[], asyncio.Protocol], host: None = None, port: None = None, *, sock: Socket
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        del host, port
        protocol = protocol_factory()
        transport = sock.become_transport(protocol)
        self.call_soon(protocol.connection_made, transport)
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            transport.close()
            raise
        return transport, protocol
