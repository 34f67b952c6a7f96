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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from copy import deepcopy
from functools import partial
from inspect import Parameter, Signature
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

import anyio
import fastapi.routing
from fastapi import Depends, FastAPI, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import solve_dependencies
from fastapi.exceptions import RequestValidationError
from fastapi.params import Form
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.datastructures import FormData, UploadFile
from starlette.requests import HTTPConnection
from starlette.routing import Router

from asynclock import _problems
from asynclock._errors import ConfigError, LockError
from asynclock._options import check_flag, check_name, check_options
from asynclock.client import Redlock, redlock
from asynclock.locks.lock import Lock
from asynclock.locks.multi import MOST_NAMES
from asynclock.locks.template import NAMES, fill, namer, never_names, parse

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
_NO_WEBSOCKET = "Locked is for HTTP routes: in a websocket route, use `async with` of a lock"
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
    if _installed(app) is not None:
        raise ConfigError("install() was called for this app already")
    if app.middleware_stack is not None:  # its handlers of exceptions and its lifespan are chosen
        raise ConfigError("the app has started: call install() where the app is made, not in its lifespan or later")
    _problems.check_busy_status(busy_status)
    _problems.check_ready(ready)
    installed = _Installed(client, busy_status)
    installed.check(app)
    vars(app)[_INSTALLED] = installed
    _join_lifespan(app, installed)
    for error in (*_problems.ANSWERED, _HungUp):
        app.exception_handlers.setdefault(error, installed.answer)
    _describe(app, installed)
    if ready is not None:
        # A route of Starlette: one of FastAPI has the dependencies of the app, which may take a lock or want a token.
        app.router.add_route(ready, installed.ready, methods=["GET"], include_in_schema=False)
        app.router.routes.insert(0, app.router.routes.pop())  # before a catch-all, such as the mount of an SPA at "/"


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
    for a wrong option or template; the start of the app raises it, or Unsupported, for a lock that its client cannot
    make. A request raises what `async with` of a lock raises.
    """
    if not names or not all(name and (isinstance(name, str) or callable(name)) for name in names):
        raise ConfigError(f"Locked takes names: templates such as 'order:{{order_id}}', or functions; not {names!r}")
    _check_kind(kind, several=len(names) > 1)
    _check_names(names)
    if callable(kind) and options and len(names) == 1:
        raise ConfigError("a function as kind makes its lock with options of its own: give them there")
    check_flag("cancel_body", cancel_body)
    check_options(options, of_a_mutex=kind == "mutex" and len(names) == 1)
    return Depends(_Dependency(names, kind, cancel_body, options), scope="function")


def _check_kind(kind: Any, *, several: bool) -> None:
    if not callable(kind):
        if not isinstance(kind, str) or kind not in _KINDS:
            raise ConfigError(
                f"kind is one of {', '.join(_KINDS)}, or a function of the client and a name; not {kind!r}"
            )
        if several and kind == "reentrant":
            raise ConfigError("a lock of several names cannot be reentrant: leave kind out, or give one name")
        return
    if inspect.iscoroutinefunction(kind):
        raise ConfigError(f"kind makes a lock and awaits nothing: write a plain function, not an async def ({kind!r})")
    try:
        signature = inspect.signature(kind)
    except (TypeError, ValueError):  # of a function in C
        return
    try:
        signature.bind(None, "")
    except TypeError as error:
        raise ConfigError(
            f"kind is called with the client and the name, as in lambda client, name: client.semaphore(name, 3); "
            f"{kind!r} does not take them: {error}"
        ) from None


def _check_names(names: tuple[str | Callable[..., Any], ...]) -> None:
    if len(names) > MOST_NAMES:
        raise ConfigError(f"Locked of {len(names)} names: give at most {MOST_NAMES}")
    seen: list[object] = []
    for name in names:
        made_of = parse(name) if isinstance(name, str) else name
        if made_of in seen:
            raise ConfigError(f"Locked has {name!r} twice: name each lock once")
        seen.append(made_of)


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
            raise ConfigError(_NO_WEBSOCKET)
        installed = _installed(connection.app)
        if installed is None:
            raise ConfigError("Locked needs a client: call asynclock.fastapi.install(app, client) with this app")
        plan = installed.plan_of(connection)
        values = await plan.validated(connection)
        texts = [
            plan.name_of(name, values) if isinstance(name, str) else made[f"name_{i}"]
            for i, name in enumerate(self.names)
        ]
        lock = self.lock(installed.client, texts)
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
            # Without cancel_body no scope is open across the yield: a dependency of the default scope may open one
            # inside, and closes that one later.
            with anyio.CancelScope() if self.cancel_body else nullcontext() as body:
                watch.scope = body
                async with lease:
                    if plan.in_thread:
                        lease._spare_body()
                    yield lease
            if body is not None and body.cancelled_caught:
                raise _HungUp
        finally:
            await watch.end()

    def lock(self, client: Redlock, names: list[str]) -> Lock:
        """The lock of a request."""
        options: dict[str, Any] = dict(self.options)
        if len(self.names) == 1 and isinstance(self.names[0], str):
            options.setdefault("label", self.names[0])
        make = self.kind if callable(self.kind) else _KINDS[self.kind]
        if len(self.names) == 1:
            made = make(client, names[0]) if callable(self.kind) else make(client, names[0], **options)
            return _checked(made)
        # Two fields may have equal values, such as both accounts of a transfer: then they are one name.
        each_once = [name for i, name in enumerate(names) if name not in names[:i]]
        return client.multi(*(_checked(make(client, name)) for name in each_once), **options)

    def check(self, client: Redlock) -> None:
        """Make a lock as a request does. Raises the ConfigError or Unsupported that each request would raise."""
        names, real = self._sample_names()
        if not callable(self.kind):
            self.lock(client, names)
            return
        made: Sequence[Lock | str] = names
        try:
            made = [self.kind(client, name) for name in names]
        except Exception as error:  # of the program, which may know only the names that there are
            if real and isinstance(error, LockError):
                raise
        else:
            for lock in made:
                _checked(lock)
        if len(self.names) == 1:
            return
        if not real:
            for lock in made:
                client.multi(lock, **self.options)
            made = names  # the function may have made one name of two
        client.multi(*made, **self.options)

    def _sample_names(self) -> tuple[list[str], bool]:
        """Names for `check`, and whether they are as those of a request. All fields have the value 1, unless this makes
        two names equal. So names have one hash tag if they can have one."""
        if not all(isinstance(name, str) for name in self.names):
            return [f"{{any}}:{i}" for i in range(len(self.names))], False
        templates = [parse(name) for name in self.names if isinstance(name, str)]
        names = dict.fromkeys(fill(parts, lambda _: "1") for parts in templates)
        if len(names) < len(templates):
            numbers: dict[str, str] = {}
            names = dict.fromkeys(
                fill(parts, lambda field: numbers.setdefault(field, str(len(numbers)))) for parts in templates
            )
        return list(names), True

    def shares(self, other: _Dependency) -> str | None:
        """The template of a lock that the task of a request cannot hold because of `self` and `other`."""
        if callable(self.kind) or callable(other.kind) or self.kind == other.kind == "read":
            return None
        if self.owner is not None and self.owner == other.owner:
            return None
        return next((each for each in self.names if isinstance(each, str) and each in other.names), None)

    @property
    def owner(self) -> object:
        """Of a reentrant lock: the value of `owner`, or a name for the task. None: it is not reentrant."""
        options: dict[str, Any] = dict(self.options)
        reentrant = self.kind == "reentrant" or options.get("reentrant")
        return (options.get("owner"),) if reentrant else None


def _checked(lock: object) -> Lock:
    """What a function as `kind` has made. Raises ConfigError if it is no lock."""
    if not isinstance(lock, Lock):
        raise ConfigError(
            f"kind returned {type(lock).__name__}: return a lock, as in lambda client, name: client.semaphore(name, 3)"
        )
    return lock


class _HungUp(Exception):
    """The client disconnected, so nobody receives the response."""


class _Watch:
    """Reads what the client sends, and cancels `scope` if it disconnects. The messages are there for the endpoint, and
    so is an exception of a middleware, such as a limit of the body. A receive is never cancelled before the endpoint
    has returned: a middleware may lose its message then."""

    def __init__(self, request: Request, scope: anyio.CancelScope) -> None:
        self.scope: anyio.CancelScope | None = scope
        self._receive: Receive = request._receive  # noqa: SLF001 - Starlette has no other way to put messages back
        self._kept: list[Message | Exception] = []
        self._arrived = asyncio.Event()
        self._task = asyncio.create_task(self._read())
        self._task.add_done_callback(lambda _: self._arrived.set())
        request._receive = self._replayed  # noqa: SLF001

    async def end(self) -> None:
        """Stop reading."""
        self.scope = None  # first: a middleware that loses the cancel lets the task go on, and it would read again
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _read(self) -> None:
        size, message, whole = 0, {"type": ""}, False
        while self.scope is not None and size <= _LOOKAHEAD and message["type"] != "http.disconnect":
            try:
                message = await self._receive()  # type: ignore[assignment] # any mapping
            except Exception as error:  # raised where the endpoint reads it
                self._kept.append(error)
                return
            self._kept.append(message)
            self._arrived.set()
            if whole and message["type"] == "http.request":
                return  # a middleware that gives the body again and again, perhaps without an await
            whole = not message.get("more_body", False)
            size += len(message.get("body", b""))
        if self.scope is not None and message["type"] == "http.disconnect":
            self.scope.cancel()

    async def _replayed(self) -> Message:
        while not self._kept:
            if self._task.done():
                return await self._receive()
            self._arrived.clear()
            await self._arrived.wait()
        first = self._kept.pop(0)
        if isinstance(first, Exception):
            raise first
        return first


class _Plan:
    """A route that locks: how its parameters are validated without a call of its dependencies."""

    def __init__(self, route: Any) -> None:
        self.route, self.endpoint = route, route.dependant.call
        self.in_thread = not _is_called_as(inspect.iscoroutinefunction, self.endpoint)
        self._name = getattr(self.endpoint, "__qualname__", repr(self.endpoint))  # partials and objects have no name
        self._namers: dict[str, Callable[..., str]] = {}
        self._fields = {field.name: field for each in _tree(route.dependant) for field in _fields_of(each)}
        if any(
            _is_called_as(each, self.endpoint) for each in (inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        ):
            raise ConfigError(
                f"{self._name} streams its response, which begins after the lock is freed: "
                "take the lock in its body, with `async with`"
            )
        locks = list(dict.fromkeys(_locks_of(route.dependant)))  # FastAPI takes the same Locked once
        for dependency in locks:
            for name in dependency.names:
                if isinstance(name, str):
                    self.namer(name)
        for first, second in combinations(locks, 2):
            if (shared := first.shares(second)) is not None:
                raise ConfigError(
                    f"two locks of the route {route.path_format} have the name {shared!r}, so the second would wait "
                    "for the first: write it once, as ORDER = Locked(...), and put ORDER in both places"
                )

    def namer(self, template: str) -> Callable[..., str]:
        """The function that makes a name of the route's values. Raises ConfigError if the template does not fit."""
        if (known := self._namers.get(template)) is not None:
            return known

        def endpoint(**values: object) -> None: ...

        endpoint.__qualname__ = f"{self._name} ({self.route.path_format})"
        parameters = [Parameter(field, Parameter.KEYWORD_ONLY) for field in sorted(self._fields)]
        endpoint.__signature__ = Signature(parameters)  # type: ignore[attr-defined] # inspect reads it
        made = namer(template, endpoint)
        for _, field in parse(template):
            if field and "[" not in field:
                self._check_fields(template, *field.split("."))
        self._namers[template] = made
        return made

    def name_of(self, template: str, values: dict[str, Any]) -> str:
        """The name of the lock of a request. Raises RequestValidationError if the request has a value that names none,
        such as an empty one. That tells the client no name."""
        named = self.namer(template)
        try:
            return check_name(named(**values))
        except ConfigError as error:
            told = {"type": "lock_name", "loc": ("request",), "msg": "a value does not name a lock", "input": None}
            raise RequestValidationError([told]) from error

    def _check_fields(self, template: str, parameter: str, *names: str) -> None:
        """Raise ConfigError if a model of pydantic lacks one of these fields, or if no value of the last one names a
        lock. Only fields whose type is a model are followed."""
        model = self._fields[parameter].field_info.annotation
        for name in names:
            if not (isinstance(model, type) and issubclass(model, BaseModel)):
                return
            if name not in model.model_fields:
                if not hasattr(model, name) and model.model_config.get("extra") != "allow":
                    has = ", ".join(model.model_fields)
                    raise ConfigError(
                        f"{template!r} names {name!r}, which {model.__qualname__} does not have; its fields: {has}"
                    )
                return
            model = model.model_fields[name].annotation
        if never_names(model) or (isinstance(model, type) and issubclass(model, BaseModel)):
            field = ".".join((parameter, *names))
            raise ConfigError(f"{template!r}: {field}, of type {model.__name__}, does not name a lock: {NAMES}")

    async def validated(self, request: Request) -> dict[str, Any]:
        """The parameters of the route, those of the endpoint before those of dependencies. Raises
        RequestValidationError with what FastAPI itself would answer."""
        values: dict[str, Any] = dict.fromkeys(self._fields)
        errors: list[Any] = []
        body = await self._body(request)
        files = _open_files(body.get("body"))
        positions = [each.file.tell() for each in files]
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
                **(_copied(body) if dependant.body_params else {}),
            )
            values.update(solved.values)
            errors.extend(solved.errors)
        for file, position in zip(files, positions, strict=True):
            await file.seek(position)  # older versions of FastAPI have read those that the endpoint takes as bytes
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
        """Raises ConfigError for a template that does not fit its route, and for a route that cannot have a lock."""
        for route in _routes(app):
            if not getattr(route, "methods", None):
                raise ConfigError(f"{_NO_WEBSOCKET} ({route.path})")
            self._plan(route)

    def check_locks(self, app: FastAPI) -> None:
        """Make a lock for each `Locked`: one that the client or its stores refuse would fail each request. Raises
        ConfigError, Unsupported."""
        for route in _routes(app):
            for dependency in _locks_of(route.dependant):
                try:
                    dependency.check(self.client)
                except LockError as error:
                    error.add_note(f"This is a Locked of the route {route.path_format}")
                    raise

    def plan_of(self, request: Request) -> _Plan:
        """The plan of the route that this request is for."""
        # FastAPI lists a route of an included router under the prefix and the dependencies of its inclusion.
        # For an app that is mounted in that router it lists the mount, which has no parameters.
        included = request.scope.get("fastapi", {}).get("effective_route_context")
        for route in (included, request.scope.get("route")):
            if isinstance(getattr(route, "dependant", None), Dependant):
                return self._plan(route)
        raise ConfigError(f"Locked does not know the parameters of the route of {request.url.path}")

    def _plan(self, route: Any) -> _Plan:
        if (plan := self._plans.get(id(route.dependant))) is None:
            plan = self._plans[id(route.dependant)] = _Plan(route)
        return plan

    async def answer(self, request: Request, error: Exception) -> Response:
        """The response to an error of a lock."""
        if request.scope["type"] != "http":
            raise error  # of a websocket: the server closes it
        answer = _problems.answer_to(error, self.busy_status) if isinstance(error, LockError) else None
        if answer is None:
            return Response(status_code=499)  # the client has disconnected
        return Response(answer.body, answer.status, dict(answer.headers))

    async def ready(self, _: Request) -> Response:
        """Whether a lock could be acquired now."""
        answer = _problems.readiness(await self.client.health())
        return Response(answer.body, answer.status, dict(answer.headers))


