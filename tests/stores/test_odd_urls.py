"""Urls and addresses that name a server in an odd way: no other server is used, and no secret is shown."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from asynclock import ConfigError, Redlock
from asynclock.stores import ZooKeeperStore


@pytest.mark.parametrize("url", ["unix://run/r.sock", "redis://h/²"])
def test_another_server_is_not_meant(url: str) -> None:
    """A socket without its first slash, a digit that is no number: an error, and no guess."""
    with pytest.raises(ConfigError):
        Redlock(url)


@pytest.mark.parametrize(
    "text", ["redis+cluster:/x://", "sqlite:////tmp/\0x", "sqlite:////tmp/0%00x", "mariadb://h/\ud800"]
)
def test_a_url_that_no_system_takes(text: str) -> None:
    """A ConfigError at once, and no error of Python."""
    with pytest.raises(ConfigError):
        Redlock(text)


@pytest.mark.parametrize("seconds", [1e7, 10**400, True], ids=["long", "huge", "flag"])
def test_a_session_timeout_that_no_server_takes(seconds: Any) -> None:
    """kazoo sends it as ms, in 32 bits."""
    with pytest.raises(ConfigError, match="session_timeout"):
        ZooKeeperStore("zookeeper://a", session_timeout=seconds)


def test_the_address_of_a_store_shows_no_password() -> None:
    """Nor does the log of kazoo, at DEBUG."""
    serialization = pytest.importorskip("kazoo.protocol.serialization")
    store = ZooKeeperStore("zookeeper://shop:kilowatt@a:2181")
    assert "kilowatt" not in repr(store.__dict__)
    log = logging.getLogger("asynclock.kazoo")
    secret = log.makeRecord("x", logging.DEBUG, "", 0, "%s", (serialization.Auth(0, "digest", "shop:kilowatt"),), None)
    other = log.makeRecord("x", logging.DEBUG, "", 0, "%s", (serialization.Exists("/a", None),), None)
    assert not log.filter(secret)
    assert log.filter(other)
