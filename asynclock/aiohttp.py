"""Locks in an application of aiohttp: the client connects and closes with it, and errors of locks are answered.

    setup(app, ready="/ready")

    async def charge(request: web.Request) -> web.Response:
        async with request.config_dict[CLIENT](f"order:{request.match_info['order_id']}", timeout=5) as lease:
            ...

docs/aiohttp.md has the answers, and what becomes of a handler whose client hangs up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from asynclock import _problems
from asynclock._errors import ConfigError, LockError
from asynclock.client import Redlock, redlock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp.typedefs import Handler, Middleware

__all__ = ["CLIENT", "setup"]

CLIENT: web.AppKey[Redlock] = web.AppKey("asynclock", Redlock)
"""The client of an application: `request.config_dict[CLIENT]`, in the handlers of its sub-applications, too."""

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
    catches are answered: LockTimeout with `busy_status`, QuorumUnavailable and LockLost with 503. With `ready`, a
    readiness route is added at that path. Raises ConfigError."""
    if not isinstance(app, web.Application) or not isinstance(client, Redlock):
        raise ConfigError(f"setup(app, client) takes a web.Application and a Redlock, not {app!r} and {client!r}")
    if app.frozen:
        raise ConfigError("call setup() before the application starts")
    if CLIENT in app:
        raise ConfigError("setup() was called for this application already")
    answering = _answering(_problems.check_busy_status(busy_status))
    ready = _problems.check_ready(ready)
    app[CLIENT] = client
    app.cleanup_ctx.insert(0, _connected)
    app.middlewares.insert(0, answering)
    app.on_response_prepare.append(_begun)
    if ready is not None:
        app.router.add_get(ready, _ready)


async def _connected(app: web.Application) -> AsyncIterator[None]:
    async with app[CLIENT]:
        yield


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
