"""A release that others wait for is one statement on PostgreSQL (`serving.py`), and other states are left to the rules.
The agreement tests compare it with `decide`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from typing import Any

import asyncpg
import pytest

from asynclock import LockLost, QuorumUnavailable, Redlock
from asynclock.rules.model import ID_LENGTH, Entry, Notice
from asynclock.stores.sql import SQLStore, database, lines
from asynclock.stores.sql.compare_and_set import Pauses
from asynclock.stores.sql.listening import channel, notice_of
from tests.support.contended_rows import clients, contended_lease, get_the_lock, noted, waiter
from tests.support.gone_standby import standby_gone
from tests.support.probes import contended
from tests.support.services.postgresql import PostgreSQL, own_postgresql
from tests.support.sql_states import change_state, damage, read_rows, read_state
from tests.support.waiters import LIMIT, LONG, until

TABLE = "served"
"""Of the test that runs."""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgreSQL]:
    """A server of the module's own, whose settings a test changes."""
    with own_postgresql() as server:
        yield server


@pytest.fixture
def url(server: PostgreSQL) -> str:
    return server.url


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each test has a table of its own."""
    monkeypatch.setitem(globals(), "TABLE", re.sub(r"\W", "_", name))


@pytest.fixture
async def session(url: str) -> AsyncIterator[asyncpg.Connection]:
    """Of a stranger."""
    made = await asyncpg.connect(url)
    yield made
    made.terminate()


def serves(sql: str) -> bool:
    """Whether it is that statement."""
    return "served AS" in sql


async def test_a_release_that_others_wait_for_is_one_statement(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waiter gets the lock after it, in its turn; the last release frees the name, and leaves a plain row."""
    async with clients(url, TABLE, 3) as (holder, first, second):
        lease, wait = await contended_lease(url, TABLE, holder, first, name)
        later = await waiter(url, TABLE, second, name, 1)
        sent = noted(monkeypatch, name)
        await lease.release()
        for each in (wait, later):
            async with asyncio.timeout(LIMIT):
                following = await each
            assert following is not None
            assert following.fence > lease.fence
            lease = following
            await lease.release()
        assert [serves(each) for each in sent] == [True] * 3, sent
        rows, _ = await read_rows(SQLStore(url, TABLE), [name])
        assert (rows[name].holds, rows[name].owner, rows[name].state) == (0, "", None)


