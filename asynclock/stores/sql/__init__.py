"""Locks in a table of PostgreSQL, MariaDB, MySQL or SQLite. `SQLStore` is the store (docs/stores/sql.md)."""

from asynclock.stores.sql.store import SQLStore

__all__ = ["SQLStore"]
