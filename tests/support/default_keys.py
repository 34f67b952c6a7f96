"""Where a client with the default prefix keeps a name."""

from __future__ import annotations

from asynclock.stores.redis.keys import Keys, keys

PREFIX = "lock:"
"""The default. It is written here once more: clients with another prefix exclude nobody of today's."""


def key_of(name: str) -> str:
    """The key of the hold."""
    return PREFIX + name


def keys_of(name: str) -> Keys:
    """All keys of a name."""
    return keys(PREFIX, name)
