"""Locks in FastAPI: a dependency that holds a lock around the endpoint, the answers, the lifespan. See docs/fastapi.md.

    app = FastAPI()
    install(app, client, ready="/ready")

    @app.post("/orders/{order_id}/charge")
    async def charge(order_id: int, lease: Annotated[Lease, Locked("order:{order_id}", timeout=5)]) -> None: ...

FastAPI solves the dependencies of an endpoint before it validates the endpoint's own parameters. So the dependency of a
lock validates all parameters of the route first, with the fields that FastAPI has made of them. Then /orders/7 and
/orders/07 have one lock, and a request with a wrong parameter takes none.

Source: https://fastapi.tiangolo.com/tutorial/dependencies/dependencies-with-yield/
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack
from weakref import WeakKeyDictionary

import anyio
import fastapi.routing
from fastapi import Depends, FastAPI, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import solve_dependencies
from fastapi.exceptions import RequestValidationError
from fastapi.params import Form
from starlette.requests import HTTPConnection

from asynclock import _problems
from asynclock._errors import ConfigError, LockError
from asynclock._options import check_options
from asynclock.client import Redlock, redlock
from asynclock.locks.lock import Lock
from asynclock.locks.template import namer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Message, Receive

    from asynclock._options import LockOptions
    from asynclock.locks.lease import Lease

__all__ = ["Locked", "install"]

KindName = Literal["mutex", "fair", "reentrant", "read", "write"]
Kind = KindName | Callable[[Redlock, str], Lock]

_KINDS: dict[str, Callable[..., Lock]] = {
    "mutex": lambda client, name, **options: client(name, **options),
    "fair": lambda client, name, **options: client(name, fair=True, **options),
    "reentrant": lambda client, name, **options: client(name, reentrant=True, **options),
    "read": Redlock.read,
    "write": Redlock.write,
}
_LOOKAHEAD = 1 << 20  # bytes of a body that are read, and kept, while its request waits


def install(
    app: FastAPI, client: Redlock = redlock, /, *, busy_status: int = _problems.BUSY_STATUS, ready: str | None = None
) -> None:
    """Let the routes of `app` use `Locked`: `client` is connected before the app's own lifespan begins, and closed
    after it has ended; errors of locks are answered (LockTimeout with `busy_status`; QuorumUnavailable, LockLost and
    StaleToken with 503); the answers stand in the OpenAPI schema of the routes that lock. With `ready`, the path of a
    readiness route is added. A handler of the app for one of these errors takes precedence. Raises ConfigError, also
    for a template that does not fit its route."""
    if not isinstance(app, FastAPI) or not isinstance(client, Redlock):
        raise ConfigError(f"install(app, client) takes a FastAPI and a Redlock, not {app!r} and {client!r}")
    if app in _installed:
        raise ConfigError("install() was called for this app already")
    _problems.check_busy_status(busy_status)
    _problems.check_ready(ready)
    installed = _Installed(client, busy_status)
    installed.check(app)
    _installed[app] = installed
    _join_lifespan(app, installed)
    for error in (*_problems.ANSWERED, _HungUp):
        app.exception_handlers.setdefault(error, installed.answer)
    _describe(app, installed)
    if ready is not None:
        app.add_api_route(ready, installed.ready, methods=["GET"], include_in_schema=False)


def Locked(  # noqa: N802 - it stands in annotations, as a type does
    *names: str | Callable[..., Any],
    kind: Kind = "mutex",
    cancel_body: bool = False,
    **options: Unpack[LockOptions],
) -> Any:
    """A dependency that holds a lock while the endpoint runs, and frees it before the response is sent.

        lease: Annotated[Lease, Locked("order:{order_id}", timeout=5)]

    A name is a template over the validated parameters of the route, or a callable: a dependency that returns the name.
    Several names are one multi lock. `kind` is the kind of each name, or a function of the client and the name that
    makes a Lock with options of its own. `options` are those of LockOptions.

    While the request waits for the lock, a client that hangs up ends the wait. Once the lock is held, the endpoint runs
    to its end; with `cancel_body=True` a client that hangs up cancels an `async def` endpoint. Raises ConfigError, also
    for a wrong option; the start of the app raises it for an option that does not fit the client. A request raises what
    `async with` of a lock raises.
    """
    if not names or not all(name and (isinstance(name, str) or callable(name)) for name in names):
        raise ConfigError(f"Locked takes names: templates such as 'order:{{order_id}}', or functions; not {names!r}")
    if not callable(kind) and kind not in _KINDS:
        raise ConfigError(f"kind is one of {', '.join(_KINDS)}, or a function of the client and a name; not {kind!r}")
    if callable(kind) and options and len(names) == 1:
        raise ConfigError("a function as kind makes its lock with options of its own: give them there")
    check_options(options, of_a_mutex=kind == "mutex" and len(names) == 1)
    return Depends(_Dependency(names, kind, cancel_body, options), scope="function")


class _Dependency:
    """What FastAPI calls. Its signature names the dependencies that return names of locks."""

    def __init__(
        self, names: tuple[str | Callable[..., Any], ...], kind: Kind, cancel_body: bool, options: LockOptions
    ) -> None:
        self.names, self.kind, self.cancel_body, self.options = names, kind, cancel_body, options
        asked = [
            Parameter(f"name_{i}", Parameter.KEYWORD_ONLY, annotation=Annotated[Any, Depends(name)])
            for i, name in enumerate(names)
            if not isinstance(name, str)
        ]
        connection = Parameter("connection", Parameter.KEYWORD_ONLY, annotation=HTTPConnection)
        self.__signature__ = Signature([connection, *asked])

    async def __call__(self, *, connection: HTTPConnection, **made: str) -> AsyncIterator[Lease]:
        """Hold the lock until FastAPI closes this generator."""
        if not isinstance(connection, Request):
            raise ConfigError("Locked is for HTTP routes: in a websocket route, use `async with` of a lock")
        installed = _installed.get(connection.app)
        if installed is None:
            raise ConfigError("Locked needs a client: call asynclock.fastapi.install(app, client) with this app")
        plan = installed.plan_of(connection)
        values = await plan.validated(connection)
        texts = [
            plan.namer(name)(**values) if isinstance(name, str) else made[f"name_{i}"]
            for i, name in enumerate(self.names)
        ]
        lock = self.lock(installed.client, texts, in_thread=plan.in_thread)
        scope = anyio.CancelScope()
        watch = _Watch(connection, scope)
        lease: Lease | None = None
        try:
            with scope:
                lease = await lock._leased()
            watch.scope = None
            if scope.cancel_called:  # perhaps in the moment in which the lock was granted
                if lease is not None:
                    await lease.release()
                raise _HungUp
            assert lease is not None  # noqa: S101 - for mypy: only a cancel leaves the scope without it
            if plan.in_thread and callable(self.kind):  # no cancel ends the thread, so the block is not entered
                try:
                    yield lease
                finally:
                    await lease.release()
            else:
                with anyio.CancelScope() as scope:
                    watch.scope = scope if self.cancel_body else None
                    async with lease:
                        yield lease
                if scope.cancelled_caught:
                    raise _HungUp
        finally:
            await watch.end()

    def lock(self, client: Redlock, names: list[str], *, in_thread: bool) -> Lock:
        """The lock of a request. A loss cannot cancel a thread, so there it is raised at the end."""
        options: dict[str, Any] = dict(self.options)
        if len(self.names) == 1 and isinstance(self.names[0], str):
            options.setdefault("label", self.names[0])
        if in_thread:
            options["cancel_on_lost"] = False
        if len(names) == 1:
            return (
                self.kind(client, names[0]) if callable(self.kind) else _KINDS[self.kind](client, names[0], **options)
            )
        make = self.kind if callable(self.kind) else _KINDS[self.kind]
        return client.multi(*(make(client, name) for name in names), **options)


class _HungUp(Exception):
    """The client disconnected, so nobody receives the response."""


class _Watch:
    """Reads what the client sends, and cancels `scope` if it disconnects. The messages are there for the endpoint. A
    receive is never cancelled before the endpoint has returned: a middleware may lose its message then."""

    def __init__(self, request: Request, scope: anyio.CancelScope) -> None:
        self.scope: anyio.CancelScope | None = scope
        self._receive: Receive = request._receive  # noqa: SLF001 - Starlette has no other way to put messages back
        self._kept: list[Message] = []
        self._arrived = asyncio.Event()
        self._task = asyncio.create_task(self._read())
        self._task.add_done_callback(lambda _: self._arrived.set())
        request._receive = self._replayed  # noqa: SLF001

    async def end(self) -> None:
        """Stop reading."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _read(self) -> None:
        size, message = 0, {"type": ""}
        while self.scope is not None and size <= _LOOKAHEAD and message["type"] != "http.disconnect":
            message = await self._receive()  # type: ignore[assignment] # any mapping
            self._kept.append(message)
            self._arrived.set()
            size += len(message.get("body", b""))
        if self.scope is not None and message["type"] == "http.disconnect":
            self.scope.cancel()

    async def _replayed(self) -> Message:
        while not self._kept:
            if self._task.done():
                return await self._receive()
            self._arrived.clear()
            await self._arrived.wait()
        return self._kept.pop(0)


