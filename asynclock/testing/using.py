"""use: the clients of the program under test get the stores of the test."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from asynclock._errors import ConfigError
from asynclock.runtime.sessions import Substitute
from asynclock.stores import stores_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asynclock.stores.port import Store


@contextmanager
def use(*stores: Store) -> Iterator[None]:
    """Until the end of the block, every client that is made or first used has these nodes, whatever nodes it was given;
    and in any case those that were made without nodes: the ready-made `redlock`, also that of `asynclock.blocking`.
    Several stores are a quorum.

    It counts for all threads and event loops. Blocks may be nested: the innermost counts. At the end the clients have
    their own nodes again, and what they used in the block is closed: leases that are still held are lost ("closed").
    Raises ConfigError.
    """
    if not stores:
        raise ConfigError("name the stores to use, such as use(FakeStore())")
    begun = Substitute(stores_for(stores))
    begun.begin()
    try:
        yield
    finally:
        begun.end()
