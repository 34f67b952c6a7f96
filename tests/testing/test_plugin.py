"""The fixtures of `asynclock.testing.plugin`, as a test suite of a user gets them."""

from __future__ import annotations

import sys

import pytest

from asynclock import ConfigError, Redlock
from asynclock.stores.embedded import server as embedded
from asynclock.testing import server
from tests.support.containers import why_not

pytest_plugins = ["pytester"]

LOCAL = "asynclock-test/redis:debian"
"""The image that `make services` makes."""

STRICT = """
    import pytest
    from asynclock import Redlock, redlock
    from asynclock.testing import FakeStore

    pytestmark = pytest.mark.asyncio

    async def test_strict(redlock_store: FakeStore) -> None:
        async with redlock("order:42") as lease:
            await redlock_store.advance(60)
            assert lease.held

    async def test_again(redlock_store: FakeStore) -> None:
        async with redlock("order:42", timeout=0):
            pass
"""

ANYIO = """
    import anyio
    import pytest
    from asynclock import LockLost, redlock
    from asynclock.testing import FakeStore, assert_exclusive

    pytestmark = pytest.mark.anyio

    @pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
    def anyio_backend(request):
        return "asyncio", {"use_uvloop": request.param}

    async def test_anyio(redlock_store: FakeStore) -> None:
        with pytest.raises(LockLost):
            async with redlock("order:42"):
                redlock_store.lose("order:42")
                await redlock_store.advance(60)

    async def test_a_cancel_scope(redlock_store: FakeStore) -> None:
        began = redlock_store.clock.now()
        with anyio.CancelScope() as scope:
            scope.cancel()
            async with redlock("order:42"):
                await redlock_store.advance(60)
        async with anyio.create_task_group() as group:
            group.start_soon(redlock_store.advance, 60)
            await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        assert redlock_store.clock.now() - began == 60

    async def test_exclusive(redlock_store: FakeStore) -> None:
        @redlock.synchronized("order:42")
        async def pay() -> None:
            await anyio.sleep(0.001)

        await assert_exclusive(pay)
"""

SERVER = """
    import pytest
    from redis import Redis
    from asynclock import Redlock

    seen = set()

    @pytest.mark.parametrize("number", range(3))
    def test_it_is_empty(redlock_server: str, number: int) -> None:
        with Redis.from_url(redlock_server) as server:
            assert server.dbsize() == 0
            server.set("left", number)
            seen.add(server.info()["run_id"])
        assert len(seen) == 1

    def test_not_in_use(redlock_server: str) -> None:
        assert repr(Redlock(redlock_server)) == f"<Redlock {redlock_server}>"
"""


def test_under_each_plugin_for_async_tests(pytester: pytest.Pytester, wheel: None) -> None:
    """pytest-asyncio in strict mode, and anyio with both event loops, in one run without a warning."""
    pytester.makeconftest('pytest_plugins = ["asynclock.testing.plugin"]')
    pytester.makepyfile(test_strict=STRICT, test_anyio=ANYIO, test_server=SERVER)
    options = ("-o", "asyncio_mode=strict", "-o", "asyncio_default_fixture_loop_scope=function")
    ran = pytester.runpytest_subprocess("-Werror", "-p", "no:cacheprovider", *options)
    ran.assert_outcomes(passed=2 + 6 + 4)


async def test_a_container_where_there_is_no_wheel(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The server is that of a container, by testcontainers."""
    image = next((each for each in (LOCAL, server.IMAGE) if not why_not(each, pull=False)), None)
    if image is None:
        pytest.skip(why_not(server.IMAGE, pull=False))
    monkeypatch.setattr(embedded, "binary", no_wheel)
    monkeypatch.setattr(server, "IMAGE", image)
    monkeypatch.setattr("testcontainers.core.config.testcontainers_config.ryuk_disabled", True)  # its image is not here
    with server.real_server() as url:
        async with Redlock(url) as client, client(name):
            pass


def no_wheel() -> str:
    raise ConfigError("there is no wheel")


def test_neither_a_wheel_nor_testcontainers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install, and that a module is missing. An engine and its images have no part in it."""
    monkeypatch.setattr(embedded, "binary", no_wheel)
    monkeypatch.setitem(sys.modules, "testcontainers.core.container", None)
    with pytest.raises(ConfigError, match=r"asynclock\[embedded\] or testcontainers\[redis\].*ModuleNotFoundError"):
        with server.real_server():
            pass


def test_nothing_is_registered_by_itself() -> None:
    """A suite without the plugin has no fixture of asynclock, and `asynclock.testing` needs no pytest."""
    from importlib.metadata import distribution

    assert not [each for each in distribution("asynclock").entry_points if each.group == "pytest11"]
