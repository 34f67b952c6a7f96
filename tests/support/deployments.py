"""The deployments over which the promises of all locks are tested. The fixture `make` makes clients of each.

A promise of the floors above the stores is tested once for each kind of node: in memory, one Redis, five Redis. The
contract of a store is the oracle of `tests/agreement` and the tests of `tests/stores`; beside it the tests marked
`every_store`, a short pass of each kind of lock, run over all deployments.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest

from asynclock.stores.memory import MemoryStore
from tests.support.user_store import DictStore

_tables = itertools.count()


@dataclass(frozen=True)
class Deployment:
    """Where the locks of a test are kept."""

    nodes: Callable[[pytest.FixtureRequest], list[Any]]  # for Redlock(*nodes)
    usual: bool = False  # all tests run over it; else those that are marked `every_store`
    leaves_out: Callable[[pytest.Item], bool] = lambda item: False  # the tests of what this store cannot keep
    options: dict[str, Any] | None = None  # of each client
    driver: str = ""  # of SQLAlchemy, which may be absent
    one_worker: bool = False  # its servers are many, or slow to start: one worker of xdist has them
    adapted: Callable[[list[Any], dict[str, Any]], list[Any]] = lambda nodes, options: nodes  # to a client's options


def _shared(number: int) -> Callable[[pytest.FixtureRequest], list[Any]]:
    def urls(request: pytest.FixtureRequest) -> list[Any]:
        return list(request.getfixturevalue("shared_urls")[:number])

    return urls


def _cluster(request: pytest.FixtureRequest) -> list[Any]:
    return [request.getfixturevalue("shared_cluster").url]


def _of_several_names(item: pytest.Item) -> bool:
    """A cluster keeps a lock of several names only in one slot."""
    return item.path.name == "test_multi.py" or item.name.startswith("test_several_names")


def _zookeeper(request: pytest.FixtureRequest) -> list[Any]:
    return [request.getfixturevalue("shared_zookeeper").url()]


def _with_session(nodes: list[Any], options: dict[str, Any]) -> list[Any]:
    """The lease of a client is that of its session."""
    lease = options.get("lease", 30.0)
    return [f"{url}?session_timeout={lease:g}" for url in nodes] if lease >= 1 else nodes


_NOT_OVER_ZOOKEEPER = {
    # a lease that is not the session's, or shorter than a session can be
    *("test_acquire_returns_a_lease_that_guards_its_block", "test_extend_replaces_and_never_shortens"),
    *("test_each_reader_has_its_own_expiry", "test_readers_are_renewed_and_lose_alone"),
    *("test_a_lost_permit_comes_back_after_its_lease", "test_holds_are_renewed_each_for_itself"),
    *("test_inspect_shows_holder_and_waiters", "test_a_broken_hold_is_notified_at_once"),
    "test_breaking_serves_the_next_waiter",
    # min_hold and once()
    *("test_min_hold_keeps_the_name_taken", "test_min_hold_keeps_others_out"),
    *("test_a_name_that_rests_is_shown_as_such", "test_a_name_whose_run_returned_is_shown_as_done"),
    # detach and adopt
    *("test_a_hold_moves_and_is_never_free", "test_a_handle_serves_once", "test_a_handle_that_comes_too_late"),
    *("test_waiters_get_it_from_the_adopter", "test_the_adopter_is_under_the_watchdog"),
    *("test_leases_that_cannot_be_detached", "test_forged_handles_are_refused"),
    *("test_an_adoption_that_is_cancelled_frees_the_name", "test_it_moves_once_and_is_never_free"),
    *("test_other_holders_of_the_name_are_not_disturbed", "test_the_permits_stay_as_many"),
    *("test_a_writer_waits_for_an_adopted_reader", "test_entered_again_while_it_is_detached"),
    *("test_entered_and_left_while_it_is_detached", "test_a_local_waiter_is_served_after_a_detach"),
}


def _table(service: str, driver: str = "") -> Callable[[pytest.FixtureRequest], list[Any]]:
    """A table of the test's own in a database that many tests share. `driver`: another one than that of the url."""

    def urls(request: pytest.FixtureRequest) -> list[Any]:
        scheme, _, server = request.getfixturevalue(service).partition(":")
        return [f"{driver or scheme}:{server}?asynclock_table=t{os.getpid()}_{next(_tables)}"]

    return urls


_PATIENT = {"connect_timeout": 10.0}
"""A busy machine needs more than a second for a first connection, and one to a database takes longer than one to Redis.
An acquire with timeout=0 waits for it at most so long."""


def _of_a_crowd(item: pytest.Item) -> bool:
    """150 waiters in one row: each of their ops writes it, which takes a database on a busy machine longer than the
    test allows. The memory store decides in the same way."""
    return item.name.startswith("test_all_waiting_readers_are_granted")