class _Plan:
    """A route that locks: how its parameters are validated without a call of its dependencies."""

    def __init__(self, route: Any) -> None:
        self.route, self.endpoint = route, route.dependant.call
        self.in_thread = not inspect.iscoroutinefunction(inspect.unwrap(self.endpoint))
        self._namers: dict[str, Callable[..., str]] = {}
        self._fields = {field.name for each in _tree(route.dependant) for field in _fields_of(each)}
        if inspect.isgeneratorfunction(self.endpoint) or inspect.isasyncgenfunction(self.endpoint):
            raise ConfigError(
                f"{self.endpoint.__qualname__} streams its response, which begins after the lock is freed: "
                "take the lock in its body, with `async with`"
            )
        for dependency in _locks_of(route.dependant):
            for name in dependency.names:
                if isinstance(name, str):
                    self.namer(name)

    def namer(self, template: str) -> Callable[..., str]:
        """The function that makes a name of the route's values. Raises ConfigError if the template does not fit."""
        if (known := self._namers.get(template)) is not None:
            return known

        def endpoint(**values: object) -> None: ...

        endpoint.__qualname__ = f"{self.endpoint.__qualname__} ({self.route.path_format})"
        parameters = [Parameter(field, Parameter.KEYWORD_ONLY) for field in sorted(self._fields)]
        endpoint.__signature__ = Signature(parameters)  # type: ignore[attr-defined] # inspect reads it
        self._namers[template] = made = namer(template, endpoint)
        return made

    async def validated(self, request: Request) -> dict[str, Any]:
        """The parameters of the route, those of the endpoint before those of dependencies. Raises
        RequestValidationError with what FastAPI itself would answer."""
        values: dict[str, Any] = dict.fromkeys(self._fields)
        errors: list[Any] = []
        body = await self._body(request)
        for dependant in _tree(self.route.dependant, request.app.dependency_overrides):
            solved = await solve_dependencies(
                request=request,
                dependant=Dependant(
                    path_params=dependant.path_params,
                    query_params=dependant.query_params,
                    header_params=dependant.header_params,
                    cookie_params=dependant.cookie_params,
                    body_params=dependant.body_params,
                ),
                async_exit_stack=request.scope["fastapi_inner_astack"],
                embed_body_fields=getattr(self.route, "_embed_body_fields", False),
                **body,
            )
            values.update(solved.values)
            errors.extend(solved.errors)
        if errors:
            raise RequestValidationError(errors, body=body.get("body"))
        return values

    async def _body(self, request: Request) -> dict[str, Any]:
        """The body as FastAPI has parsed it for this request; empty: there is none."""
        if self.route.body_field is None:
            return {}
        if isinstance(self.route.body_field.field_info, Form):
            return {"body": await request.form()}
        raw = await request.body()
        if not raw:
            return {}
        return {"body": await request.json() if "_json" in vars(request) else raw}


