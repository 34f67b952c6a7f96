"""Starts one server, or one deployment, of each store: those that the tests use."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.servers import running
from tests.support.services.cluster import Cluster
from tests.support.services.mariadb import own_mariadb
from tests.support.services.postgresql import own_postgresql, pgbouncer
from tests.support.services.sentinels import Deployment
from tests.support.services.zookeeper import ZooKeepers, url_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DURABLE_POSTGRESQL = {"fsync": "on", "full_page_writes": "on"}
DURABLE_MARIADB = ("--innodb-flush-log-at-trx-commit=1",)
"""As servers of users are: a commit waits for the disk. Those of the tests do not."""


def _redis(stack: ExitStack, nodes: int) -> list[str]:
    return [server.url for server in stack.enter_context(running(nodes))]


def _sentinel(stack: ExitStack, option: str = "") -> list[str]:
    deployment = Deployment()
    stack.callback(deployment.stop)
    deployment.ready()
    return [f"{deployment.url}{option}"]


def _cluster(stack: ExitStack) -> list[str]:
    cluster = Cluster(3, 1)
    stack.callback(cluster.stop)
    return [cluster.ready().url]


def _pooled(stack: ExitStack) -> list[str]:
    database = stack.enter_context(own_postgresql(**DURABLE_POSTGRESQL))
    return [stack.enter_context(pgbouncer(database.url))]


def _sqlite(stack: ExitStack) -> list[str]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="asynclock-bench-")))
    return [f"sqlite:///{folder / 'locks.db'}"]


def _zookeeper(stack: ExitStack, servers: int) -> list[str]:
    pool = ZooKeepers(durable=True)
    stack.callback(pool.stop)
    return [pool.start().url() if servers == 1 else url_of(pool.ensemble(servers))]


STORES: dict[str, Callable[[ExitStack], Sequence[str]]] = {
    "Redis": lambda stack: _redis(stack, 1),
    "Redlock of five": lambda stack: _redis(stack, 5),
    "Sentinel": _sentinel,
    "Sentinel, min_replicas=1": lambda stack: _sentinel(stack, "?min_replicas=1"),
    "Cluster of three masters": _cluster,
    "PostgreSQL": lambda stack: [stack.enter_context(own_postgresql(**DURABLE_POSTGRESQL)).url],
    "PostgreSQL, pgbouncer": _pooled,
    "MariaDB": lambda stack: [stack.enter_context(own_mariadb(*DURABLE_MARIADB)).url],
    "SQLite": _sqlite,
    "ZooKeeper": lambda stack: _zookeeper(stack, 1),
    "ZooKeeper of three": lambda stack: _zookeeper(stack, 3),
}
