"""Rounds that nodes have answered."""

from __future__ import annotations

from asynclock.quorum.ballot import Ballot
from asynclock.rules.model import ACQUIRE, ID_LENGTH, Kind, Op, Queueing, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.stores.port import Refused, Slots, Vote

SENT = 1_000.0
"""When they were sent, if the test does not say."""

FREE = Refused(None, rank=0)
"""A node refuses, though nobody holds the name there. It keeps the ticket."""


def id_of(who: str, mode: str = "") -> str:
    """An id of a client that gets notices."""
    return f"{who:0>{ID_LENGTH}}|{mode}1|1|host|"


def held_by(who: str, left: float = 20.0, rank: int = 0, slots: tuple[int, ...] | None = None) -> Refused:
    """A node refuses because of this holder, for another `left` seconds, and keeps the ticket."""
    return Refused(left, id_of(who), rank, slots=None if slots is None else Slots(slots))


def voted(
    *votes: Vote,
    verb: Verb = ACQUIRE,
    kind: Kind = MUTEX,
    sent: float = SENT,
    lease: float = 30.0,
    number: int = 1,
    plain: bool = False,
) -> Ballot:
    """A round with these votes, one of each node; None: the node is silent. `number`: how often its ticket was sent; 0:
    it had none. `plain`: it was the server's own SET."""
    made = Ballot(
        Op(verb, kind, "name", id_of("me", kind.mode), lease, plain=plain, queueing=Queueing(number=number)),
        len(votes),
        sent,
        sent + 3.0,
    )
    for index, vote in enumerate(votes):
        if isinstance(vote, Exception):
            made.fail(index, vote, maybe=True)
        elif vote is not None:
            made.answer(index, vote)
    made.expire()
    return made
