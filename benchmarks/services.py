"""Starts one server, or one deployment, of each store: those that the tests use. A store whose server is not installed
is left out, with a line that says so."""

from __future__ import annotations

import contextlib
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import report
from benchmarks.servers import running
from tests.support.services.cluster import Cluster
from tests.support.services.mariadb import own_mariadb
from tests.support.services.postgresql import own_postgresql, pgbouncer
from tests.support.services.sentinels import Deployment
from tests.support.services.zookeeper import ZooKeepers, url_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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


@contextlib.contextmanager
def every_store() -> Iterator[dict[str, Sequence[str]]]:
    """The urls of each store by its name, all started."""
    found: dict[str, Sequence[str]] = {}
    with ExitStack() as stack:
        for name, start in STORES.items():
            try:
                found[name] = start(stack)
            except BaseException as error:
                if type(error).__name__ != "Skipped":  # pytest's, of a service that is not installed
                    raise
                report.console.print(f"{name}: {error}")
        yield found