async def test_several_releases_share_a_statement(url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are ready at the same time. Each waiter gets its own lock."""
    async with clients(url, TABLE, 2) as (holder, other):
        names = [f"{name}:{number}" for number in range(12)]
        leases = [await holder(each).acquire(timeout=0) for each in names]
        waits = [await waiter(url, TABLE, other, each, 0) for each in names]
        await until(lambda: all(each is not None and contended(each) for each in leases))
        fetch, sent = lines.AsyncpgLine.fetch, list[int]()

        async def noting(line: lines.AsyncpgLine, sql: str, params: Mapping[str, Any] = {}) -> Any:
            if serves(sql):
                sent.append(1 if isinstance(params["name"], str) else len(params["name"]))
            return await fetch(line, sql, params)

        monkeypatch.setattr(lines.AsyncpgLine, "fetch", noting)
        await asyncio.gather(*(each.release() for each in leases if each is not None))
        assert sum(sent) == len(names)
        assert len(sent) < len(names) / 2
        async with asyncio.timeout(LIMIT):
            gained = await asyncio.gather(*waits)
        assert [each.name for each in gained if each is not None] == names


async def test_the_message_of_the_server_is_that_of_the_rules(url: str, session: asyncpg.Connection, name: str) -> None:
    """The waiter is another program here, which only listens."""
    name = f'{name} "\N{SNOWMAN}"'
    async with clients(url, TABLE, 2) as (holder, other):
        lease, wait = await contended_lease(url, TABLE, holder, other, name)
        (ticket,) = (await read_state(SQLStore(url, TABLE), name)).queue
        came: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        await session.add_listener(channel(ticket.id[:12]), lambda *message: came.set_result(message[3]))
        await lease.release()
        async with asyncio.timeout(LIMIT):
            got = notice_of(await came)
            gained = await wait
        assert gained is not None
        assert got == Notice(ticket.id[:ID_LENGTH], ticket.number, gained.fence, name=name)
        await gained.release()


async def test_clients_of_one_loop_and_store_need_no_message(url: str, session: asyncpg.Connection, name: str) -> None:
    """A message would take a lock of the whole database at the commit."""
    store = SQLStore(url, TABLE)
    async with Redlock(store, lease=LONG) as holder, Redlock(store, lease=LONG) as other:
        async with holder("first"):
            pass
        lease, wait = await contended_lease(url, TABLE, holder, other, name)
        (ticket,) = (await read_state(store, name)).queue
        came = list[str]()
        await session.add_listener(channel(ticket.id[:12]), lambda *message: came.append(message[3]))
        await lease.release()
        await get_the_lock(wait)
        await session.execute("SELECT 1")  # what was sent before has arrived
        assert not came


async def test_a_waiter_that_has_left_gets_nothing(url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is free after the release, which is one statement all the same."""
    async with clients(url, TABLE, 2) as (holder, other):
        lease, wait = await contended_lease(url, TABLE, holder, other, name)
        wait.cancel()
        await asyncio.wait({wait})
        store = SQLStore(url, TABLE)
        async with asyncio.timeout(LIMIT):
            while (await read_state(store, name)).queue:
                await asyncio.sleep(0.01)
        sent = noted(monkeypatch, name)
        await lease.release()
        assert [serves(each) for each in sent] == [True], sent
        assert (await read_state(store, name)).holds == ()


@pytest.mark.parametrize("ends", ["broken", "expired"])
async def test_a_hold_that_is_anothers_by_now_is_left_to_it(url: str, name: str, ends: str) -> None:
    """An operator has written another hold there, or it has ended and another client has the lock."""
    async with clients(url, TABLE, 2) as (holder, other):
        lease, wait = await contended_lease(url, TABLE, holder, other, name)
        store = SQLStore(url, TABLE)
        (mine,) = (await read_state(store, name)).holds
        stranger = Entry(f"{'5' * ID_LENGTH}||1|elsewhere", mine.ends)
        assert mine.ends is not None
        holds = (stranger,) if ends == "broken" else (mine._replace(ends=mine.ends - 2 * LONG), stranger)
        await change_state(store, name, holds=holds)
        with pytest.raises(LockLost):
            await lease.release()
        found = await read_state(store, name)
        assert stranger in found.holds
        assert len(found.queue) == 1
        wait.cancel()
        await asyncio.wait({wait})


async def test_f6_a_row_that_is_locked_is_left_to_a_transaction(
    url: str, session: asyncpg.Connection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One statement is in vain, and not two. Nothing is written until the other session has ended."""
    async with clients(url, TABLE, 2) as (holder, other):
        lease, wait = await contended_lease(url, TABLE, holder, other, name)
        sent = noted(monkeypatch, name)
        await session.execute("BEGIN")
        await session.execute(f"SELECT 1 FROM {TABLE} WHERE resource_name = $1 FOR UPDATE", name)
        releasing = asyncio.create_task(lease.release())
        await until(lambda: any("FOR UPDATE) AS t" in each for each in sent))
        assert serves(sent[0])
        assert not any("xmin" in each for each in sent)
        assert not wait.done()
        await session.execute("COMMIT")
        await releasing
        await get_the_lock(wait)


async def test_a_queue_with_a_client_that_looks_is_left_to_the_rules_for_a_while(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its notice is a row, which the rules insert. The next release of that name does not try the statement."""
    monkeypatch.setattr(database, "_UNSERVED", LONG)
    async with clients(url, TABLE, 2) as (holder, other):
        for tried in (True, False):
            lease, wait = await contended_lease(url, TABLE, holder, other, name)
            store = SQLStore(url, TABLE)
            rows, _ = await read_rows(store, [name])
            (ticket,) = (await read_state(store, name)).queue
            await damage(store, name, str(rows[name].state)[:-1] + f',"looks":["{ticket.id[:12]}"]}}')
            sent = noted(monkeypatch, name)
            await lease.release()
            assert any(serves(each) for each in sent) is tried
            rows, _ = await read_rows(store)
            assert any(each.startswith("asynclock:notice:") or "notice" in each for each in rows)
            wait.cancel()
            await asyncio.wait({wait})
            async with asyncio.timeout(LIMIT):
                while (await read_state(store, name)).holds:
                    await asyncio.sleep(0.01)


async def test_a_queue_of_another_program_is_explained_by_the_rules(url: str, name: str) -> None:
    """The server cannot read it, and the connection is good after that."""
    async with clients(url, TABLE, 2) as (holder, other):
        lease, wait = await contended_lease(url, TABLE, holder, other, name)
        store = SQLStore(url, TABLE)
        good = str((await read_rows(store, [name]))[0][name].state)
        await damage(store, name, good[:-1])
        with pytest.raises(Exception, match="written by another program"):
            await lease.release()
        await damage(store, name, good)
        await get_the_lock(wait)


async def test_f23_a_release_at_a_server_that_takes_no_writes_is_sent_again(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a standby that answers after a failover. Nothing is written, and the waiter gets the lock later."""
    fetch, run, refuses = lines.AsyncpgLine.fetch, lines.AsyncpgLine.run, True

    async def set_up(line: lines.AsyncpgLine) -> None:
        await run(line, f"SET default_transaction_read_only = {'on' if refuses else 'off'}")

    async def fetching(line: lines.AsyncpgLine, sql: str, params: Mapping[str, Any] = {}) -> Any:
        if serves(sql):
            await set_up(line)
        return await fetch(line, sql, params)

    async def running(line: lines.AsyncpgLine, sql: str) -> None:
        if sql.startswith("BEGIN"):
            await set_up(line)
        await run(line, sql)

    async with clients(url, TABLE, 2) as (holder, other):
        lease, wait = await contended_lease(url, TABLE, holder, other, name)
        store = SQLStore(url, TABLE)
        before = await read_state(store, name)
        monkeypatch.setattr(lines.AsyncpgLine, "fetch", fetching)
        monkeypatch.setattr(lines.AsyncpgLine, "run", running)
        with suppress(QuorumUnavailable):
            await lease.release()
        assert (await read_state(store, name)).holds == before.holds
        assert not wait.done()
        refuses = False
        await get_the_lock(wait)


async def test_a_refused_acquire_waits_for_no_standby(server: PostgreSQL, name: str) -> None:
    """It has only locked the row, where others wait for a hold."""
    async with clients(server.url, TABLE, 2) as (holder, other):
        lease, wait = await contended_lease(server.url, TABLE, holder, other, name)
        async with standby_gone(server), asyncio.timeout(LIMIT):
            assert await other(name).acquire(timeout=0) is None
            assert await holder(name).acquire(timeout=0) is None
        await lease.release()
        await get_the_lock(wait)


async def test_only_so_many_names_are_remembered() -> None:
    """Of those that no statement could serve: the last ones."""
    pauses = Pauses(LONG)
    for number in range(2000):
        pauses.add(str(number))
    assert "1999" in pauses
    assert "0" not in pauses
    assert sum(str(number) in pauses for number in range(2000)) == 1000
