"""One statement that releases a mutex and serves its queue, on PostgreSQL: the row, the new holder, and its notice.

It does what `decide` does for a release by the only holder, where the first ticket of the queue is fresh and takes the
hold, or where nobody waits any more. All other states are left as they are, and the answer says so: then the op is
decided in two statements or in a transaction. So the rules of the queue are here for the most common case only, and the
agreement tests compare that case with `decide`.

The row is locked, read and written by the server, so nothing can change it meanwhile, and its clock is that of now. The
column `state` is read as JSON only where it has no escapes and no infinite times, which `jsonb` cannot keep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from asynclock.rules.model import ID_LENGTH, RELEASE, TAG_LENGTH, Notice, Serve
from asynclock.stores.sql.listening import channel
from asynclock.stores.sql.rows import LONGEST, VERSION

if TYPE_CHECKING:
    from asynclock.rules.model import Op

SERVE = "serve"
"""The group of these ops."""

NEEDED = "fence, keep_until"
"""The columns of the row that it needs besides those of each statement."""


class Served(NamedTuple):
    """The answer to an op whose row was found."""

    fence: int | None  # None: the state is not of the common case, and nothing was done
    id: str | None  # of the waiter that holds the name now; None: nobody waited
    number: int | None  # of its ticket
    granted: int | None  # its fence

    def notices(self, name: str) -> tuple[Notice, ...]:
        """Those that were sent for the name of a lock. The clients of this event loop receive them from here."""
        if self.fence is None or self.id is None or self.number is None or self.granted is None:
            return ()
        return (Notice(self.id[:ID_LENGTH], self.number, self.granted, name=name),)


def may_serve(op: Op) -> bool:
    """Whether it releases a mutex, and may find waiters. Without a fence it withdraws a ticket."""
    queueing = op.queueing
    plain = not (op.rest or op.tombstone or queueing.number or op.kind.shared or op.kind.parts)
    return op.verb is RELEASE and plain and queueing.contended and queueing.serve is Serve.GRANT and op.fence > 0


_HEAD = "p.kept->'queue'->0"

_PARSED = (
    "CASE WHEN position(chr(92) IN m.state) = 0 AND position('Infinity' IN m.state) = 0 AND m.keep_until IS NOT NULL "
    "THEN CAST(m.state AS jsonb) END AS kept"
)

_NEXT = f"""p.kept->'queue' AS queue, {_HEAD}->>1 AS id, CAST({_HEAD}->>2 AS bigint) AS ticket, {_HEAD}->4 AS until,
    greatest(p.fence, p.number) AS before, greatest(greatest(p.fence, p.number) + 1,
    CAST(trunc(p.now * 1000000) AS bigint)) + CAST({_HEAD}->>5 AS bigint) - 1 AS granted,
    EXISTS (SELECT 1 FROM jsonb_array_elements(p.kept->'undone') AS u(one) WHERE CAST(u.one->>1 AS float8) > p.now)
    AS undone"""  # noqa: S608
"""What becomes of the row. Without a waiter, `id` and what is about it are NULL. `undone`: it has tombstones."""

_SUITS = f"""p.fence > 0 AND p.kept->>'v' = '{VERSION}' AND NOT p.kept ?| '{{looks,name}}'
    AND jsonb_array_length(p.kept->'holds') = 1 AND p.kept->'holds'->0->>0 = p.owner
    AND CAST(p.kept->'holds'->0->>1 AS float8) > p.now
    AND ({_HEAD} IS NULL OR ({_HEAD}->>1 ~ '^[0-9a-fA-F]{{{ID_LENGTH}}}[|]'
        AND CAST({_HEAD}->>3 AS float8) > p.now AND CAST({_HEAD}->>4 AS float8) > p.now
        AND CAST({_HEAD}->>5 AS bigint) > 0
        AND NOT p.kept->'queue' @> jsonb_build_array(jsonb_build_array(p.owner))))"""
"""Whether it is the common case. The client of the first ticket receives notices."""

_SHOWN = f"""CASE WHEN split_part(substr(h.id, {ID_LENGTH + 2}), '|', 2) = '' THEN ''
    ELSE left(split_part(substr(h.id, {ID_LENGTH + 2}), '|', 3) || ' pid '
        || split_part(substr(h.id, {ID_LENGTH + 2}), '|', 2), {LONGEST}) END"""
"""As `node_info`."""

_FENCE_ENDS = """CASE WHEN h.id IS NULL AND h.fence >= h.number THEN coalesce(CAST(h.kept->>'fence_ends' AS float8), 0)
    ELSE h.now + h.memory END"""

_QUEUE_ENDS = "CASE WHEN jsonb_array_length(h.queue) > 1 THEN h.kept->'queue_ends' ELSE '0' END"

_STATE = f"""CASE WHEN h.id IS NOT NULL OR h.undone THEN CAST(h.kept || jsonb_build_object(
    'holds', CASE WHEN h.id IS NULL THEN '[]' ELSE jsonb_build_array(jsonb_build_array(h.id, h.until)) END,
    'fence', coalesce(h.granted, h.before), 'fence_ends', {_FENCE_ENDS},
    'queue', coalesce(h.queue - 0, '[]'), 'queue_ends', {_QUEUE_ENDS}, 'marked', h.id IS NOT NULL) AS text) END"""

_KEEP_UNTIL = f"""greatest({_FENCE_ENDS}, CAST(h.until AS float8), CAST({_QUEUE_ENDS} AS float8),
    CASE WHEN h.undone THEN h.keep_until END)"""


def serving(table: str) -> str:
    """What follows `mine`, which has locked the rows, and has the values of the ops beside them."""
    fields = f"'id', left(h.id, {ID_LENGTH}), 'number', h.ticket, 'fence', h.granted, 'name', h.info"
    return f"""parsed AS MATERIALIZED (SELECT m.*, {_PARSED} FROM mine AS m WHERE m.at IS NOT NULL),
        heads AS MATERIALIZED (SELECT p.*, {_NEXT}, ({_SUITS}) IS TRUE AS suits FROM parsed AS p),
        served AS (UPDATE {table} AS l SET owner = coalesce(h.id, ''), node_info = coalesce({_SHOWN}, ''),
            count = CASE WHEN h.id IS NULL THEN 0 ELSE 1 END, fence = coalesce(h.granted, h.before),
            expires_at = coalesce(CAST(h.until AS float8), 0), keep_until = {_KEEP_UNTIL}, update_time = h.now,
            state = {_STATE}
            FROM heads AS h WHERE l.ctid = h.at AND l.tableoid = h.part AND h.suits RETURNING l.resource_name)
        SELECT h.name, CASE WHEN h.suits THEN h.before END, h.id, h.ticket, h.granted,
            CASE WHEN h.suits AND h.id IS NOT NULL
            AND array_position(CAST(:here AS text[]), left(h.id, {TAG_LENGTH})) IS NULL
            THEN pg_notify('{channel("")}' || left(h.id, {TAG_LENGTH}), CAST(json_build_object({fields}) AS text)) END
        FROM heads AS h LEFT JOIN served AS s ON s.resource_name = h.name
        WHERE s.resource_name IS NOT NULL OR NOT h.suits"""  # noqa: S608
