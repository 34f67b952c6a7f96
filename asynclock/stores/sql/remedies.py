"""What a database, or a pooler before it, says in place of serving a connection or an op, and what to do about it.
Pure."""

from __future__ import annotations

import re

_FEWER = "or close connections to it that nobody needs"

_TIMED_OUT = (
    "another session may have locked the row or the table; or give the user a longer limit for statements "
    "(statement_timeout, max_statement_time)"
)

_LOCKED = "another session has locked the row, the table or the file: let it end its transaction, or end that session"

_REMEDIES = (
    (r"due to lock timeout|lock wait timeout|could not obtain lock|database (table )?is locked", _LOCKED),
    (r"it answers, but this has no answer", f"perhaps {_LOCKED}"),
    (r"due to statement timeout|max_statement_time|maximum statement execution time", _TIMED_OUT),
    (r"No space left on device|disk is full|disk full|table '.*' is full", "make room on the disk of the database"),
    (
        r"connections of the engine are in use",
        "raise its pool_size or max_overflow, or give the store an engine of its own",
    ),
    (
        r"has accepted the login, and carries out no statement",
        (
            "the pool of a pooler before it may be used up (PgBouncer: default_pool_size, with pool_mode = session): "
            "each client, which is each event loop of each process, needs one of its connections, and a second one for "
            "push messages"
        ),
    ),
    (r"too many connections for role", f"raise its limit (ALTER ROLE name CONNECTION LIMIT n), {_FEWER}"),
    (r"too many connections for database", f"raise its limit (ALTER DATABASE name CONNECTION LIMIT n), {_FEWER}"),
    (
        r"too many clients already|remaining connection slots are reserved|too many server connections",
        f"raise max_connections at the server, put a pooler before it, {_FEWER}",
    ),
    (r"max_client_conn|no more connections allowed", f"raise max_client_conn of the pooler, {_FEWER}"),
    (r"max_user_connections", f"raise the limit of the user (max_user_connections), {_FEWER}"),
    (r"max_connections_per_hour|max_(queries|updates)_per_hour", "raise the limit of the user (ALTER USER ... WITH)"),
    (r"too many connections", f"raise max_connections at the server, {_FEWER}"),
    (
        r"is blocked because of many connection errors",
        (
            "run FLUSH HOSTS at the server (on MySQL TRUNCATE TABLE performance_schema.host_cache), and find the "
            "program that only opens its port; or raise max_connect_errors"
        ),
    ),
    (r"is not allowed to connect to this", "let the user of the url connect from this host (CREATE USER name@host)"),
    (r"no pg_hba\.conf entry|pg_hba\.conf rejects", "allow this host, user and database in pg_hba.conf"),
    (r"statement pooling mode", "set pool_mode = transaction (or session) in PgBouncer, or name the server itself"),
    (r"not currently accepting connections", "ALTER DATABASE name ALLOW_CONNECTIONS true, or correct the url"),
    (r"database system is (starting up|shutting down|in recovery)|not yet accepting connections", "wait"),
)


def remedy(text: str) -> str:
    """What to do about the error with this text; "": nothing in particular."""
    return next((do for said, do in _REMEDIES if re.search(said, text, re.IGNORECASE)), "")
