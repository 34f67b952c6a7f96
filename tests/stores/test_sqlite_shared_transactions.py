"""Ops of a SQLite file that share a transaction, because they are ready at the same time."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest

from asynclock import ConfigError, Lease, QuorumUnavailable, Redlock
from asynclock._clock import now
from asynclock.rules.model import Op, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.stores import SQLStore
from asynclock.stores.port import Refused
from tests.support.probes import nodes_of
from tests.support.waiters import LIMIT, LONG, until

TASKS = 64
LONG_LEASE = 3 * LIMIT


class Watched(sqlite3.Connection):
    """Counts the commits. `after` is called after each, and `before` with the connection before each transaction."""

    commits = 0
    after: Callable[[], None] | None = None
    before: Callable[[Any], None] | None = None
    committed: ClassVar[set[Any]] = set()  # the connections

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if sql == "BEGIN IMMEDIATE" and Watched.before is not None:
            Watched.before(self)
        done = super().execute(sql, *args)
        if sql == "COMMIT":
            Watched.commits += 1
            Watched.committed.add(self)
            if Watched.after is not None:
                Watched.after()
        return done


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Watched]]:
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **options: connect(*args, **options, factory=Watched))
    monkeypatch.setattr("asynclock.stores.sql.cleaning.TURN", 10 * LIMIT)
    Watched.commits = 0
    yield Watched
    Watched.after = Watched.before = None
    Watched.committed.clear()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks.db"


def rows(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return connection.execute(sql).fetchall()


async def all_of(client: Redlock, *names: str) -> list[Lease | BaseException | None]:
    """An acquire of each name at the same time, each of one try."""
    return await asyncio.gather(*(client(name).acquire(timeout=0) for name in names), return_exceptions=True)


async def test_ops_of_many_names_share_commits(path: Path, watched: type[Watched], name: str) -> None:
    """Each of 64 tasks gets its lock and gives it back, with a few commits in all."""
    async with Redlock(f"sqlite:///{path}", lease=LONG_LEASE, node_timeout=LIMIT) as client:
        before = watched.commits
        leases = await all_of(client, *(f"{name}:{number}" for number in range(TASKS)))
        assert all(isinstance(each, Lease) for each in leases)
        await asyncio.gather(*(each.release() for each in leases if isinstance(each, Lease)))
        assert watched.commits - before < TASKS / 4
    assert rows(path, "SELECT count(*) FROM asynclock WHERE count > 0") == [(0,)]


async def test_names_that_need_the_rules_share_commits(path: Path, watched: type[Watched], name: str) -> None:
    """The second holder of a semaphore: its row is no plain one."""
    async with Redlock(f"sqlite:///{path}", lease=LONG_LEASE, node_timeout=LIMIT) as client:
        before = watched.commits
        locks = [client.semaphore(f"{name}:{number % (TASKS // 2)}", 2) for number in range(TASKS)]
        leases = await asyncio.gather(*(each.acquire(timeout=0) for each in locks))
        assert all(leases)
        await asyncio.gather(*(each.release() for each in leases if each))
        assert watched.commits - before < TASKS / 4


async def test_a_damaged_row_is_the_error_of_its_op_only(path: Path, watched: type[Watched], name: str) -> None:
    """The others of its transaction have their locks, by the same commit."""
    names = [f"{name}:{number}" for number in range(8)]
    async with Redlock(f"sqlite:///{path}", lease=LONG_LEASE, node_timeout=LIMIT) as client:
        prefix = await key_prefix(client, path, names[3])
        rows(path, f"UPDATE asynclock SET state = 'kilowatt' WHERE resource_name = '{prefix}{names[3]}'")
        before = watched.commits
        found = await all_of(client, *names)
        assert watched.commits - before < len(names) / 2
        assert [type(each) for each in found] == [Lease] * 3 + [ConfigError] + [Lease] * 4
        await client.release_all()


async def test_a_row_that_never_ends_is_held(path: Path, name: str) -> None:
    """An operator has taken the name, without an end. An acquire is refused; it is no error of the file."""
    async with Redlock(f"sqlite:///{path}", lease=LONG_LEASE, node_timeout=LIMIT) as client:
        await key_prefix(client, path, name)
        rows(path, f"UPDATE asynclock SET count = 1, expires_at = NULL WHERE resource_name LIKE '%{name}'")
        assert await client(name).acquire(timeout=0) is None


async def test_a_row_that_the_file_refuses_undoes_no_other_op(path: Path, name: str) -> None:
    """A trigger of the user refuses one name. The transaction of all is rolled back; the others are carried out
    nevertheless, once each."""
    names = [f"{name}:{number}" for number in range(8)]
    async with Redlock(f"sqlite:///{path}", lease=LONG_LEASE, node_timeout=LIMIT, patience=0.2) as client:
        rows(
            path,
            f"CREATE TRIGGER refuses BEFORE INSERT ON asynclock WHEN NEW.resource_name LIKE '%{names[3]}' "
            "BEGIN SELECT RAISE(ABORT, 'kilowatt'); END",
        )
        found = await all_of(client, *names)
        assert [type(each) for each in found] == [Lease] * 3 + [QuorumUnavailable] + [Lease] * 4
        assert "kilowatt" in str(found[3])
        held = rows(path, "SELECT count(*) FROM asynclock WHERE count > 0")
        assert held == [(7,)]
        await client.release_all()


async def test_a_commit_without_an_answer_is_in_doubt_for_all_its_ops(
    path: Path, watched: type[Watched], name: str
) -> None:
    """It was carried out, and is reported as failed. Each acquire fails, and none leaves its name taken."""
    names = [f"{name}:{number}" for number in range(8)]
    async with Redlock(f"sqlite:///{path}", lease=LONG_LEASE, node_timeout=LIMIT, patience=LONG) as client:
        failed = list[int]()

        def fail_once() -> None:
            if not failed:
                failed.append(watched.commits)
                raise sqlite3.OperationalError("disk I/O error")

        watched.after = fail_once
        found = await all_of(client, *names)
        assert failed
        assert [type(each) for each in found] == [QuorumUnavailable] * 8
        leases = await asyncio.gather(*(client(each).acquire(timeout=LONG) for each in names))
        assert all(leases)
        await client.release_all()
    assert rows(path, "SELECT count(*) FROM asynclock WHERE count > 0") == [(0,)]


async def test_an_acquire_that_arrives_after_its_undo_takes_nothing(
    path: Path, watched: type[Watched], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread stands still before the transaction. The op is given up and undone over another connection; then the
    transaction is carried out after all."""
    late, goes_on = list[Any](), threading.Event()
    count = f"SELECT count FROM asynclock WHERE resource_name LIKE '%{name}'"

    def stand_still(connection: Any) -> None:
        if not late:
            late.append(connection)
            goes_on.wait(LIMIT)
            connection.execute(f"PRAGMA busy_timeout = {LIMIT * 1000:.0f}")  # another may have the file just now

    async with Redlock(f"sqlite:///{path}", lease=LONG_LEASE, node_timeout=LIMIT) as client:
        await key_prefix(client, path, name)
        watched.committed.clear()
        monkeypatch.setattr("asynclock.stores.sql.file_batches.LIMIT", 0.2)
        watched.before = stand_still
        with pytest.raises(QuorumUnavailable):
            await client(name).acquire(timeout=0)
        await until(lambda: bool(rows(path, f"{count} AND state LIKE '%undone%'")))
        goes_on.set()
        await until(lambda: late[0] in watched.committed)
        assert rows(path, count) == [(0,)]


