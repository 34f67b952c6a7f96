"""Locks in ZooKeeper, by the classic recipe of sequential ephemeral nodes (docs/stores/zookeeper.md)."""

from __future__ import annotations

from asynclock.stores.zookeeper.store import ZooKeeperStore

__all__ = ["ZooKeeperStore"]
