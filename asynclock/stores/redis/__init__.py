"""Redis, Valkey and servers with their protocol. The entry is `store.py`: one server by url or by the user's client."""

from asynclock.stores.redis.store import RedisStore

__all__ = ["RedisStore"]
