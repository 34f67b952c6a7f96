"""Redis, Valkey and what speaks their protocol. `store.py` is the entry: one server by url or by the user's client."""

from asynclock.stores.redis.store import SCHEMES, RedisStore

__all__ = ["SCHEMES", "RedisStore"]
