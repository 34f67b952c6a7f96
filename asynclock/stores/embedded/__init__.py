"""A real server on this machine, without installing one: `embedded:`."""

from asynclock.stores.embedded.store import EmbeddedStore

__all__ = ["EmbeddedStore"]
