"""Single statements over MariaDB: a session prepares each once, and ops of many names leave in one packet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from asynclock import Lease, QuorumUnavailable, Redlock
from asynclock.stores.sql import SQLStore, engines
from asynclock.stores.sql.lines import AsyncmyLine, Stopped
from asynclock.stores.sql.mysql_single import CLOCK, statement
from asynclock.stores.sql.rows import FLOOR
from asynclock.stores.sql.sending import Single
from tests.support.services.mariadb import MariaDB, own_mariadb
from tests.support.sql_states import database_of, session
from tests.support.waiters import LIMIT, LONG

MANY = 40


@pytest.fixture(scope="module")
def server() -> Iterator[MariaDB]:
    """A server of the module's own, whose counters and settings belong to a test."""
    with own_mariadb() as server:
        yield server


async def counters(admin: AsyncConnection) -> dict[str, int]:
    """How often the server has carried out each kind of statement so far."""
    found = await admin.exec_driver_sql("SHOW GLOBAL STATUS WHERE Variable_name REGEXP '^Com_'")
    return {name: int(value) for name, value in found}


async def acquired(client: Redlock, names: list[str]) -> list[Lease]:
    """All of them, asked for in the same turn of the loop."""
    return list(await asyncio.gather(*(client(each).acquire() for each in names)))


async def taken_and_given_back(client: Redlock, names: list[str]) -> None:
    """Once each."""
    leases = await acquired(client, names)
    await asyncio.gather(*(each.release() for each in leases))


async def test_ops_of_many_names_share_their_commits(server: MariaDB, name: str) -> None:
    """Those that wait while a packet is under way leave together."""
    names = [f"{name}:{each}" for each in range(MANY)]
    async with Redlock(server.url, lease=LIMIT) as client, session(server.url) as admin:
        await taken_and_given_back(client, names)
        before = await counters(admin)
        for _ in range(3):
            await taken_and_given_back(client, names)
        after = await counters(admin)
    assert after["Com_execute_sql"] - before["Com_execute_sql"] >= 6 * MANY
    assert 0 < after["Com_commit"] - before["Com_commit"] < 3 * MANY  # an op that leaves alone needs no COMMIT


async def test_a_session_prepares_a_statement_once(server: MariaDB, name: str) -> None:
    """And a name that was free before is taken without a transaction."""
    async with Redlock(server.url, lease=LIMIT) as client, session(server.url) as admin:
        async with client(name):
            pass
        before = await counters(admin)
        for _ in range(MANY):
            async with client(name):
                pass
        after = await counters(admin)
    used = {each: after[each] - before[each] for each in ("Com_execute_sql", "Com_prepare_sql", "Com_begin")}
    assert used["Com_execute_sql"] >= 2 * MANY
    assert used["Com_prepare_sql"] < MANY  # a few: an idle connection goes back to the pool, and is set up anew
    assert used["Com_begin"] < MANY


async def test_f6_a_locked_row_delays_no_op_of_its_packet(server: MariaDB, name: str) -> None:
    """The others are sent again without it, and it waits by itself."""
    names = [f"{name}:{each}" for each in range(MANY)]
    async with (
        Redlock(server.url, lease=LIMIT) as client,
        session(server.url) as admin,
        session(server.url) as watching,
    ):
        await taken_and_given_back(client, names)
        await admin.exec_driver_sql(f"SELECT 1 FROM asynclock WHERE resource_name = '{names[9]}' FOR UPDATE")
        before = await counters(watching)
        *others, locked = [asyncio.create_task(acquired(client, each)) for each in (names[:9], names[10:], names[9:10])]
        await asyncio.gather(*others)
        assert not locked.done()
        after = await counters(watching)
        assert after["Com_rollback"] > before["Com_rollback"]
        await admin.rollback()
        await locked


