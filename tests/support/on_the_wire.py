"""The reply and the notices of `decide`, as the scripts write them: in ms, bytes, and lists by position."""

from __future__ import annotations

from typing import Any

from asynclock.rules.model import Notice, Reply, Verdict


def reply_on_wire(reply: Reply, now: float, part: int | None = None) -> list[Any]:
    """[1, F], or [1, F, 1] where others wait; [0, pttl in ms, holder, rank, order], pttl being -1 without expiry and -2
    where nobody holds it, and behind that the slots in use, of a kind that has some; or [-1]. `part` is the index of
    the name that refuses, of several."""
    match reply.verdict:
        case Verdict.YES:
            return [1, reply.fence, 1] if reply.marked else [1, reply.fence]
        case Verdict.UNDONE:
            return [-1]
    slots = "" if reply.taken is None else " ".join(map(str, reply.taken))
    more = [] if reply.taken is None else [(slots if part is None else f"{part + 1}:{slots}").encode()]
    if reply.holder is None:
        return [0, -2, b"", reply.rank, reply.order, *more]
    ends = reply.holder.ends
    left = -1 if ends is None else round((ends - now) * 1000)
    return [0, left, reply.holder.id.encode(), reply.rank, reply.order, *more]


def notice_on_wire(notice: Notice, prefix: str = "") -> bytes:
    """The random part of the id, number, fence, ms until the name is free (-1: it is; -2: the hold was broken; -3: it
    is, and the rest of the batch is to be served), key."""
    left = -2 if notice.broken else -3 if notice.continue_batch else round(notice.left * 1000) if notice.left else -1
    return f"{notice.id} {notice.number} {notice.fence} {left} {prefix}{notice.name}".encode()