def _of_a_slow_driver(item: pytest.Item) -> bool:
    """The same, and a test in which all permits are used within 5 ms: an op is several round trips there."""
    return _of_a_crowd(item) or item.name.startswith("test_e12_never_more_than_permits")


DEPLOYMENTS = {
    "one": Deployment(_shared(1), usual=True, options=_PATIENT),
    "five": Deployment(_shared(5), usual=True, options=_PATIENT),
    "memory": Deployment(lambda request: [MemoryStore()], usual=True),
    "sentinel": Deployment(
        lambda request: [request.getfixturevalue("sentinel_deployment").url], options=_PATIENT, one_worker=True
    ),
    "user": Deployment(lambda request: [DictStore()]),
    "cluster": Deployment(_cluster, leaves_out=_of_several_names, options=_PATIENT, one_worker=True),
    "slot": Deployment(
        _cluster,
        leaves_out=lambda item: not _of_several_names(item),
        options={**_PATIENT, "prefix": "{all}"},
        one_worker=True,
    ),
    "zookeeper": Deployment(
        _zookeeper,
        leaves_out=lambda item: item.name.partition("[")[0] in _NOT_OVER_ZOOKEEPER,
        adapted=_with_session,
        options=_PATIENT,
        one_worker=True,
    ),
    "postgresql": Deployment(_table("postgresql_url"), leaves_out=_of_a_crowd, options=_PATIENT),
    "mariadb": Deployment(_table("mariadb_url"), leaves_out=_of_a_crowd, options=_PATIENT),
    "psycopg": Deployment(
        _table("postgresql_url", "postgresql+psycopg"), leaves_out=_of_a_slow_driver, options=_PATIENT, driver="psycopg"
    ),
    "aiomysql": Deployment(
        _table("mariadb_url", "mariadb+aiomysql"), leaves_out=_of_a_slow_driver, options=_PATIENT, driver="aiomysql"
    ),
    "sqlite": Deployment(
        lambda request: [f"sqlite:///{request.getfixturevalue('tmp_path')}/locks.db"], leaves_out=_of_a_crowd
    ),
}
"""By the name that the id of a test shows."""


def deployments_of(definition: pytest.Item) -> list[str]:
    """The deployments over which a test runs."""
    everywhere = definition.get_closest_marker("every_store")
    return [name for name, each in DEPLOYMENTS.items() if each.usual or (everywhere and _is_there(each.driver))]


def _is_there(driver: str) -> bool:
    """Whether its tests run: they take half a minute, so only `make drivers` asks for them."""
    return not driver or (os.environ.get("ASYNCLOCK_DRIVERS") == "all" and find_spec(driver) is not None)


def deployment_of(item: pytest.Item) -> str:
    """The deployment over which a test runs; "" if it has none."""
    words = {*item.name.rstrip("]").replace("[", "-").split("-")}
    return next((name for name in DEPLOYMENTS if name in words and "make" in getattr(item, "fixturenames", ())), "")


def is_left_out(item: pytest.Item) -> bool:
    """Whether it is a test of what its store cannot keep."""
    name = deployment_of(item)
    return bool(name) and DEPLOYMENTS[name].leaves_out(item)


_OF_ONE_WORKER = {"shared_cluster": "cluster", "shared_zookeeper": "zookeeper", "sentinel_deployment": "sentinel"}
"""Fixtures of servers that cost much while they idle, and the group of the tests that use them."""

_LONG = {"agreement"}
"""Folders whose files take too long for one worker; their servers cost little."""


def has_servers_of_its_file(item: pytest.Item) -> bool:
    """Whether it uses a fixture that the tests of its file share."""
    fixtures = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009 - pytest has no public name for it
    return any(each.scope == "module" for found in fixtures.values() for each in found)


def keep_together(item: pytest.Item) -> None:
    """Have one worker run all tests over servers that cost much to start, or that cost much while they idle."""
    if (name := deployment_of(item)) and DEPLOYMENTS[name].one_worker:
        item.add_marker(pytest.mark.xdist_group("cluster" if name == "slot" else name))
        return
    for fixture, group in _OF_ONE_WORKER.items():
        if fixture in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group(group))
            return
    if (
        has_servers_of_its_file(item)
        and item.path.parent.name not in _LONG
        and not item.get_closest_marker("xdist_group")
    ):
        item.add_marker(pytest.mark.xdist_group(item.path.stem))


def name_group(item: pytest.Item) -> None:
    """Have the id of the item end with its group, which is all that the scheduler of xdist sees of it. xdist 3.8 writes
    that into a field that pytest 9.2 no longer reads, and each worker would start all servers of all groups."""
    mark = item.get_closest_marker("xdist_group")
    if mark is None or not getattr(item.config.option, "loadgroup", False) or not hasattr(item, "_id"):
        return
    if not item.nodeid.endswith(suffix := f"@{mark.args[0]}"):
        item._id = type(item._id).parse(item.nodeid + suffix)
