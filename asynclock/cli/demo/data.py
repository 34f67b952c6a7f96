"""What the workers write under the lock, kept twice: in a key that is fenced, and in one that is not.

A holder that was frozen beyond its lease writes as every holder does. The plain key takes its write, and the newer one
is lost. `asynclock.fencing` refuses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from redis.asyncio import Redis

from asynclock.fencing import StaleToken, fenced_set

if TYPE_CHECKING:
    from asynclock import Lease

_PLAIN, _FENCED = "demo:plain", "demo:fenced"


class Data:
    """The two keys, on one server. Their value is the token of the hold that wrote it."""

    def __init__(self, url: str) -> None:
        self._redis: Redis = Redis.from_url(url, decode_responses=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._redis.aclose()

    async def write(self, lease: Lease) -> dict[str, Any]:
        """Write both keys without asking the lease whether it is held. Return the token that the plain key had before
        (0: none), whether the fenced key refused the write, and the token that it has now."""
        before = await self._redis.set(_PLAIN, str(lease.fence), get=True)
        refused = False
        try:
            await fenced_set(self._redis, _FENCED, str(lease.fence), lease)
        except StaleToken:
            refused = True
        return {"before": int(before or 0), "refused": refused, "kept": int(await self._redis.get(_FENCED) or 0)}
