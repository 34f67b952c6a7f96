"""The readable part of an id: who holds a name, as the servers know it."""

from __future__ import annotations

from typing import NamedTuple

from asynclock.info import Holder
from asynclock.rules.model import DONE, ID_LENGTH, RESTING, RESTING_MARK, is_made_by_asynclock


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
    seed, pid, host, metadata = [*id[ID_LENGTH + 1 :].split("|", 3), "", "", "", ""][:4]
    seed = seed.rpartition(".")[2]  # the part before the seed belongs to the kind (Kind.mode)
    if not is_made_by_asynclock(id) or not seed.isdigit() or not pid.isdigit():
        return Tag()
    return Tag(host, int(pid), int(seed) / 1_000_000, metadata)


def holder_of_id(name: str, id: str, left: float | None) -> Holder:
    """The holder with that id. `left`: seconds until it ends by itself; None: never. Pure."""
    tag = tag_of(id)
    return Holder(name, tag.host, tag.pid, tag.since, left, tag.metadata)