async def test_a_packet_that_the_server_stops_has_done_nothing(server: MariaDB, name: str) -> None:
    """No row of it is taken or locked."""
    store = SQLStore(server.url)
    async with Redlock(store, lease=LIMIT) as client, session(server.url) as admin, session(server.url) as other:
        async with client(f"{name}:free"), client(f"{name}:locked"):
            pass
        await admin.exec_driver_sql(f"SELECT 1 FROM asynclock WHERE resource_name = '{name}:locked' FOR UPDATE")
        sql = statement("asynclock", "acquire 1")
        free, locked = [
            (sql, {**Single(f"{name}:{each}", "its id", "", 0, LIMIT, LIMIT)._asdict(), "floor": FLOOR})
            for each in ("free", "locked")
        ]
        async with database_of(store).connected.pool.line() as line:
            with pytest.raises(Stopped) as told:
                await line.change_all([free, locked])
            assert told.value.at == 1
            reading = f"SELECT count FROM asynclock WHERE resource_name = '{name}:free' FOR UPDATE NOWAIT"
            assert (await other.exec_driver_sql(reading)).scalar() == 0


async def test_f6_the_error_of_an_op_is_its_own(server: MariaDB, name: str) -> None:
    """The server refuses one name of a packet: only that name gets the error."""
    names = [f"{name}:{each}" for each in range(MANY)]
    async with (
        Redlock(server.url, lease=LONG, node_timeout=LIMIT, patience=0, connect_timeout=LIMIT) as client,
        session(server.url) as admin,
    ):
        await taken_and_given_back(client, names)
        await admin.exec_driver_sql(
            f"CREATE TRIGGER refusing BEFORE UPDATE ON asynclock FOR EACH ROW IF NEW.resource_name = '{names[9]}' "
            "THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not this one'; END IF"
        )
        try:
            told = await asyncio.gather(*(client(each).acquire() for each in names), return_exceptions=True)
        finally:
            await admin.exec_driver_sql("DROP TRIGGER refusing")
    assert isinstance(refused := told.pop(9), QuorumUnavailable)
    assert "not this one" in str(refused)
    assert [each for each in told if not isinstance(each, Lease)] == []


async def test_a_trigger_that_writes_rows_takes_no_lock_away(server: MariaDB, name: str) -> None:
    """As one of an audit does. The server then leaves no fence in the answer to an UPDATE: an op that was carried out
    is not taken for one that was not."""
    names = [f"{name}:{each}" for each in range(MANY)]
    async with Redlock(server.url, lease=LIMIT) as client, session(server.url) as admin:
        await taken_and_given_back(client, names)
        await admin.exec_driver_sql("CREATE TABLE audit (id INT AUTO_INCREMENT PRIMARY KEY, name TEXT)")
        await admin.exec_driver_sql(
            "CREATE TRIGGER audited AFTER UPDATE ON asynclock FOR EACH ROW "
            "INSERT INTO audit (name) VALUES (NEW.resource_name)"
        )
        try:
            leases = await acquired(client, names)
            await asyncio.gather(*(each.extend() for each in leases))
            await asyncio.gather(*(each.release() for each in leases))
            async with client(name) as lease:  # alone
                pass
            async with client(name, fencing=False):
                pass
            fences = [each.fence for each in leases]
            again = await acquired(client, names)
            later = [each.fence for each in again]
            await asyncio.gather(*(each.release() for each in again))
        finally:
            await admin.exec_driver_sql("DROP TRIGGER audited")
            await admin.exec_driver_sql("DROP TABLE audit")
    assert lease.fence > 0
    assert all(before < after for before, after in zip(fences, later, strict=True))