class _Installed:
    """What install() made for one app."""

    def __init__(self, client: Redlock, busy_status: int) -> None:
        self.client, self.busy_status = client, busy_status
        self._plans: dict[int, _Plan] = {}  # by the id of the route's Dependant, which its plan keeps alive

    def check(self, app: FastAPI) -> None:
        """Raises ConfigError for a template that does not fit its route."""
        for route in _routes(app):
            self._plan(route)

    def check_options(self, app: FastAPI) -> None:
        """Make a lock with the options of each `Locked`: an option that the client or its stores refuse would fail each
        request. Raises ConfigError, Unsupported."""
        for route in _routes(app):
            for dependency in _locks_of(route.dependant):
                kind = dependency.kind if len(dependency.names) == 1 else "mutex"  # a multi lock has options alike
                if callable(kind):  # its options are its own, and it expects a real name
                    continue
                try:
                    _KINDS[kind](self.client, "any", **dependency.options)
                except LockError as error:
                    error.add_note(f"These are options of Locked, in the route {route.path_format}")
                    raise

    def plan_of(self, request: Request) -> _Plan:
        """The plan of the route that this request is for."""
        # FastAPI lists a route of an included router under the prefix and the dependencies of its inclusion.
        included = request.scope.get("fastapi", {}).get("effective_route_context")
        route = included or request.scope.get("route")
        if not isinstance(getattr(route, "dependant", None), Dependant):
            raise ConfigError(f"Locked does not know the parameters of the route of {request.url.path}")
        return self._plan(route)

    def _plan(self, route: Any) -> _Plan:
        if (plan := self._plans.get(id(route.dependant))) is None:
            plan = self._plans[id(route.dependant)] = _Plan(route)
        return plan

    async def answer(self, request: Request, error: Exception) -> Response:
        """The response to an error of a lock."""
        answer = _problems.answer_to(error, self.busy_status) if isinstance(error, LockError) else None
        if answer is None:
            return Response(status_code=499)  # the client has disconnected
        return Response(answer.body, answer.status, dict(answer.headers))

    async def ready(self) -> Response:
        """Whether a lock could be acquired now."""
        answer = _problems.readiness(await self.client.health())
        return Response(answer.body, answer.status, dict(answer.headers))


