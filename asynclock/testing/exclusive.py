"""assert_exclusive: whether a function really excludes itself.

Several calls run at once. Each runs in a task whose coroutine, and those of its child tasks, are sent on by `_Stepped`.
So each await at which a call is suspended is seen: where it is in the source, and which locks the call holds there. The
awaits inside asynclock, which waits for the lock or gives it back, do not count, and neither do joins of tasks of the
call, whose own awaits are seen.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
from collections.abc import Coroutine
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

from asynclock._errors import ConfigError, LockTimeout, brief
from asynclock.events import Acquired, LockEvent, TimedOut
from asynclock.locks.decorators import Skipped
from asynclock.rules.model import parts_of
from asynclock.runtime.observers import observe_all
from asynclock.runtime.session import session_of
from asynclock.runtime.sessions import all_clocks, all_tenures
from asynclock.testing.clock import FakeClock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
    from types import FrameType, TracebackType

    from asynclock.events import Event
    from asynclock.protocol.hold import Tenure

_JOINS = {
    ("asyncio.taskgroups", "__aexit__"),
    ("asyncio.tasks", "_wait_for_one"),  # of as_completed
    ("anyio._backends._asyncio", "__aexit__"),  # of its task group
    ("anyio._backends._asyncio", "start"),
    ("anyio._core._tasks", "wait"),  # of a handle of a task, as the next one
    ("anyio._core._tasks", "__await__"),
}
"""The functions that wait for child tasks, beside those of `_is_join`: their modules and names."""


_LOOK = 0.2
"""Seconds of real time between two looks whether the calls can go on."""

_LOOKS = 10
"""So many looks in a row show that they cannot: another thread may be about to end their wait, or the event loop was
blocked between two of them."""


class _Key(NamedTuple):
    """A lock: what excludes another holder of an equal key."""

    nodes: tuple[str, ...]
    prefix: str
    name: str


class _Await(NamedTuple):
    """A call is suspended."""

    place: str
    held: frozenset[_Key]


class _Call:
    """One of the calls, and what was seen of it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.taken: set[_Key] = set()
        self.shared: set[str] = set()  # what it held beside others, such as a read lock
        self.awaits: dict[_Await, None] = {}
        self.inside: dict[_Stepped, str] = {}  # where its tasks are suspended now
        self.tasks: WeakSet[asyncio.Future[Any]] = WeakSet()  # their awaits are seen
        self.refused = False

    def look(self) -> frozenset[_Key]:
        """The locks that it holds now, alone."""
        held = {
            key for tenure in all_tenures() if tenure.terms.variable(_CALL, None) is self for key in self._of(tenure)
        }
        self.taken |= held
        return frozenset(held)

    def _of(self, tenure: Tenure) -> Iterator[_Key]:
        hold, session = tenure.hold, session_of(tenure)
        for name, kind in parts_of(hold.op):
            if kind.letter == "r" or kind.slots > 1:
                what = "a semaphore" if kind.slots else "a read lock"
                self.shared.add(f"{what} of {brief(name)}, which others can hold beside it")
            else:
                yield _Key(tuple(node.label for node in session.quorum.nodes), session.settings.prefix, name)

    @property
    def throughout(self) -> set[_Key]:
        """The locks that it held at each await."""
        return self.taken.intersection(*(each.held for each in self.awaits))

    def problem(self) -> str:
        """Why none of its locks was held throughout; "" if one was."""
        if self.throughout:
            return ""
        others = f", but {', '.join(sorted(self.shared))}" if self.shared else ""
        without = [each for each in self.awaits if not each.held]
        if not self.taken:
            where = f": it awaited at {without[0].place}" if without else ""
            return f"held no lock{others}{where}"
        if without:
            names = _names(self.taken)
            return f"awaited at {without[0].place} without a lock, and held {names} elsewhere{others}"
        seen = "; ".join(f"{_names(each.held)} at {each.place}" for each in self.awaits)
        return f"held no lock all the time: {seen}"


_CALL: ContextVar[_Call | None] = ContextVar("asynclock.testing.call", default=None)
"""The call in which code runs."""


async def assert_exclusive(call: Callable[[], Awaitable[object]], /, *, tasks: int = 8) -> None:
    """Run `call` in so many tasks at once. Raises AssertionError, which says what was seen, unless

    - each call held one lock alone at each of its awaits, and it was the same lock in all calls;
    - no two calls were inside at the same time;
    - all calls came to an end. (With a FakeStore it is seen that none can go on.)

    A call that is refused, with LockTimeout, with None of `acquire` or with Skipped, counts as excluded. Any other
    exception of a call is raised. Code between two awaits is not seen: let a mock that stands for I/O await something.
    Raises ConfigError.
    """
    if isinstance(tasks, bool) or not isinstance(tasks, int) or tasks < 2:
        raise ConfigError(f"tasks is a whole number from 2 on, not {tasks!r}")
    calls = [_Call(number) for number in range(1, tasks + 1)]
    overlaps: dict[str, None] = {}
    stop = observe_all(_told)
    try:
        with _stepping(calls, overlaps):
            results = await _results(calls, call)
    finally:
        stop()
    ran = [each for each, result in zip(calls, results, strict=True) if not _excluded(each, result)]
    errors = [each for each in results if isinstance(each, BaseException) and not isinstance(each, LockTimeout)]
    if problems := [*overlaps, *_problems(ran)]:
        text = "\n".join(f"  {each}" for each in problems)
        raise AssertionError(f"the calls do not exclude each other:\n{text}") from (errors[0] if errors else None)
    for error in errors:
        raise error


def _problems(ran: Sequence[_Call]) -> Iterator[str]:
    if not ran:
        yield "no call held a lock: all of them were refused"
        return
    numbers: dict[str, list[str]] = {}
    for each in ran:
        numbers.setdefault(each.problem(), []).append(str(each.number))
    without = numbers.pop("", [])
    for problem, those in numbers.items():
        yield f"{'call' if len(those) == 1 else 'calls'} {', '.join(those)} {problem}"
    if len(without) == len(ran) and not set.intersection(*(each.throughout for each in ran)):
        held = "; ".join(f"call {each.number} held {_names(each.throughout)}" for each in ran)
        yield f"they held different locks: {held}"


async def _results(calls: Sequence[_Call], call: Callable[[], Awaitable[object]]) -> list[object]:
    """Of all calls. Raises AssertionError if none of them can go on."""
    loop = asyncio.get_running_loop()
    running = asyncio.gather(*(_run(each, call) for each in calls), return_exceptions=True)
    timer: asyncio.TimerHandle
    problem = ""

    def look(before: dict[asyncio.Future[Any], object], times: int) -> None:
        nonlocal timer, problem
        tasks = [task for each in calls for task in each.tasks if not task.done()]
        waits: dict[asyncio.Future[Any], object] = {task: getattr(task, "_fut_waiter", None) for task in tasks}
        times = times + 1 if waits == before and _only_wait(calls) else 0
        if times == _LOOKS:
            problem = _deadlock(calls)
            running.cancel()
            return
        timer = loop.call_later(_LOOK, look, waits, times)

    timer = loop.call_later(_LOOK, look, {}, 0)
    try:
        return await running
    except asyncio.CancelledError:
        if problem:
            raise AssertionError(problem) from None
        raise
    finally:
        timer.cancel()


def _only_wait(calls: Sequence[_Call]) -> bool:
    """Whether all of them wait for locks, or for each other, and no time passes."""
    clocks = all_clocks()
    standing = clocks and all(isinstance(each, FakeClock) and each.stands_still for each in clocks)
    return bool(standing) and not any(each.inside for each in calls)


def _deadlock(calls: Sequence[_Call]) -> str:
    held = [f"call {each.number} holds {_names(keys)}" for each in calls if (keys := each.look())]
    return (
        f"no call can go on: the calls wait for locks, and {'; '.join(held) or 'no call holds one'}. If calls wait for "
        f"each other, let all of them take the locks in one order. If they wait for time, such as a min_hold, let it "
        f"pass: FakeStore(autojump=0)"
    )


async def _run(watched: _Call, call: Callable[[], Awaitable[object]]) -> object:
    _CALL.set(watched)
    return await asyncio.get_running_loop().create_task(_awaited(call))


async def _awaited(call: Callable[[], Awaitable[object]]) -> object:
    return await call()


def _told(event: Event) -> None:
    """In the context of the call that it is about."""
    if (call := _CALL.get()) is not None and isinstance(event, LockEvent):
        call.refused |= isinstance(event, TimedOut)
        if isinstance(event, Acquired):
            call.look()


def _excluded(call: _Call, result: object) -> bool:
    """Whether it did not get in."""
    return isinstance(result, LockTimeout | Skipped) or (call.refused and not call.taken)


def _names(keys: Iterable[_Key]) -> str:
    return ", ".join(sorted({brief(each.name) for each in keys}))


