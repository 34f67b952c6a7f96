"""A real server on this machine, without installing one: `embedded:`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynclock.stores.embedded.store import EmbeddedStore

__all__ = ["EmbeddedStore"]


def __getattr__(name: str) -> Any:
    """Import the store at its first use: it needs `fcntl`, which Windows has not, and the command line does not."""
    if name != "EmbeddedStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from asynclock.stores.embedded.store import EmbeddedStore

    return EmbeddedStore