_installed: WeakKeyDictionary[Any, _Installed] = WeakKeyDictionary()


def _join_lifespan(app: FastAPI, installed: _Installed) -> None:
    own = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[Any]:
        installed.check(app)
        async with installed.client:
            installed.check_options(app)  # the client knows its nodes and its environment by now
            async with own(app) as state:
                yield state

    app.router.lifespan_context = lifespan


def _describe(app: FastAPI, installed: _Installed) -> None:
    """Add the answers to the schema, to the operations that lock. An answer that the route describes itself stays."""
    own = app.openapi

    def openapi() -> dict[str, Any]:
        schema = own()
        for route in _routes(app):
            for method in route.methods:
                operation = schema.get("paths", {}).get(route.path_format, {}).get(method.lower())
                if operation is not None:
                    for status, answer in _problems.openapi_responses(installed.busy_status).items():
                        operation.setdefault("responses", {}).setdefault(status, answer)
        return schema

    app.openapi = openapi  # type: ignore[method-assign] # FastAPI documents this way


def _routes(app: FastAPI) -> Iterator[Any]:
    """The routes that lock, those of included routers with the path and the dependencies that they have here."""
    expand = getattr(fastapi.routing, "iter_route_contexts", iter)  # older versions copy the routes that they include
    for route in expand(app.routes):
        dependant = getattr(route, "dependant", None)
        if isinstance(dependant, Dependant) and getattr(route, "methods", None) and any(_locks_of(dependant)):
            yield route


def _locks_of(dependant: Dependant) -> Iterator[_Dependency]:
    return (each.call for each in _tree(dependant) if isinstance(each.call, _Dependency))


def _tree(dependant: Dependant, overridden: Any = ()) -> Iterator[Dependant]:
    """It and its dependencies, in FastAPI's order, without those that a test has overridden."""
    for each in dependant.dependencies:
        if each.call not in overridden:
            yield from _tree(each, overridden)
    yield dependant


def _fields_of(dependant: Dependant) -> list[Any]:
    return [
        *dependant.path_params,
        *dependant.query_params,
        *dependant.header_params,
        *dependant.cookie_params,
        *dependant.body_params,
    ]
