"""Why an acquire got no lease, and why a lease was lost: the facts, the errors that report them, and what an id says of
its holder. Pure."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from asynclock._errors import LockError, LockLost, LockTimeout, brief
from asynclock._untrusted import number_of
from asynclock.info import Holder
from asynclock.quorum.denials import most_named
from asynclock.rules.model import DONE, ID_LENGTH, RESTING, RESTING_MARK, is_made_by_asynclock
from asynclock.stores.port import Refused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asynclock._errors import Reason
    from asynclock._options import LockSettings
    from asynclock.quorum.ballot import Ballot

BLOCKED = 1 / 3
"""If the loop was late by this share of the lease or more, the error names the blocked loop as the cause. A failed
renewal alone does not lose a lease: a loop that is on time repeats it several times before the end."""


# -- the holder of a name ----------------------------------------------------------------------------------------------


_HOST = 255
"""Characters of a host, at most."""

_PID = 10
"""Digits of a process number, at most."""


class HolderNote(NamedTuple):
    """The readable part of an id. It leaves out the random part, which is a secret."""

    host: str = ""
    pid: int = 0
    since: float = 0.0
    metadata: str = ""


def note_of(id: str) -> HolderNote:
    """The readable part of an id; an empty one for an id of another program. Pure."""
    if id == RESTING or (id.startswith(RESTING_MARK) and id[ID_LENGTH : ID_LENGTH + 1] in ("|", "!")):
        return HolderNote(metadata="(resting)")
    if id == DONE:
        return HolderNote(metadata="(done)")
    if not is_made_by_asynclock(id):
        return HolderNote()
    first, second, host, metadata = [*id[ID_LENGTH + 1 :].split("|", 3), "", "", "", ""][:4]
    seed = number_of(first.rpartition(".")[2])  # the part before the seed belongs to the kind (Kind.mode)
    pid = number_of(second, _PID)
    if seed is None or pid is None:
        return HolderNote()
    return HolderNote(host[:_HOST], pid, seed / 1_000_000, metadata)


def holder_of_id(name: str, id: str, left: float | None) -> Holder:
    """The holder with that id. `left`: seconds until it ends by itself; None: never. Pure."""
    note = note_of(id)
    return Holder(name, note.host, note.pid, note.since, left, note.metadata)


# -- no lease --------------------------------------------------------------------------------------------------------


class NoLease(NamedTuple):
    """An acquire ended without a lease."""

    holder: str = ""  # the id of the hold in the way; "": not known
    left: float | None = None  # seconds until that hold ends by itself; math.inf: never
    age: float = 0.0  # seconds since the nodes said so
    waited: float = 0.0  # seconds
    free: bool = False  # nobody held the name at a majority of the nodes, but other waiters come first


def lock_timeout_error(
    name: str, refusal: NoLease, here: Holder | None, now: float, *, timeout: float | None, several: bool
) -> LockTimeout:
    """The error. `here`: the holder in this process, if there is one; `now`: Unix time; `timeout`: the time that the
    caller gave, in seconds; `several`: the lock has several names."""
    holder = here
    if holder is None and refusal.holder:
        holder = holder_of_id(name, refusal.holder, None if refusal.left in (math.inf, None) else refusal.left)
    which = f"one or another of {brief(name)}" if several else brief(name)
    when = f"for the whole timeout ({timeout:g} s)" if timeout else "at the only try (timeout=0)"
    if holder is not None and holder.metadata == "(done)" and not holder.host:
        text = f"{which} was taken {when}: a run of once() has returned"
    elif holder is not None and holder.metadata == "(resting)" and not holder.host:
        text = f"{which} was taken {when}: it rests after a release (min_hold)"
    elif holder is None and refusal.free:
        text = f"{which} was free, but other owners had asked for it before, and had not entered {when}"
    else:
        text = f"{which} was held by another owner {when}"
    if holder is not None:
        asked = f" (the nodes were asked {refusal.age:.3g} s ago)" if here is None and refusal.age >= 1 else ""
        text += f"; {describe_holder(holder, now, here is not None)}{asked}"
    return LockTimeout(text, name=name, holder=holder, waited=refusal.waited)


def describe_holder(holder: Holder, now: float, here: bool = False) -> str:
    """Who a holder is, in a sentence. `now`: Unix time; `here`: it is in this process."""
    if holder.host:
        notes = ["this process"] * here + [repr(holder.metadata[:80])] * bool(holder.metadata)
        note = f" ({', '.join(notes)})" if notes else ""
        return f"the holder is {holder.host}, pid {holder.pid}{note}, for {max(0.0, now - holder.since):.3g} s"
    ends = "" if holder.remaining is None else f" in {holder.remaining:.3g} s"
    if holder.metadata in ("(done)", "(resting)"):
        return f"it is free{ends}"
    if holder.remaining is None:
        return (
            "the holder is a key of another program, without an expiry: if nothing uses it, delete it by hand, or with "
            "break_lock(name, foreign=True)"
        )
    return f"the holder is a key of another program, which expires{ends}"


# -- a lost lease ----------------------------------------------------------------------------------------------------


class Cause(NamedTuple):
    """Why a hold was lost. Times are seconds."""

    loss: Reason
    settings: LockSettings
    at: float  # when it was lost, as Unix time
    unrenewed: float  # since the send of the last renewal that a majority granted
    late: float  # how late the loop was (`LoopLag.late`)
    broken_by: str | None  # who broke it, as a server said ("": it does not know); None: no server said that it was
    errors: Mapping[int, Exception]  # node -> why it did not renew
    denials: Mapping[int, Refused]  # node -> its refusal

    def after(self, release: Ballot) -> Cause:
        """The same with what the nodes answered to the release."""
        denials = {index: vote for index, vote in enumerate(release.votes) if isinstance(vote, Refused)}
        return self._replace(errors=dict(release.errors()), denials=denials)


def lock_lost_error(name: str, cause: Cause, labels: Sequence[str]) -> LockLost:
    """The error. `labels`: the addresses of the nodes."""
    errors: dict[str, Exception] = {}
    for index, label in enumerate(labels):
        if index in cause.errors:
            errors[label] = cause.errors[index]
        elif index in cause.denials:
            errors[label] = LockError(f"{label}: {_refusal(cause.denials[index])}", name=name)
    return LockLost(name, cause.loss, why=_why(cause, errors), errors=errors)


def _why(cause: Cause, errors: Mapping[str, Exception]) -> str:
    match cause.loss:
        case "expired":
            return _why_expired(cause, errors)
        case "taken":
            named = most_named(cause.denials.values())
            after = "" if cause.broken_by is None else f", after {_breaker(cause.broken_by)} broke it (break_lock)"
            return f"another owner holds the name now: {_owner(named.holder)}{after}" if named is not None else ""
        case "broken" if cause.broken_by is not None:
            return f"{_breaker(cause.broken_by)} broke it (break_lock)"
        case "broken":
            return (
                "its key is gone from a majority of the nodes: it was deleted by hand, flushed or evicted, or the "
                "servers restarted without it"
            )
        case "max_hold" if cause.settings.max_hold is not None:
            return f"it was held for max_hold ({cause.settings.max_hold:g} s)"
    return ""


def _why_expired(cause: Cause, errors: Mapping[str, Exception]) -> str:
    said = "; ".join(str(error) or repr(error) for error in errors.values())
    since = datetime.fromtimestamp(cause.at - cause.unrenewed, UTC).strftime("%H:%M:%S")
    if cause.late >= cause.settings.lease * BLOCKED:
        text = (
            f"its lease expired: the event loop did not run for {cause.late:.3g} s or longer (blocked, or the process "
            "was stopped), so it sent no renewal"
        )
        return f"{text}; before that: {said}" if said else text
    if not cause.settings.renew and not said:
        return f"its lease expired after {cause.unrenewed:.3g} s: with renew=False, call extend() before it ends"
    text = f"its lease expired: no majority of the nodes renewed it for {cause.unrenewed:.3g} s (since {since} UTC)"
    return f"{text}: {said}" if said else text


def _refusal(refused: Refused) -> str:
    return "the key is gone" if refused.left is None else f"the name is held by {_owner(refused.holder)}"


def _breaker(by: str) -> str:
    """Who broke it: `Session.introduction` of that client."""
    pid, host, note = [*by.split("|", 2), "", ""][:3]
    return f"{host}, pid {pid}{f' ({note!r})' if note else ''}" if host else "an operator"


def _owner(id: str) -> str:
    if id == DONE:
        return "a run of once() that has returned"
    note = note_of(id)
    return f"{note.host}, pid {note.pid}" if note.host else "a key of another program"
