"""Fencing where the data is: a write that a later holder of the lock has overtaken is refused.

    async with redlock("order:42") as lease:
        await fenced(session, update(Order).where(Order.id == 42).values(paid=True), Order.fence)

The data keeps the greatest fencing token that has written it: a row in a column, a key of Redis in a key beside it.
Each call is one atomic step of the database or of the server, which refuses only smaller tokens. So several writes
under one lease pass, and a write by a holder that was frozen beyond its lease does not. The lease is not asked whether
it is held. Without one, the innermost block that encloses the call gives the token, also if its lease has ended: that
is the write to refuse.

Source: https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from asynclock._errors import ConfigError, StaleToken
from asynclock.locks.lease import Lease, enclosing_lease

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django.db.models import Q, QuerySet
    from redis.asyncio import Redis, RedisCluster
    from sqlalchemy import ColumnElement, Connection, CursorResult, Select, Update
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import InstrumentedAttribute, Session

    _FenceColumn: TypeAlias = ColumnElement[int] | InstrumentedAttribute[int] | InstrumentedAttribute[int | None]

__all__ = ["StaleToken", "afenced_update", "fenced", "fenced_set", "fenced_sync", "fenced_update"]


class _HasToken(Protocol):
    """A Lease, or one of `asynclock.blocking`."""

    @property
    def name(self) -> str: ...
    @property
    def fence(self) -> int: ...


async def fenced(
    session: AsyncSession | AsyncConnection,
    statement: Update,
    column: _FenceColumn,
    lease: Lease | None = None,
    /,
) -> CursorResult[Any]:
    """Execute an UPDATE that sets `column` to the token, in the rows where the column is NULL or not greater.

    `lease`: default is that of the block that encloses the call, held or not. Raises StaleToken if it changed no row,
    or the driver cannot tell (-1), and a row of its WHERE clause has a greater token. No row at all: the result has
    rowcount 0. Raises ConfigError outside of a block without a lease, for an UPDATE with RETURNING or of another table
    than that of the column, and for a column that is too small for a token; Unsupported with fencing=False, and the
    errors of SQLAlchemy. The caller commits.
    """
    own: Any = session
    if not hasattr(own, "run_sync"):  # an async_scoped_session: it returns its session
        own = own()
    result: CursorResult[Any] = await own.run_sync(fenced_sync, statement, column, _lease(lease))
    return result


def fenced_sync(
    session: Session | Connection,
    statement: Update,
    column: _FenceColumn,
    lease: _HasToken | None = None,
    /,
) -> CursorResult[Any]:
    """As `fenced`, for a Session or a Connection that is not async."""
    from sqlalchemy import Connection as _Connection

    held = _lease(lease)
    update = _update(statement, column, held.fence)
    if isinstance(session, _Connection):
        _check_size(session, column)
    result: Any = session.execute(update)
    _check_size(getattr(result, "connection", None), column)
    if result.rowcount <= 0:  # -1: SQLite's driver does not count the rows of an UPDATE that begins with WITH
        # Where the UPDATE ran: a session may send a SELECT to a replica, which does not have the token yet. The result
        # of a session with shards has no connection; it sends both statements to the same shards.
        asked = getattr(result, "connection", session)
        if asked.execute(_greater(statement, column, held.fence)).first():
            _forget(session, statement, column, held.fence)
            raise _stale(held, column)
    return result  # type: ignore[no-any-return] # of an UPDATE it is a CursorResult


def fenced_update(queryset: QuerySet[Any], field: str, lease: _HasToken | None = None, /, **values: Any) -> int:
    """`queryset.update(**values)` of Django, for the rows whose `field` is NULL or not greater than the token; sets it
    to the token. Returns the number of rows. Raises as `fenced`; ConfigError also if the field or a value is in the
    table of a parent model, or the field is too small for a token."""
    from django.db import router, transaction

    held = _lease(lease)
    values[field] = held.fence
    _in_one_table(queryset, values)
    # Both statements go to one database: a router may send a read to a replica, which does not have the token yet.
    queryset = queryset.using(queryset._db or router.db_for_write(queryset.model, **queryset._hints))  # noqa: SLF001
    _check_range(queryset, field, held.fence)
    if queryset.query.count_active_tables() > 1:
        queryset = _of_one_table(queryset)
    rows: int = queryset.filter(_not_greater(field, held.fence)).update(**values)
    if rows:
        return rows
    # PostgreSQL refuses FOR UPDATE with an outer join (an order by a relation), and with DISTINCT.
    later = queryset.filter(**{f"{field}__gt": held.fence}).order_by("pk")
    later.query.distinct = False
    if not transaction.get_connection(queryset.db).get_autocommit():
        later = later.select_for_update()  # else a snapshot of the transaction may show an older token
    if later.values_list("pk").first() is not None:
        raise _stale(held, field)
    return 0


async def afenced_update(queryset: QuerySet[Any], field: str, lease: Lease | None = None, /, **values: Any) -> int:
    """As `fenced_update`, in an async view."""
    from asgiref.sync import sync_to_async

    return await sync_to_async(fenced_update)(queryset, field, _lease(lease), **values)


async def fenced_set(client: Redis | RedisCluster, key: str, value: bytes | str, lease: Lease | None = None, /) -> None:
    """SET the key, unless it was set under a greater token. The token is kept in a key beside it, `{KEY}:fence` with
    the braces, in the same slot of a cluster and without an expiry. (No such key exists for a KEY with a closing brace
    and without a hash tag: a cluster refuses that one.) A pipeline is a ConfigError. Raises StaleToken, ConfigError,
    Unsupported, and the errors of redis-py."""
    held = _lease(lease)
    if any(each.__name__ in {"Pipeline", "ClusterPipeline"} for each in type(client).__mro__):
        raise ConfigError(
            "a pipeline does not tell before its end whether the token is stale: give fenced_set its client"
        )
    if await client.eval(_SET, 2, key, _beside(key), value, str(held.fence)):
        raise _stale(held, key)


_TAGGED = re.compile(r"[^{]*\{[^}]+\}")
"""A key with a hash tag: the same tag in the other key puts it into the same slot."""


def _beside(key: str) -> str:
    """The key of its token."""
    if not _TAGGED.match(key):
        # `{x}{}:fence` is that of the key `{x}`. No key is in the slot of the key `x}{`, which a cluster refuses.
        return f"{key}:fence" if key.endswith("}{") else f"{{{key}}}:fence"
    # `{x}:fence` is that of the key `x`. The empty tag is none: the slot is that of the first one.
    return f"{key}{{}}:fence" if key.startswith("{") and key.endswith("}") else f"{key}:fence"


# Tokens are compared as text, by length and then by digits: a number of Lua is exact only up to 2^53.
_SET = """
local seen, token = redis.call('GET', KEYS[2]), ARGV[2]
if seen and (#seen > #token or (#seen == #token and seen > token)) then return 1 end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], token)
return 0
"""


def _lease(lease: _HasToken | None) -> _HasToken:
    found: _HasToken | None = lease or enclosing_lease()
    if found is None:
        raise ConfigError(
            "there is no lease whose token could be compared: call this inside the block of a lock, or give it "
            "the lease"
        )
    return found


def _update(statement: Update, column: Any, token: int) -> Update:
    if statement.returning_column_descriptions:  # its result has no rowcount in a Session, and 0 in SQLite's driver
        raise ConfigError(
            "an UPDATE with RETURNING does not always tell how many rows it changed: leave RETURNING out, and read the "
            "row in the same transaction"
        )
    table = getattr(column, "table", None)  # None: a column that only has a name
    if table is not None and table != statement.table:
        # MySQL and MariaDB would compare the token in any row of that table, and not in that of the row.
        raise ConfigError(
            f"{column} is in the table {table}, and the UPDATE is of {statement.table}: no single statement compares "
            f"the token of a row and writes it. Keep the token and the values in one table, and update that one"
        )
    if "synchronize_session" not in statement.get_execution_options():
        # The default of a session compares the token that an object was loaded with: the object would get values that
        # the database has refused. On a Connection the option does nothing.
        statement = statement.execution_options(synchronize_session="fetch")
    return statement.where(column.is_(None) | (column <= token)).values({column: token})


def _check_size(connection: Connection | None, column: Any) -> None:
    """MySQL and MariaDB with a sql_mode that is not strict store the greatest number that fits in place of a token that
    does not, so all tokens would be equal. Other databases refuse it, and an INTEGER of SQLite has 64 bits. A session
    may choose the database for each statement, so the dialect is known after the UPDATE only."""
    from sqlalchemy import BigInteger, Integer

    if connection is None or connection.dialect.name not in {"mysql", "mariadb"}:
        return
    kind = column.type.dialect_impl(connection.dialect)
    kind = getattr(kind, "impl_instance", kind)  # of a TypeDecorator
    if isinstance(kind, Integer) and not isinstance(kind, BigInteger):
        raise ConfigError(f"{column} is {kind!r}, and a token needs 64 bits: make it a BigInteger, and roll back")


def _forget(session: Session | Connection, statement: Update, column: Any, token: int) -> None:
    """Expire the objects that have the refused token. MySQL and MariaDB have no UPDATE with RETURNING: the session asks
    before the UPDATE which rows it will change, and a snapshot shows it an older token."""
    from sqlalchemy import Connection, inspect

    if isinstance(session, Connection):
        return
    for each in session.identity_map.values():
        if isinstance(each, statement.entity_description.get("type", ())) and vars(each).get(column.key) == token:
            session.expire(each, inspect(each).unmodified)


def _greater(statement: Update, column: Any, token: int) -> Select[Any]:
    """A row that the UPDATE left as it is because of its token. It locks the row: a plain SELECT of a transaction that
    sees a snapshot may show an older token than the UPDATE saw."""
    from sqlalchemy import select

    asked = select(column).where(column > token).limit(1).with_for_update(read=True)
    return asked if statement.whereclause is None else asked.where(statement.whereclause)


def _in_one_table(queryset: QuerySet[Any], fields: Iterable[str]) -> None:
    """Django writes a field of a parent model in a statement of its own, by primary key and without a look at the
    token."""
    options = queryset.model._meta  # noqa: SLF001
    for each in fields:
        model = options.get_field(each).model
        if model._meta.concrete_model is not options.concrete_model:  # noqa: SLF001
            raise ConfigError(
                f"{each!r} is in the table of {model.__name__}, and not in that of {queryset.model.__name__}: no "
                f"single statement compares the token and writes it. Keep the token and the values in one table, and "
                f"give the queryset of its model"
            )


def _check_range(queryset: QuerySet[Any], field: str, token: int) -> None:
    """Django leaves out a condition that compares with a number beyond the range of its field. MySQL and MariaDB with a
    sql_mode that is not strict then store the greatest number that fits."""
    from django.db import connections, models

    found = queryset.model._meta.get_field(field)  # noqa: SLF001
    if isinstance(found, models.IntegerField):
        greatest = connections[queryset.db].ops.integer_field_range(found.get_internal_type())[1]
        if greatest is not None and token > greatest:
            raise ConfigError(f"{field!r} is too small for a token, which needs 64 bits: make it a BigIntegerField")


def _of_one_table(queryset: QuerySet[Any]) -> QuerySet[Any]:
    """The same rows, without joins. Django puts all conditions of an UPDATE that joins into a subquery, or into a
    SELECT before it. A condition on the token would be there, too, and compare a row that a newer holder is about to
    write: the UPDATE would overwrite that write."""
    from django.db import connections

    rows: Any = queryset.values("pk")
    if not connections[queryset.db].features.update_can_self_select:  # MySQL: an UPDATE cannot read its own table again
        rows = list(queryset.values_list("pk", flat=True))
    return type(queryset)(queryset.model, using=queryset.db).filter(pk__in=rows)


def _not_greater(field: str, token: int) -> Q:
    from django.db.models import Q

    return Q(**{f"{field}__isnull": True}) | Q(**{f"{field}__lte": token})


def _stale(lease: _HasToken, where: object) -> StaleToken:
    return StaleToken(
        f"the fencing token {lease.fence} of {lease.name!r} is older than the one in {where}: another owner has held "
        f"the lock since, and this write was refused",
        name=lease.name,
    )