async def test_looks_of_others_keep_no_op_from_the_connection(path: Path, name: str) -> None:
    """Two tasks inspect names all the time, so one of them always waits for the connection. Ops get it all the same."""
    async with Redlock(f"sqlite:///{path}", lease=LONG_LEASE, node_timeout=LIMIT) as client:

        async def look(number: int) -> None:
            while True:
                await client.inspect(f"{name}:{number}")

        looks = [asyncio.create_task(look(number)) for number in range(2)]
        try:
            for _ in range(10):
                lease = await client(name).acquire(timeout=LIMIT)
                assert lease is not None
                await lease.release()
        finally:
            for each in looks:
                each.cancel()
            await asyncio.gather(*looks, return_exceptions=True)


@pytest.mark.parametrize("steps", [0, 10])
async def test_a_cancel_of_the_tasks_of_the_library_stops_no_later_op(
    path: Path, watched: type[Watched], name: str, steps: int
) -> None:
    """The program cancels the task that waits for the connection, before its first step or after it. The op fails, or
    is sent again; the next one is carried out."""
    stands, goes_on = threading.Event(), threading.Event()

    def stand_still(connection: Any) -> None:
        del connection
        stands.set()
        goes_on.wait(LIMIT)

    def waiting() -> list[asyncio.Task[Any]]:
        return [each for each in asyncio.all_tasks() if each.get_name() == "asynclock writes to a file"]

    options: dict[str, Any] = {"lease": LONG_LEASE, "node_timeout": LIMIT, "patience": LONG}
    async with Redlock(f"sqlite:///{path}", **options) as client:
        await key_prefix(client, path, name)
        watched.before = stand_still
        looking = asyncio.create_task(client.health())  # each of its two transactions is alone
        await until(stands.is_set)
        failing = asyncio.create_task(client(name).acquire(timeout=0))
        await until(lambda: bool(waiting())) if steps else await asyncio.sleep(0)
        for _ in range(steps):
            await asyncio.sleep(0)
        (waits,) = waiting()
        waits.cancel()
        await asyncio.wait({waits})
        goes_on.set()
        await looking
        found = await asyncio.gather(failing, client(f"{name}:next").acquire(timeout=LIMIT), return_exceptions=True)
        assert isinstance(found[0], Lease | QuorumUnavailable)
        assert isinstance(found[1], Lease)
        await client.release_all()


async def test_a_waiting_task_that_is_cancelled_stops_no_other_op(
    path: Path, watched: type[Watched], name: str
) -> None:
    """A task that awaits an op of a transaction under way is cancelled. An op that waits for the next transaction has
    its answer."""
    await next_is_carried_out(path, watched, name, cancelled=True)


async def test_a_handler_that_raises_stops_no_other_op(path: Path, watched: type[Watched], name: str) -> None:
    """The same for a handler that raises an exception."""
    await next_is_carried_out(path, watched, name, cancelled=False)


async def test_why_an_op_was_repeated_is_forgotten_with_it(path: Path, name: str) -> None:
    """A client asks while another program has the file, and closes. Once the file is free, nothing is kept of that."""
    store = SQLStore(f"sqlite:///{path}")
    options: dict[str, Any] = {"lease": LONG_LEASE, "node_timeout": LIMIT, "patience": LONG}
    async with Redlock(store, **options) as other:
        prefix = await key_prefix(other, path, f"{name}:other")
        keys = [prefix + name]
        async with Redlock(store, **options) as client:
            with closing(sqlite3.connect(path, isolation_level=None)) as program:
                program.execute("BEGIN IMMEDIATE")
                asking = asyncio.create_task(client(name).acquire())
                await until(lambda: "is locked" in store.delay(keys, 0.0))
                await client.aclose()
        await asyncio.gather(asking, return_exceptions=True)
        async with other(f"{name}:other"):
            pass
        assert "is locked" not in store.delay(keys, 0.0)


class Asker:
    """Takes the reply to an op; `raises`: with an exception."""

    def __init__(self, number: int, name: str, *, raises: bool) -> None:
        self.op = Op(Verb.ACQUIRE, MUTEX, name, f"id{number}|", LONG_LEASE)
        self.sent = now()
        self.deadline = self.sent + LIMIT
        self.replies = list[object]()
        self._raises = raises

    def answer(self, index: int, reply: object) -> None:
        del index
        self.replies.append(reply)
        if self._raises:
            raise LookupError("kilowatt")

    def fail(self, index: int, error: Exception, *, maybe: bool) -> None:
        del index, maybe
        self.replies.append(error)


async def test_a_handler_that_raises_leaves_its_name_to_the_next_op(path: Path, name: str) -> None:
    """The next op of the same name is carried out."""
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    async with Redlock(f"sqlite:///{path}", lease=LONG_LEASE, node_timeout=LIMIT) as client:
        await key_prefix(client, path, name)
        (node,) = nodes_of(client)
        askers = [Asker(0, name, raises=True), Asker(1, name, raises=False)]
        for each in askers:
            node.send(each.op, each)
        await until(lambda: all(each.replies for each in askers))
        assert isinstance(askers[1].replies[0], Refused)  # by the first one


async def next_is_carried_out(path: Path, watched: type[Watched], name: str, *, cancelled: bool) -> None:
    """What waits for the op of a transaction fails. Another op waits for the next transaction."""
    stands, goes_on = threading.Event(), threading.Event()
    loop, reported = asyncio.get_running_loop(), list[Any]()
    loop.set_exception_handler(lambda loop, context: reported.append(context))

    def stand_still(connection: Any) -> None:
        del connection
        stands.set()
        goes_on.wait(LIMIT)

    def fail(error: Exception | None) -> None:
        raise LookupError("kilowatt")

    async def wait_for(op: Any) -> None:
        await op

    def sent(number: int) -> Any:
        op = Op(Verb.ACQUIRE, MUTEX, f"{name}:{number}", f"id{number}|", LONG_LEASE)
        found, _ = store.decide("", op, lambda vote: None)
        return found

    store = SQLStore(f"sqlite:///{path}")
    async with Redlock(store, lease=LONG_LEASE, node_timeout=LIMIT) as client:
        await key_prefix(client, path, name)
        watched.before = stand_still
        first = sent(0)
        if cancelled:
            waiting = asyncio.create_task(wait_for(first))
            await until(stands.is_set)
            waiting.cancel()
        else:
            first.then(fail)
            await until(stands.is_set)
        following = asyncio.create_task(wait_for(sent(1)))
        await asyncio.sleep(0)
        goes_on.set()
        async with asyncio.timeout(LIMIT):
            await following
    assert [str(each["exception"]) for each in reported] == ([] if cancelled else ["kilowatt"])


async def key_prefix(client: Redlock, path: Path, name: str) -> str:
    """What the client puts before a name. Makes the row of that name."""
    async with client(name):
        pass
    ((found,),) = rows(path, f"SELECT resource_name FROM asynclock WHERE resource_name LIKE '%{name}'")
    return str(found).removesuffix(name)
