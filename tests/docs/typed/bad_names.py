"""Values that are no name, and values that are no node."""

import redis

from asynclock import Redlock

redlock = Redlock("redis://a")

redlock(b"order:42")  # E:
redlock(42)  # E:
redlock(None)  # E:
redlock()  # E:
redlock(name="order:42")  # E:
redlock("order:42", 30)  # E:
Redlock(b"redis://a")  # E:
Redlock(["redis://a", "redis://b"])  # E:
Redlock(redis.Redis())  # E:
Redlock(6379)  # E:
redlock.configure(["redis://a"])  # E:
