"""Locks in an application of aiohttp: the client connects and closes with it, and errors of locks are answered.

    setup(app, ready="/ready")

    async def charge(request: web.Request) -> web.Response:
        async with request.config_dict[CLIENT](f"order:{request.match_info['order_id']}", timeout=5) as lease:
            ...

With `web.run_app(app, handler_cancellation=True)`, aiohttp cancels the handler of a client that hangs up. That ends a
wait for a lock. A handler that has held a lock runs to its end all the same: a payment that is cancelled half-way may
be carried out, and the next request pays again. docs/aiohttp.md has the answers.
"""

from __future__ import annotations

import asyncio
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from aiohttp import web

from asynclock import _problems
from asynclock._errors import ConfigError, LockError
from asynclock.client import Redlock, redlock
from asynclock.locks.lease import last_entry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp.typedefs import Handler, Middleware

__all__ = ["CLIENT", "setup"]

CLIENT: web.AppKey[Redlock] = web.AppKey("asynclock", Redlock)
"""The client of an application: `request.config_dict[CLIENT]`, in the handlers of its sub-applications, too."""

_ENDING = 5.0
"""Seconds for which the end of an application waits for the handlers that it has cancelled."""

_UNSET = object()

_HANDLERS = web.AppKey("asynclock_handlers", set[asyncio.Task[web.StreamResponse]])
_BEGUN: Any = getattr(web, "RequestKey", lambda name, _: name)("asynclock_response_begun", bool)
"""A key of a request: the headers of its response may have been sent, so there can be no other answer."""


def setup(
    app: web.Application,
    client: Redlock = redlock,
    /,
    *,
    busy_status: int = _problems.BUSY_STATUS,
    ready: str | None = None,
) -> None:
    """Let the handlers of `app` and of its sub-applications use `client`. It is connected before the other contexts of
    `cleanup_ctx` begin, and closed after they have ended. Errors of locks that no handler and no other middleware
    catches are answered: LockTimeout with `busy_status`; QuorumUnavailable, LockLost and StaleToken with 503. With
    `ready`, a readiness route is added at that path. A handler that aiohttp cancels, because its client has hung up,
    runs to its end if it has entered a block of a lock (`async with`). Raises ConfigError."""
    if not isinstance(app, web.Application) or not isinstance(client, Redlock):
        raise ConfigError(f"setup(app, client) takes a web.Application and a Redlock, not {app!r} and {client!r}")
    if app.frozen:
        raise ConfigError("call setup() before the application starts")
    if CLIENT in app:
        raise ConfigError("setup() was called for this application already")
    answering = _answering(_problems.check_busy_status(busy_status))
    ready = _problems.check_ready(ready)
    app[CLIENT] = client
    app[_HANDLERS] = set[asyncio.Task[web.StreamResponse]]()
    app.cleanup_ctx.insert(0, _connected)
    app.on_cleanup.insert(0, _end_handlers)  # before the contexts, which the handlers use
    app.middlewares[:0] = [_outliving, answering]
    app.on_response_prepare.append(_begun)
    if ready is not None:
        app.router.add_get(ready, _ready)


async def _connected(app: web.Application) -> AsyncIterator[None]:
    async with app[CLIENT]:
        yield


@web.middleware
async def _outliving(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Run the handler in a task of its own, which is not cancelled once it has held a lock: after the release, it may
    still have to commit."""
    context, handlers = copy_context(), request.config_dict[_HANDLERS]
    before = last_entry(context)
    # Not create_task: a task factory of the program may not know `context`.
    task = asyncio.Task(_run(handler, request), loop=asyncio.get_running_loop(), context=context)
    handlers.add(task)
    task.add_done_callback(handlers.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_report)
        if last_entry(context) is before:
            task.cancel()
        raise
    finally:  # aiohttp's log of accesses, and its signals, read what the handler has set
        for variable, value in context.items():
            if variable.get(_UNSET) is not value:
                variable.set(value)


async def _run(handler: Handler, request: web.Request) -> web.StreamResponse:
    return await handler(request)


def _report(task: asyncio.Task[web.StreamResponse]) -> None:
    """Tell of an error that nobody awaits, since the client has hung up."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, web.HTTPException):
        message = "The handler of a client that has hung up failed"
        task.get_loop().call_exception_handler({"message": message, "exception": error, "task": task})


async def _end_handlers(app: web.Application) -> None:
    """Cancel the handlers that still run when the server has ended: each releases its lock."""
    handlers = app[_HANDLERS].copy()
    for task in handlers:
        task.cancel()
    if handlers:
        await asyncio.wait(handlers, timeout=_ENDING)


async def _begun(request: web.Request, _: web.StreamResponse) -> None:
    request[_BEGUN] = True


def _answering(busy_status: int) -> Middleware:
    @web.middleware
    async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except LockError as error:
            answer = _problems.answer_to(error, busy_status)
            if answer is None or _BEGUN in request:  # aiohttp closes the connection: the client sees that it is cut
                raise
            return _response(answer)

    return answered


async def _ready(request: web.Request) -> web.Response:
    return _response(_problems.readiness(await request.config_dict[CLIENT].health()))


def _response(answer: _problems.Answer) -> web.Response:
    return web.Response(status=answer.status, headers=answer.headers, body=answer.body)