_INSTALLED = "_asynclock_installed"
"""The attribute of an app. A dict by app, also a weak one, would keep each app: a plan refers to its route, and that to
its app."""


def _installed(app: object) -> _Installed | None:
    """What install() made for that app."""
    installed: _Installed | None = getattr(app, _INSTALLED, None)
    return installed


def _join_lifespan(app: FastAPI, installed: _Installed) -> None:
    own = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[Any]:
        clients = set[Redlock]()
        async with AsyncExitStack() as connected:

            async def check() -> None:
                locking = _check_routes(app)
                for each in (installed, *locking.values()):
                    if each.client not in clients:
                        clients.add(await connected.enter_async_context(each.client))
                for of, each in locking.items():
                    each.check_locks(of)  # the clients know their nodes and their environment by now

            await check()
            async with own(app) as state:
                await check()  # the app's own lifespan may have added routes and mounted apps
                yield state

    app.router.lifespan_context = lifespan


def _check_routes(app: FastAPI) -> dict[Any, _Installed]:
    """Check the routes of the app and of those that are mounted in it. Returns the apps that lock, with what install()
    made for them. Raises ConfigError."""
    locking = dict[Any, _Installed]()
    for each, path in _locking(app):
        if (installed := _installed(each)) is None:
            raise ConfigError(f"the app that is mounted at {path} has a Locked: call install() for that app, too")
        installed.check(each)
        locking[each] = installed
    return locking