async def test_a_server_in_the_mode_of_oracle(server: MariaDB, name: str) -> None:
    """BEGIN is the begin of a block there, so it begins no transaction."""
    names = [f"{name}:{each}" for each in range(MANY)]
    async with session(server.url) as admin:
        (before,) = (await admin.exec_driver_sql("SELECT @@GLOBAL.sql_mode")).one()
        await admin.exec_driver_sql("SET GLOBAL sql_mode = 'ORACLE'")
        try:
            async with Redlock(server.url, lease=LIMIT) as client:
                leases = await acquired(client, names)
                started = await counters(admin)
                await asyncio.gather(*(each.extend() for each in leases))
                ended = await counters(admin)
        finally:
            await admin.exec_driver_sql(f"SET GLOBAL sql_mode = '{before}'")
    assert ended["Com_begin"] - started["Com_begin"] < MANY  # they left in packets


async def test_a_server_without_room_for_prepared_statements(server: MariaDB, name: str) -> None:
    """It gets the statements themselves."""
    names = [f"{name}:{each}" for each in range(MANY)]
    async with session(server.url) as admin:
        await admin.exec_driver_sql("SET GLOBAL max_prepared_stmt_count = 0")
        try:
            before = await counters(admin)
            async with Redlock(server.url, lease=LIMIT) as client:
                await taken_and_given_back(client, names)
            after = await counters(admin)
        finally:
            await admin.exec_driver_sql("SET GLOBAL max_prepared_stmt_count = 16382")
    assert after["Com_execute_sql"] == before["Com_execute_sql"]
    assert after["Com_insert"] > before["Com_insert"]


async def test_a_server_that_takes_small_packets_only(server: MariaDB, name: str) -> None:
    """The ops of a turn leave in several packets. It would refuse a long one, and each op would be a transaction."""
    names = [f"{name}:{each}".ljust(250, "x") for each in range(2 * MANY)]
    async with session(server.url) as admin:
        await admin.exec_driver_sql("SET GLOBAL max_allowed_packet = 16384")
        try:
            async with Redlock(server.url, lease=LIMIT) as client:
                await taken_and_given_back(client, names)
                before = await counters(admin)
                await taken_and_given_back(client, names)
                after = await counters(admin)
        finally:
            await admin.exec_driver_sql("SET GLOBAL max_allowed_packet = 16777216")
    assert after["Com_execute_sql"] - before["Com_execute_sql"] >= 4 * MANY
    assert after["Com_begin"] - before["Com_begin"] < MANY


async def test_a_session_that_has_lost_its_prepared_statements(
    server: MariaDB, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a proxy that has another session of the server now: the ops are carried out nevertheless."""

    class Session(AsyncmyLine):
        async def change(self, sql: str, params: Mapping[str, Any]) -> int:
            for each in self._prepared.values():
                with contextlib.suppress(Exception):  # it is not there any more
                    await self.driver.query(f"DEALLOCATE PREPARE {each}")
            return await super().change(sql, params)

    monkeypatch.setattr(engines, "AsyncmyLine", Session)
    async with Redlock(server.url, lease=LIMIT) as client:
        for _ in range(3):
            async with client(name) as lease:
                await lease.extend()


async def test_a_name_whose_row_was_removed(server: MariaDB, name: str) -> None:
    """A client that knows the row takes the name nevertheless."""
    async with Redlock(server.url, lease=LIMIT) as client, session(server.url) as admin:
        async with client(name):
            pass
        await admin.exec_driver_sql(f"DELETE FROM asynclock WHERE resource_name = '{name}'")
        await admin.commit()
        async with client(name), Redlock(server.url) as other:
            assert await other(name).acquire(timeout=0) is None


@pytest.mark.parametrize(("hours", "late"), [(-1, 0), (1, 60)])
async def test_f1_the_zone_of_the_server_changes_within_a_statement(server: MariaDB, hours: int, late: int) -> None:
    """Its end is not before its begin, and at most a minute late."""
    changed = CLOCK.end.replace("SYSDATE(6)", f"(NOW(6) + INTERVAL {hours} HOUR)")
    assert changed != CLOCK.end
    async with session(server.url) as admin:
        ((passed,),) = await admin.exec_driver_sql(f"SELECT {changed} - {CLOCK.begin}")
    assert float(passed) == late
