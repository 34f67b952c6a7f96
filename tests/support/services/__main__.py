"""Run a command with a server of each service that is installed here. Their urls are in $SMOKE_URLS, one in a line.

python -m tests.support.services COMMAND...
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.support.services.mariadb import shared_mariadb
from tests.support.services.postgresql import shared_postgresql
from tests.support.services.zookeeper import ZooKeepers, url_of


@contextmanager
def _zookeeper() -> Iterator[str]:
    pool = ZooKeepers()
    try:
        yield url_of([pool.start()])
    finally:
        pool.stop()


def main(command: list[str]) -> int:
    """The exit code of the command."""
    urls = []
    with ExitStack() as stack:
        for service in (shared_postgresql, shared_mariadb, _zookeeper):
            try:
                urls.append(stack.enter_context(service()))
            except pytest.skip.Exception as absent:
                print("left out:", absent, file=sys.stderr)
        return subprocess.run(command, env={**os.environ, "SMOKE_URLS": "\n".join(urls)}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