def _describe(app: FastAPI, installed: _Installed) -> None:
    """Add the answers to the schema, to the operations that lock. An answer that the route describes itself stays."""
    own = app.openapi

    def openapi() -> dict[str, Any]:
        schema = own()
        for route in _own_routes(app.routes):
            for method in route.methods or ():
                operation = schema.get("paths", {}).get(route.path_format, {}).get(method.lower())
                if operation is not None:
                    for status, answer in _problems.openapi_responses(installed.busy_status).items():
                        operation.setdefault("responses", {}).setdefault(status, answer)
        return schema

    app.openapi = openapi  # type: ignore[method-assign] # FastAPI documents this way


def _routes(app: Starlette) -> Iterator[Any]:
    """The routes that have a Locked, of this app and of the routers that are mounted in it. Websocket routes, too:
    `check` refuses them."""
    yield from _own_routes(app.routes)
    for mounted, _ in _mounted(app.routes):
        if isinstance(mounted, Router):
            yield from _own_routes(mounted.routes)


def _own_routes(routes: Sequence[Any]) -> Iterator[Any]:
    """The routes among these that lock. Those of an included router have the path and the dependencies of its
    inclusion."""
    for route in _expanded(routes):
        dependant = getattr(route, "dependant", None)
        if isinstance(dependant, Dependant) and any(_locks_of(dependant)):
            yield route


