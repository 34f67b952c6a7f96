"""Servers that are busy with a script of another client."""

from __future__ import annotations

import threading

import pytest
import redis as redis_py

from tests.support.servers import Server


def endless(server: Server) -> threading.Thread:
    """A script of another client that does not end: from its first ms on the server answers BUSY."""
    with server.cli() as cli:
        cli.config_set("busy-reply-threshold", 1)

    def run() -> None:
        with pytest.raises(redis_py.ResponseError), server.cli() as cli:
            cli.eval("while true do end", 0)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def is_busy(server: Server) -> bool:
    with server.cli() as cli:
        try:
            cli.ping()
        except redis_py.ResponseError as error:
            return "BUSY" in str(error)
        return False
