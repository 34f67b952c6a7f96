"""A row of the table, and the state that it stands for. Pure.

A row is *plain* if its columns say all: at most one hold, the fencing counter, and nothing else. Then its column
`state` is NULL, and one statement can grant or release the name (`single.py`). Any other state is JSON in the column
`state`; the other columns show operators what it says.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from asynclock._errors import brief
from asynclock._options import RESERVED
from asynclock.rules.model import ID_LENGTH, TAG_LENGTH, Entry, State, Ticket, is_made_by_asynclock
from asynclock.stores.port import Unfit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

VERSION = 1
"""Of the JSON. A reader refuses a newer one."""

FLOOR = f"{RESERVED}floor"
"""The row whose fence is at least that of each row that was removed."""

CLEANER = f"{RESERVED}cleaner"
"""The row that says which client removes rows now, and how far it came."""

CLOCK = f"{RESERVED}clock"
"""The row with the clock of a SQLite file."""

NOTICES = f"{RESERVED}notice:"
"""The begin of the names of rows that are notices for a client without push messages."""

_TICKET = 7
"""The fields of a ticket that a row keeps. A waiter that was notified, and not granted its hold (of several names, or
over several nodes), may be notified again."""

_LARGEST = 2**63 - 1
"""Of a BIGINT."""

LONGEST = 255
"""Characters of a resource_name."""

_HEAD = 150
_UNFIT = re.compile(r"[\x00\ud800-\udfff]")
_HASHED = re.compile(r"~[0-9a-f]{64}\Z")


class Damaged(Unfit):
    """A row that another program has written or changed."""


COLUMNS = "resource_name, owner, node_info, count, fence, expires_at, keep_until, state"
"""Those of `Row`, in the same order."""


class Row(NamedTuple):
    """The columns of a row, without those that are for operators only. Times are Unix seconds."""

    resource_name: str
    owner: str = ""  # the id of the first hold
    node_info: str = ""  # the host and the process of that hold
    holds: int = 0  # their number: the column `count`
    fence: int = 0  # F of docs/safety.md
    expires_at: float | None = 0.0  # when the last hold ends; None: never
    keep_until: float | None = 0.0  # plain: when F may be forgotten; else when all of the state has ended; None: never
    state: str | None = None  # None: the other columns say all


def resource_name(key: str) -> str:
    """The resource_name of a key: the key itself, or its begin and its hash if a database could not keep it."""
    if fits(key):
        return key
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{_UNFIT.sub('?', key)[:_HEAD]}~{digest}"


def fits(key: str) -> bool:
    """Whether every database keeps the text as it is: PostgreSQL has no NUL, MySQL ignores spaces at the end."""
    return len(key) <= LONGEST and not key.endswith(" ") and not _UNFIT.search(key) and not _HASHED.search(key)


def common_begin(begin: str) -> str:
    """The longest text with which the resource_name of each key begins that begins with `begin`."""
    unfit = _UNFIT.search(begin)
    return begin[: min(_HEAD, unfit.start() if unfit else _HEAD)]


def row_of(key: str, state: State, looks: Iterable[str] = ()) -> Row:
    """The row of a state. `looks`: the tags of its clients that get no push messages."""
    name, holds, tags = resource_name(key), state.holds, sorted(looks)
    owner = holds[0].id if holds else ""
    ends = None if any(each.ends is None for each in holds) else max((each.ends or 0.0 for each in holds), default=0.0)
    shown = Row(name, _UNFIT.sub("?", owner), node_info(owner), len(holds), state.fence, ends)
    complete = name == key and shown.owner == owner and len(holds) <= 1 and ends is not None
    complete = complete and not (state.undone or state.queue or state.marked or tags) and state.fence_ends < math.inf
    if complete:
        return shown._replace(keep_until=state.fence_ends)
    entries = (*holds, *state.undone)
    last = max(
        [state.fence_ends, state.queue_ends, *(math.inf if each.ends is None else each.ends for each in entries)]
    )
    fields: dict[str, Any] = {
        "v": VERSION,
        "name": None if name == key else key,
        "holds": holds,
        "fence": state.fence,
        "fence_ends": state.fence_ends,
        "undone": state.undone,
        "queue": [each[:_TICKET] for each in state.queue],
        "queue_ends": state.queue_ends,
        "marked": state.marked,
        "looks": tags,
    }
    text = json.dumps({name: value for name, value in fields.items() if value}, separators=(",", ":"))
    return shown._replace(keep_until=last if last < math.inf else None, state=text)


def state_of(row: Row) -> State:
    """The state of a row. Raises Unfit for a row of a newer version, or of another program."""
    if row.state is None:
        holds = (Entry(row.owner, row.expires_at),) if row.holds else ()
        return State(holds, row.fence, row.keep_until or 0.0)
    fields = _fields(row)
    with _checked(row):
        return State(
            tuple(map(_entry, fields.get("holds", ()))),
            _number(fields.get("fence", 0)),
            _time(fields.get("fence_ends", 0.0)),
            tuple(map(_entry, fields.get("undone", ()))),
            tuple(map(_ticket, fields.get("queue", ()))),
            _time(fields.get("queue_ends", 0.0)),
            bool(fields.get("marked", False)),
        )


def looks_of(row: Row) -> frozenset[str]:
    """The tags of its clients that get no push messages. Raises Unfit."""
    if row.state is None:
        return frozenset()
    fields = _fields(row)
    with _checked(row):
        return frozenset(map(_text, fields.get("looks", ())))


def key_of(row: Row) -> str | None:
    """The key of a row; None: another program wrote it. Raises Unfit for a row of a newer version."""
    try:
        state_of(row)
    except Damaged:
        return None
    full = _fields(row).get("name") if row.state is not None else None
    return row.resource_name if full is None else str(full)


def _fields(row: Row) -> dict[str, Any]:
    with _checked(row):
        fields = json.loads(row.state or "{}")
        if not isinstance(fields, dict):
            raise TypeError
        version = _number(fields.get("v", 0))
    if version > VERSION:
        raise Unfit(f"the row {brief(row.resource_name)} was written by a newer asynclock: update this one")
    return fields


@contextmanager
def _checked(row: Row) -> Iterator[None]:
    """Raise Damaged where the column `state` is not what `row_of` writes."""
    try:
        yield
    except (RecursionError, TypeError, ValueError):
        raise Damaged(
            f"the row {brief(row.resource_name)} was written by another program: its column state is no state of a "
            "lock; delete the row if nothing else needs it"
        ) from None


def _entry(value: Any) -> Entry:
    id_, ends = value
    return Entry(_text(id_), None if ends is None else _time(ends))


def _ticket(value: Any) -> Ticket:
    order, id_, number, fresh, ends, span, *rest = value
    (tasks,) = rest or (1,)
    return Ticket(_number(order), _text(id_), _number(number), _time(fresh), _time(ends), _number(span), _number(tasks))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _number(value: Any) -> int:
    if not isinstance(value, int) or abs(value) > _LARGEST:
        raise TypeError
    return value


def _time(value: Any) -> float:
    """Seconds; infinity: for ever."""
    if isinstance(value, float) and not math.isnan(value):
        return value
    return float(_number(value))


def node_info(owner: str) -> str:
    """The host and the process in an id, for operators."""
    if not is_made_by_asynclock(owner) or len(owner) <= ID_LENGTH:
        return ""
    return _node_info(owner[ID_LENGTH + 1 :])


@lru_cache(maxsize=64)
def _node_info(text: str) -> str:
    """The same, of the rest of an id: a program has a few of them."""
    _, _, rest = text.partition("|")
    pid, _, rest = rest.partition("|")
    host = rest.partition("|")[0]
    return _UNFIT.sub("?", f"{host} pid {pid}")[:LONGEST] if pid else ""


def covered(state: State, now: float, floor: int) -> State:
    """A state to decide on, in which the counter is never forgotten. After its end it stays what it was; a name without
    one has `floor`, which is at least that of each row that was removed. `uncovered` takes this back."""
    if state.fence and state.fence_ends <= now:
        return replace(state, fence_ends=math.inf)
    if not state.fence and floor and not state.at(now).holds:
        return replace(state, fence=floor, fence_ends=math.inf)
    return state


def uncovered(state: State, before: State) -> State:
    """The state to store. `before`: the state as it was read. A counter that the op did not write stays as it was."""
    if state.fence_ends == math.inf and before.fence_ends < math.inf:
        return replace(state, fence=before.fence, fence_ends=before.fence_ends)
    return state


def tags_in(state: State) -> set[str]:
    """The tags of the clients that wait there, or hold it."""
    return {each.id[:TAG_LENGTH] for each in state.holds} | {each.id[:TAG_LENGTH] for each in state.queue}


def ordered(keys: Sequence[str]) -> list[str]:
    """The resource_names in the order in which all clients lock their rows: by their bytes."""
    return sorted((resource_name(key) for key in keys), key=lambda name: name.encode())
