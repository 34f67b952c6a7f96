"""Options misspelt, of the wrong type, or another's."""

from asynclock import ClientOptions, LockOptions, Redlock

redlock = Redlock("redis://a")

redlock("order:42", leese=30)  # E:
redlock("order:42", ttl=30)  # E:
redlock("order:42", lease="30")  # E:
redlock("order:42", lease=None)  # E:
redlock("order:42", renew="yes")  # E:
redlock("order:42", metadata=b"x")  # E:
redlock("order:42", min_hold=None)  # E:
redlock("order:42", prefix="x")  # E:
redlock("order:42", patience=1)  # E:
Redlock("redis://a", leese=30)  # E:
Redlock("redis://a", max_lease=None)  # E:
Redlock("redis://a", trust_restarts="no")  # E:
redlock.configure("redis://a", retry_count=3)  # E:

options: LockOptions = {"lease": "30"}  # E:
client: ClientOptions = {"prefix": b"x"}  # E:
