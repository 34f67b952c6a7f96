"""A coroutine of a driver without a task. It may await plain futures only, as asyncpg and asyncmy do where they have no
limit of their own: they write a request, and await the future of its answer. A task for that costs the client as much
as the request, and one more turn of the event loop."""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

_Result = TypeVar("_Result")


class Driven(Generic[_Result]):
    """Runs `work` from `begin` on, and calls `done` in a later turn of the loop: with its result, or with its error.
    That is CancelledError after `cancel`. If the loop is closed before, nothing is called."""

    __slots__ = ("_done", "_has_waited", "_waits", "_work")

    def __init__(
        self, work: Coroutine[Any, Any, _Result], done: Callable[[_Result | None, BaseException | None], object]
    ) -> None:
        self._work = work
        self._done = done
        self._waits: asyncio.Future[Any] | None = None
        self._has_waited = False

    def begin(self) -> None:
        """Its first step."""
        Context().run(self._step)

    def cancel(self) -> None:
        """As that of a task."""
        if self._waits is not None:
            self._waits.cancel()

    def _step(self, ended: object = None) -> None:
        del ended
        self._waits = None
        try:
            waits: Any = self._work.send(None)
        except StopIteration as end:
            self._end(end.value, None)
        except (Exception, asyncio.CancelledError) as error:
            self._end(None, error)
        else:
            waits._asyncio_future_blocking = False  # noqa: SLF001 - so asyncio marks a future that a task awaits
            self._waits, self._has_waited = waits, True
            waits.add_done_callback(self._step, context=Context())

    def _end(self, result: _Result | None, error: BaseException | None) -> None:
        done = self._done
        del self._done  # its owner, and so all that waited for this, refers to this
        if self._has_waited:
            done(result, error)
        else:
            asyncio.get_running_loop().call_soon(done, result, error, context=Context())
