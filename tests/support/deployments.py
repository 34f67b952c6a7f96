"""The deployments over which the promises of all locks are tested. The fixture `make` makes clients of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from asynclock.stores.memory import MemoryStore
from tests.support.user_store import DictStore

EVERYWHERE = {
    *("locks.test_lock", "locks.test_fair", "locks.test_reentrant", "locks.test_rwlock", "locks.test_semaphore"),
    *("locks.test_multi", "locks.test_detach_and_adopt", "locks.test_detach_kinds", "locks.test_one_kind_per_name"),
    *("locks.test_inspect", "waiting.test_timeouts", "waiting.test_cancelled_waits", "waiting.test_wake_up_order"),
    "waiting.test_local_queue_hand_over",
}
"""Every kind of lock, and the basics of waiting: these modules run over all deployments; other ones over "one", "five"
and "memory"."""


@dataclass(frozen=True)
class Deployment:
    """Where the locks of a test are kept."""

    nodes: Callable[[pytest.FixtureRequest], list[Any]]  # for Redlock(*nodes)
    usual: bool = False  # all tests run over it, on both event loops; else those of EVERYWHERE, on one loop
    leaves_out: Callable[[pytest.Item], bool] = lambda item: False  # the tests of what this store cannot keep
    options: dict[str, Any] | None = None  # of each client
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


DEPLOYMENTS = {
    "one": Deployment(_shared(1), usual=True),
    "five": Deployment(_shared(5), usual=True),
    "memory": Deployment(lambda request: [MemoryStore()], usual=True),
    "sentinel": Deployment(lambda request: [request.getfixturevalue("sentinel_deployment").url]),
    "user": Deployment(lambda request: [DictStore()]),
    "cluster": Deployment(_cluster, leaves_out=_of_several_names),
    "slot": Deployment(_cluster, leaves_out=lambda item: not _of_several_names(item), options={"prefix": "{all}"}),
    "zookeeper": Deployment(_zookeeper, adapted=_with_session),
}
"""By the name that the id of a test shows."""


def deployments_of(module: str) -> list[str]:
    """The deployments over which the tests of a module run."""
    everywhere = module.removeprefix("tests.") in EVERYWHERE
    return [name for name, each in DEPLOYMENTS.items() if each.usual or everywhere]


def is_left_out(item: pytest.Item) -> bool:
    """Whether a test need not run: the store cannot keep it, or it is one on a second event loop over a store that has
    no part in that."""
    words = {*item.name.rstrip("]").replace("[", "-").split("-")}
    for name, each in DEPLOYMENTS.items():
        if name in words and "make" in getattr(item, "fixturenames", ()):
            return (not each.usual and "uvloop" in words) or each.leaves_out(item)
    return False
