"""What the library takes from the machine, replaced for a run: its clocks, random numbers and ids, the poll of a socket
before a deadline, and the making of sockets. The code of asynclock itself stays as it is."""

from __future__ import annotations

import logging
import random
import warnings
from asyncio import events
from contextlib import ExitStack, contextmanager
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self
from unittest import mock

from asynclock import _clock
from asynclock.runtime import session, shutdown
from asynclock.stores import dialing
from asynclock.stores.redis import connection
from simulation.loop import WALL
from simulation.stack.loop import StackLoop
from simulation.stack.network import Socket

if TYPE_CHECKING:
    from collections.abc import Iterator

    from simulation.stack.world import World


class _Log(logging.Handler):
    """What the library logs is in the trace. It logs an error only for what should not happen."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.DEBUG)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        loop = events._get_running_loop()
        name = loop.name if isinstance(loop, StackLoop) else "?"
        self._world.trace(name, f"logs {record.levelname}: {record.getMessage()}")
        if record.levelno >= logging.ERROR:
            self._world.logged_error(name, record)


@contextmanager
def in_virtual_time(world: World) -> Iterator[None]:
    """See the module."""
    draws = Random(f"{world.plan.seed} ids")  # noqa: S311 - the run is to be repeated

    def now() -> float:
        loop = world.seen_from or events._get_running_loop()
        return loop.time() if isinstance(loop, StackLoop) else world.schedule.now

    def wall() -> float:
        loop = events._get_running_loop()
        return loop.wall() if isinstance(loop, StackLoop) else WALL + world.schedule.now

    class Selector:
        """Polls one simulated socket."""

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *error: object) -> None: ...

        def register(self, number: int, what: int) -> None:
            del what
            self._number = number

        def select(self, timeout: float) -> list[int]:
            del timeout
            sock = world.network.sockets.get(self._number)
            return [1] if sock is not None and sock.is_readable else []

    def sock(address: Any) -> Socket:
        del address
        return Socket(world.network)

    numbers = random.getstate()
    log, handler = logging.getLogger("asynclock"), _Log(world)
    before = log.level, log.propagate
    with ExitStack() as stack:
        patches: list[tuple[Any, str, Any]] = [
            (_clock, "now", now),
            (_clock.SystemClock, "now", staticmethod(now)),
            (_clock.SystemClock, "wall", staticmethod(wall)),
            (session.Session, "spent", staticmethod(lambda: 0.0)),
            (session, "secrets", SimpleNamespace(token_hex=lambda length: draws.randbytes(length).hex())),
            (session, "os", SimpleNamespace(getpid=lambda: 4711)),
            (session, "_HOST", "host"),
            (shutdown, "time", SimpleNamespace(monotonic=now)),
            (connection, "_Selector", Selector),
            (dialing, "_socket", sock),
        ]
        for owner, name, instead in patches:
            stack.enter_context(mock.patch.object(owner, name, instead))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        random.seed(f"{world.plan.seed} library")
        log.addHandler(handler)
        log.propagate = False
        try:
            yield
        finally:
            random.setstate(numbers)
            log.removeHandler(handler)
            log.level, log.propagate = before