@contextmanager
def _stepping(calls: list[_Call], overlaps: dict[str, None]) -> Iterator[None]:
    """Meanwhile each new task of a call is stepped."""
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()

    def make(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        if (call := _CALL.get()) is not None:
            coro = _Stepped(coro, call, calls, overlaps)
        task = asyncio.Task(coro, loop=loop, **options) if before is None else before(loop, coro, **options)
        if call is not None:
            call.tasks.add(task)
        return task

    loop.set_task_factory(make)
    try:
        yield
    finally:
        loop.set_task_factory(before)


class _Stepped(Coroutine[Any, Any, Any]):
    """The coroutine of a task of a call. It looks at each await that suspends it."""

    def __init__(
        self, coro: Coroutine[Any, Any, Any], call: _Call, calls: list[_Call], overlaps: dict[str, None]
    ) -> None:
        self.__name__ = getattr(coro, "__name__", "call")
        self.__qualname__ = getattr(coro, "__qualname__", "call")
        self._coro, self._call, self._calls, self._overlaps = coro, call, calls, overlaps

    def send(self, value: Any) -> Any:
        self._call.inside.pop(self, None)
        awaited = self._coro.send(value)
        self._look(awaited)
        return awaited

    def throw(
        self, typ: Any, val: BaseException | object = None, tb: TracebackType | None = None
    ) -> Any:  # the signature of a coroutine
        self._call.inside.pop(self, None)
        awaited = self._coro.throw(typ) if val is None and tb is None else self._coro.throw(typ, val, tb)
        self._look(awaited)
        return awaited

    def close(self) -> None:
        self._call.inside.pop(self, None)
        self._coro.close()

    def __await__(self) -> Any:
        return self._coro.__await__()

    def __getattr__(self, name: str) -> Any:
        """Such as `cr_running`, by which anyio and `inspect` know the state of a task."""
        return getattr(self._coro, name)

    def _look(self, awaited: object) -> None:
        held, frames, tasks = self._call.look(), list(_frames(self._coro)), self._call.tasks
        mine = next((each for each in reversed(frames) if not _is_library(each)), None)
        below = frames[frames.index(mine) + 1 :] if mine is not None else frames
        if _ends_with(awaited, tasks) or any(_is_join(each, tasks) for each in below):
            return
        if mine is not None and _is_asynclock(mine):
            return
        if mine is None:  # such as a task of `wait_for`: the function that was called is the first with a public name
            named = (each for each in frames if not each.f_code.co_name.startswith("_"))
        else:  # in the program, and not in a package that it uses
            named = (each for each in reversed(frames) if _is_of_program(each))
        at = next(named, mine)
        place = f"{Path(at.f_code.co_filename).name}:{at.f_lineno} in {at.f_code.co_name}" if at else self.__qualname__
        self._call.awaits[_Await(place, held)] = None
        self._call.inside[self] = place
        for other in self._calls:
            if other is not self._call and other.inside and len(self._overlaps) < 1:
                there = next(iter(other.inside.values()))
                self._overlaps[
                    f"call {other.number} was at {there}, and call {self._call.number} at {place}, at the same time"
                ] = None


def _frames(awaited: object) -> Iterator[FrameType]:
    """The frames of a suspended coroutine, the outermost first."""
    while awaited is not None:
        if inspect.iscoroutine(awaited):
            frame, awaited = awaited.cr_frame, awaited.cr_await
        elif inspect.isasyncgen(awaited):
            frame, awaited = awaited.ag_frame, awaited.ag_await
        elif inspect.isgenerator(awaited):
            frame, awaited = awaited.gi_frame, awaited.gi_yieldfrom
        else:  # what the interpreter puts between: `anext` of an async generator, `__await__` of a coroutine
            inner = [
                each for each in gc.get_referents(awaited) if inspect.iscoroutine(each) or inspect.isasyncgen(each)
            ]
            frame, awaited = None, inner[0] if inner else None
        if frame is not None:
            yield frame


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_asynclock(frame: FrameType) -> bool:
    return _module(frame).partition(".")[0] == "asynclock" and not _module(frame).startswith("asynclock.testing.")


def _is_library(frame: FrameType) -> bool:
    """Whether it is of the standard library or of anyio, which await for others; or of this file."""
    top = _module(frame).partition(".")[0]
    return top in sys.stdlib_module_names - {"__main__"} or top == "anyio" or frame.f_globals is globals()


def _is_of_program(frame: FrameType) -> bool:
    installed = {"site-packages", "dist-packages"} & set(Path(frame.f_code.co_filename).parts)
    return not (installed or _is_library(frame) or _is_asynclock(frame))


def _is_join(frame: FrameType, tasks: WeakSet[asyncio.Future[Any]]) -> bool:
    """Whether it waits for some of these tasks, and for nothing else."""
    match where := (_module(frame), frame.f_code.co_name):
        case "asyncio.tasks", "wait_for":  # up to 3.11 it awaits a future of its own; later the coroutine itself
            return _ends_with(frame.f_locals["fut"], tasks)
        case "asyncio.tasks", "_wait":
            return all(_ends_with(each, tasks) for each in frame.f_locals["fs"])
    return where in _JOINS


def _ends_with(awaited: object, tasks: WeakSet[asyncio.Future[Any]]) -> bool:
    """Whether it is one of these tasks, or ends with them: the result of `gather` or `shield`."""
    if not asyncio.isfuture(awaited):
        return False
    if awaited in tasks:
        return True
    inner: list[object] = list(getattr(awaited, "_children", ()))
    for callback, _ in getattr(awaited, "_callbacks", None) or ():
        if getattr(callback, "__qualname__", "") == "shield.<locals>._outer_done_callback":
            inner.append(inspect.getclosurevars(callback).nonlocals["inner"])
    return bool(inner) and all(_ends_with(each, tasks) for each in inner)
