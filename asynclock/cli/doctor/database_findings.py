"""What the facts of `asynclock doctor` about a SQL database mean. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynclock.cli.doctor.databases import OFF, read_only
from asynclock.cli.doctor.measures import clock_findings
from asynclock.cli.doctor.severity import Finding, Severity
from asynclock.cli.doctor.standalone import general_findings, sorted_findings
from asynclock.cli.output import count, length
from asynclock.stores.sql.engines import CONNECTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asynclock.cli.doctor.databases import DatabaseFacts
    from asynclock.cli.doctor.severity import Terms

_LITTLE, _NONE = 100_000_000, 1_000_000  # bytes on a disk

_NEEDS = {
    "settings": "whether a crash loses commits, and whether the server is a replica",
    "replicas": "whether there are replicas that may be promoted",
    "rights on the schema": "whether the user may make the table",
    "table": "how the table is kept",
    "columns": "whether the columns of the table are what clients need",
    "indexes": "which unique indexes the table has",
    "triggers": "whether the table has triggers",
    "open transactions": "whether a long transaction slows the locks",
    "prepared transactions": "whether one was left behind, and slows the locks",
    "replication slots": "whether one slows the locks",
}

_FORGETS = "A hold that was granted is forgotten, and another owner gets it."


def database_findings(facts: DatabaseFacts, terms: Terms) -> list[Finding]:
    """All findings, the worst first."""
    found = [*general_findings(facts, terms, _NEEDS)]
    if not facts.error:
        for check in _CHECKS:
            found += check(facts)
        found += clock_findings([facts], keeps_fences=True)
    return sorted_findings(found)


def _table(facts: DatabaseFacts) -> Iterator[Finding]:
    if facts.has_table is False and facts.exists:
        refused = facts.may_create is False
        yield Finding(
            Severity.ERROR if refused else Severity.OK,
            "table",
            (facts.node,),
            f"{facts.node} has no table {facts.table}"
            + (f", and the user {facts.user} may not make it." if refused else "."),
            "No client can connect."
            if refused
            else "The first client makes it, if its user may. Until then the rights on it, and holds, are not checked.",
            "Let its owner run await store.create_schema(), or the statement of docs/stores/sql.md.",
        )
    if facts.fault:
        yield Finding(
            Severity.ERROR,
            "table",
            (facts.node,),
            f"On {facts.node} {facts.fault}.",
            "Two clients could be granted one name, or a fencing token could be lost. So no lock can be acquired.",
            f"{facts.mend[0].upper()}{facts.mend[1:]}.",
        )
    if facts.kept == "u":
        yield Finding(
            Severity.ERROR,
            "table",
            (facts.node,),
            f"The table {facts.table} is UNLOGGED.",
            "A crash of the server empties it: all holds and fencing counters are forgotten.",
            f"ALTER TABLE {facts.table} SET LOGGED.",
        )


def _rows(facts: DatabaseFacts) -> Iterator[Finding]:
    """What does not keep the table from excluding."""
    if facts.is_ordered is False:
        yield Finding(
            Severity.WARNING,
            "collation",
            (facts.node,),
            f"The names in the table {facts.table} are not in the order of their bytes.",
            "Clients without push messages may not learn that it is their turn, and asynclock ls may leave out names.",
            f'ALTER TABLE {facts.table} ALTER COLUMN resource_name TYPE TEXT COLLATE "C".',
        )
    if facts.triggers:
        yield Finding(
            Severity.WARNING,
            "triggers",
            (facts.node,),
            f"The table {facts.table} has {count(len(facts.triggers), 'trigger')}: {', '.join(facts.triggers)}.",
            "It runs inside each operation of a lock: it may change the row of a lock, or make the operation fail or "
            "slow.",
            "Drop it, unless it does nothing but read.",
        )


def _rights(facts: DatabaseFacts) -> Iterator[Finding]:
    if facts.missing:
        missing = ", ".join(facts.missing)
        yield Finding(
            Severity.ERROR,
            "rights",
            (facts.node,),
            f"The user {facts.user or 'of the url'} has no right to {missing} on {facts.table}.",
            "Locks cannot be acquired, renewed or released, or old rows stay for ever.",
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON {facts.table} TO the user.",
        )


def _log(facts: DatabaseFacts) -> Iterator[Finding]:
    if facts.settings.get("binlog_format") == "STATEMENT" and facts.settings.get("log_bin", "") not in OFF:
        yield Finding(
            Severity.ERROR,
            "log",
            (facts.node,),
            f"{facts.node} has binlog_format=STATEMENT.",
            "Its binary log takes no transaction with READ COMMITTED, so no lock can be acquired.",
            "SET GLOBAL binlog_format = MIXED (or ROW), and in the configuration of the server.",
        )


def _durability(facts: DatabaseFacts) -> Iterator[Finding]:
    said = facts.settings
    if said.get("fsync") == "off":
        yield _loses(
            facts,
            Severity.ERROR,
            "fsync=off",
            "After a power failure",
            "ALTER SYSTEM SET fsync = on, then SELECT pg_reload_conf()",
        )
    if said.get("synchronous_commit") == "off":
        advice = "ALTER SYSTEM SET synchronous_commit = on, or ALTER ROLE for the user of the clients"
        yield _loses(facts, Severity.ERROR, "synchronous_commit=off", "After a crash of the server", advice)
    if said.get("full_page_writes") == "off":
        advice = "ALTER SYSTEM SET full_page_writes = on, unless the file system writes whole pages"
        yield _loses(
            facts,
            Severity.WARNING,
            "full_page_writes=off",
            "After a power failure the table may be broken, and",
            advice,
        )
    flush = said.get("innodb_flush_log_at_trx_commit", "1")
    if flush not in ("1", "3"):  # 3: of MariaDB, with more flushes for a commit than 1
        setting = "innodb_flush_log_at_trx_commit"
        when = "a power failure" if flush == "2" else "a crash of the server"
        severity = Severity.WARNING if flush == "2" else Severity.ERROR
        yield _loses(facts, severity, f"{setting}={flush}", f"After {when}", f"SET GLOBAL {setting} = 1")


def _loses(facts: DatabaseFacts, severity: Severity, setting: str, when: str, advice: str) -> Finding:
    return Finding(
        severity,
        "durability",
        (facts.node,),
        f"{facts.node} has {setting}.",
        f"{when} the last commits are lost. {_FORGETS}",
        f"{advice}.",
    )


def _role(facts: DatabaseFacts) -> Iterator[Finding]:
    said = facts.settings
    names = read_only(said)
    if facts.standby or names:
        yield Finding(
            Severity.ERROR,
            "replica",
            (facts.node,),
            f"{facts.node} " + ("is a standby." if facts.standby else f"has {names[0]}={said[names[0]]}."),
            "It refuses writes, so no lock can be acquired."
            if facts.standby or facts.refuses_writes
            else "No lock can be acquired: asynclock writes nothing there, also where the server lets its user write "
            "(SUPER, READ ONLY ADMIN).",
            "Name the primary server.",
        )
    elif facts.replicas and _is_asynchronous(facts):
        yield Finding(
            Severity.WARNING,
            "failover",
            (facts.node,),
            f"{facts.node} has {count(facts.replicas, 'replica')}, and does not wait for "
            f"{'it' if facts.replicas == 1 else 'them'} when it commits.",
            "A replica that is promoted may not know a lock that is held, and grants it again.",
            "Fence what the lock protects, or set synchronous_standby_names, with synchronous_commit at least on."
            if facts.backend == "postgresql"
            else "Fence what the lock protects, or use semi-synchronous replication.",
        )


def _is_asynchronous(facts: DatabaseFacts) -> bool:
    """Whether a commit returns before a replica has it."""
    said = facts.settings
    if facts.backend == "postgresql":
        return not said.get("synchronous_standby_names") or said.get("synchronous_commit") in ("off", "local")
    names = ("rpl_semi_sync_master_enabled", "rpl_semi_sync_source_enabled")
    return all(said.get(each, "") in OFF for each in names)


def _idle(facts: DatabaseFacts) -> Iterator[Finding]:
    if facts.settings.get("idle_transaction_timeout") == "0":
        yield Finding(
            Severity.WARNING,
            "idle",
            (facts.node,),
            f"{facts.node} has idle_transaction_timeout=0.",
            "A client that is stopped in the middle of a transaction keeps a row locked, and the operations of all "
            "others on that name fail.",
            "SET GLOBAL idle_transaction_timeout = 3.",
        )


def _old_versions(facts: DatabaseFacts) -> Iterator[Finding]:
    for kind, name, detail, age in facts.keepers:
        since = length(age) if kind != "slot" else f"{age:.0f} transactions"
        what, advice = {
            "session": (
                f"The session {name} ({detail}) of {facts.node} has a transaction that is open for {since}.",
                (
                    f"End it (SELECT pg_terminate_backend({name})) if nobody needs it. Let long reports run on a "
                    "replica, and set idle_in_transaction_session_timeout."
                ),
            ),
            "prepared": (
                f"{facts.node} has a transaction of {detail} that is prepared for {since}: {name}.",
                "As its owner: COMMIT PREPARED or ROLLBACK PREPARED with this name. See pg_prepared_xacts for others.",
            ),
            "slot": (
                f"The replication slot {name} ({detail}) of {facts.node} is {since} behind.",
                (
                    "Let its replica catch up, or set hot_standby_feedback = off there. If the replica is gone: "
                    "SELECT pg_drop_replication_slot with the name of the slot."
                ),
            ),
        }[kind]
        yield Finding(
            Severity.WARNING,
            "old-versions",
            (facts.node,),
            what,
            "PostgreSQL keeps all old versions of rows meanwhile: the table grows with each hold, and operations on a "
            "name become slower.",
            advice,
        )


def _connections(facts: DatabaseFacts) -> Iterator[Finding]:
    most = 1 + CONNECTIONS
    if facts.connections is None or facts.connections >= most:
        return
    one = facts.connections == 1
    yield Finding(
        Severity.WARNING if one else Severity.OK,
        "connections",
        (facts.node,),
        f"{facts.node} gave {count(facts.connections, 'connection')} at the same time, beside those that are in use.",
        "Waiters of a client with one connection look at the table, and a client without one takes no lock."
        if one
        else f"A busy client takes up to {most} connections. With fewer it is slower.",
        "Give each client (each event loop of each process) two connections at least: raise default_pool_size of a "
        "pooler with pool_mode = session, the limit of the user, or max_connections.",
    )


def _notices(facts: DatabaseFacts) -> Iterator[Finding]:
    if facts.pushes or facts.standby:
        return
    why, advice = "", "Nothing, if that is soon enough. Redis and PostgreSQL notify waiters at once."
    if facts.pushes is False:
        why = f"No push message arrives from {facts.node}: a pooler is between."
        if facts.connections == 1:
            why = f"{facts.node} has no second connection to listen with."
        advice = "Nothing, if that is soon enough. Else name the server itself, or a pooler with pool_mode=session."
    elif facts.backend == "postgresql":
        why = "The driver of the url takes no push messages."
        advice = "Use postgresql://, which means asyncpg."
    yield Finding(
        Severity.OK,
        "notices",
        (facts.node,),
        why or f"{facts.product or facts.backend} has no push messages.",
        "Waiters look at the table: a hand-over takes up to 250 ms after a long wait.",
        advice,
    )


def _file(facts: DatabaseFacts) -> Iterator[Finding]:
    if not facts.file:
        return
    if not facts.has_folder:
        yield Finding(
            Severity.ERROR,
            "file",
            (facts.node,),
            f"The folder of {facts.file} does not exist.",
            "No client can connect.",
            "Make the folder, or correct the path.",
        )
    elif not facts.writable:
        yield Finding(
            Severity.ERROR,
            "file",
            (facts.node,),
            f"This user cannot write {facts.file}, or the folder of it.",
            "No lock can be acquired. The folder holds the -wal and -shm files.",
            "Give the user of the clients the right to write both, or name another file.",
        )
    elif not facts.exists:
        yield Finding(
            Severity.OK,
            "file",
            (facts.node,),
            f"There is no file {facts.file}.",
            "The first client makes it. Until then holds are not checked. Clients that name another path, for example "
            "a relative one in another folder, share no locks with it.",
            "Nothing, if no client has run yet. Else correct the path.",
        )


def _disk(facts: DatabaseFacts) -> Iterator[Finding]:
    if facts.free is not None and facts.free < _LITTLE:
        yield Finding(
            Severity.ERROR if facts.free < _NONE else Severity.WARNING,
            "disk",
            (facts.node,),
            f"{facts.free / 1e6:.1f} MB are free on the disk of {facts.file}.",
            "Without space no lock can be acquired, renewed or released.",
            "Free disk space.",
        )


_CHECKS = (
    *(_table, _rows, _rights, _log, _durability, _role, _idle, _old_versions),
    *(_connections, _notices, _file, _disk),
)
