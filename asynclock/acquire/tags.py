"""The readable part of an id: who holds a name, as the servers know it."""

from __future__ import annotations

from typing import NamedTuple

from asynclock._untrusted import number_of
from asynclock.info import Holder
from asynclock.rules.model import DONE, ID_LENGTH, RESTING, RESTING_MARK, is_made_by_asynclock

_HOST = 255
"""Characters of a host, at most."""

_PID = 10
"""Digits of a process number, at most."""


class Tag(NamedTuple):
    """The readable part of an id. It leaves out the random part, which is a secret."""

    host: str = ""
    pid: int = 0
    since: float = 0.0
    metadata: str = ""


def tag_of(id: str) -> Tag:
    """The readable part of an id; an empty one for an id of another program. Pure."""
    if id == RESTING or (id.startswith(RESTING_MARK) and id[ID_LENGTH : ID_LENGTH + 1] in ("|", "!")):
        return Tag(metadata="(resting)")
    if id == DONE:
        return Tag(metadata="(done)")
    if not is_made_by_asynclock(id):
        return Tag()
    first, second, host, metadata = [*id[ID_LENGTH + 1 :].split("|", 3), "", "", "", ""][:4]
    seed = number_of(first.rpartition(".")[2])  # the part before the seed belongs to the kind (Kind.mode)
    pid = number_of(second, _PID)
    if seed is None or pid is None:
        return Tag()
    return Tag(host[:_HOST], pid, seed / 1_000_000, metadata)


def holder_of_id(name: str, id: str, left: float | None) -> Holder:
    """The holder with that id. `left`: seconds until it ends by itself; None: never. Pure."""
    tag = tag_of(id)
    return Holder(name, tag.host, tag.pid, tag.since, left, tag.metadata)