def _expanded(routes: Sequence[Any]) -> Iterator[Any]:
    """These routes, and those of included routers. Older versions of FastAPI copy the routes that they include."""
    expand = getattr(fastapi.routing, "iter_route_contexts", iter)
    yield from expand(routes)


def _mounted(routes: Sequence[Any], path: str = "") -> Iterator[tuple[Any, str]]:
    """The apps and the routers that are mounted in these routes, with their paths, without those inside a mounted app.
    A middleware around an app or a router is skipped."""
    for route in _expanded(routes):
        if getattr(route, "endpoint", None) is not None:
            continue
        mounted = getattr(route, "app", None)
        at: str = getattr(route, "path", None) or getattr(route, "host", None) or ""
        while mounted is not None and not isinstance(mounted, Starlette | Router):
            mounted = getattr(mounted, "app", None)
        if mounted is not None:
            yield mounted, path + at
        if isinstance(mounted, Router):
            yield from _mounted(mounted.routes, path + at)


def _locking(app: Starlette, path: str = "") -> Iterator[tuple[Any, str]]:
    """The apps that have routes that lock, of this app and those mounted in it; with their paths. No server runs the
    lifespan of a mounted app."""
    if any(_routes(app)):
        yield app, path
    for mounted, at in _mounted(app.routes, path):
        if isinstance(mounted, Starlette):
            yield from _locking(mounted, at)


def _is_called_as(is_one: Callable[[Any], bool], endpoint: Any) -> bool:
    """Whether FastAPI calls an endpoint as a function of that sort. It may be a partial, or an object with `__call__`.
    If it is decorated, FastAPI looks at what the decorator has returned, and at the innermost function."""
    outer = _impartial(endpoint)
    inner = _impartial(inspect.unwrap(outer))
    layers = (outer, inner, *(_impartial(getattr(each, "__call__", each)) for each in (outer, inner)))  # noqa: B004
    return any(is_one(each) or is_one(inspect.unwrap(each)) for each in layers)


def _impartial(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function


def _copied(body: dict[str, Any]) -> dict[str, Any]:
    """A body to validate. A validator may change the JSON that it gets, and FastAPI validates the same JSON once more
    for the endpoint."""
    try:
        return {part: value if isinstance(value, FormData) else deepcopy(value) for part, value in body.items()}
    except Exception:  # too deep, or an object of the program's own class of requests
        return body


def _open_files(body: Any) -> list[UploadFile]:
    """The files of a form, without those that a dependency has closed."""
    if not isinstance(body, FormData):
        return []
    return [each for _, each in body.multi_items() if isinstance(each, UploadFile) and not each.file.closed]


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
