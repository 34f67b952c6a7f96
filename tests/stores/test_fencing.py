"""asynclock.fencing: the data refuses a write under an older token. Each test writes to a real database or server."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis as redis_sync
from redis.asyncio import Redis, RedisCluster
from redis.exceptions import RedisClusterException
from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    ForeignKey,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    Update,
    create_engine,
    func,
    select,
    text,
    update,
)
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, registry
from sqlalchemy.types import TypeDecorator, TypeEngine

from asynclock import ConfigError, Lease, LockLost, Redlock, Unsupported, blocking
from asynclock.fencing import StaleToken, fenced, fenced_set, fenced_sync
from asynclock.stores.memory import MemoryStore
from tests.support.services.cluster import Cluster

_numbers = itertools.count()


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "fenced_orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str]
    fence: Mapped[int | None] = mapped_column(BigInteger)


def table(kind: TypeEngine[int] | None = None) -> Table:
    """A table that no other test uses: all workers share one server of each kind."""
    fence = Column("fence", kind or BigInteger())
    columns = Column("id", Integer, primary_key=True), Column("state", String(20)), fence
    return Table(f"fenced_{os.getpid()}_{next(_numbers)}", MetaData(), *columns)


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
async def engine(request: pytest.FixtureRequest, tmp_path: Any) -> AsyncIterator[AsyncEngine]:
    """An engine on each database."""
    if request.param == "sqlite":
        url = f"sqlite+aiosqlite:///{tmp_path}/data"
    else:
        where = request.getfixturevalue(f"{request.param}_url").partition("://")[2]
        url = {"postgresql": "postgresql+asyncpg://", "mariadb": "mysql+asyncmy://"}[request.param] + where
    engine = create_async_engine(url)
    yield engine
    await engine.dispose()


@pytest.fixture
async def leases() -> AsyncIterator[tuple[Lease, Lease]]:
    """Of one name: that of a holder which was overtaken, and that of the holder after it."""
    async with Redlock(MemoryStore()) as client:
        older = await client("order:42").acquire(timeout=None)
        await older.release()
        newer = await client("order:42").acquire(timeout=None)
        yield older, newer
        if newer.held:
            await newer.release()


async def test_an_older_token_is_refused(engine: AsyncEngine, leases: tuple[Lease, Lease]) -> None:
    """The first write sets the token where it is NULL, two writes of one lease pass, and the older one changes
    nothing."""
    older, newer = leases
    orders = table()
    async with engine.begin() as connection:
        await connection.run_sync(orders.metadata.create_all)
        await connection.execute(orders.insert().values(id=42, state="new"))

    async def write(state: str, lease: Lease) -> int:
        async with engine.begin() as connection:
            changed = update(orders).where(orders.c.id == 42).values(state=state)
            return (await fenced(connection, changed, orders.c.fence, lease)).rowcount

    assert await write("older, in time", older) == 1
    assert [await write(state, newer) for state in ("newer", "newer", "paid")] == [1, 1, 1]
    with pytest.raises(StaleToken, match=rf"token {older.fence} of 'order:42' .*fence") as refused:
        await write("older, too late", older)
    assert refused.value.name == "order:42"
    async with engine.connect() as connection:
        assert (await connection.execute(select(orders))).one() == (42, "paid", newer.fence)


async def test_a_row_that_is_absent_is_not_stale(engine: AsyncEngine, leases: tuple[Lease, Lease]) -> None:
    """Its update changes no row, as ever."""
    orders = table()
    async with engine.begin() as connection:
        await connection.run_sync(orders.metadata.create_all)
        changed = update(orders).where(orders.c.id == 42).values(state="paid")
        assert (await fenced(connection, changed, orders.c.fence, leases[0])).rowcount == 0


async def test_a_snapshot_hides_no_greater_token(engine: AsyncEngine, leases: tuple[Lease, Lease]) -> None:
    """A transaction has read the row before the newer holder wrote it: MariaDB would show it the older row again."""
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite lets no transaction write that has read an older state")
    older, newer = leases
    orders = table()
    changed = update(orders).where(orders.c.id == 42).values(state="paid")
    async with engine.begin() as connection:
        await connection.run_sync(orders.metadata.create_all)
        await connection.execute(orders.insert().values(id=42, state="new", fence=older.fence))
    async with engine.begin() as stale:
        await stale.execute(select(orders))
        async with engine.begin() as connection:
            await fenced(connection, changed, orders.c.fence, newer)
        with pytest.raises(StaleToken):
            await fenced(stale, changed, orders.c.fence, older)


async def test_sessions_and_mapped_columns(tmp_path: Any, leases: tuple[Lease, Lease]) -> None:
    """Of the ORM, async and not; without a lease, that of the block counts."""
    older, newer = leases
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/data")
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with AsyncSession(engine) as session:
        session.add(order := Order(id=42, state="new"))
        await session.commit()
        changed = update(Order).where(Order.id == 42).values(state="paid")
        async with newer:
            await fenced(session, changed, Order.fence)
            await session.commit()
        await session.refresh(order)
        assert (order.state, order.fence) == ("paid", newer.fence)
    await engine.dispose()
    plain = create_engine(f"sqlite:///{tmp_path}/data")
    with Session(plain) as session, pytest.raises(StaleToken):
        fenced_sync(session, changed, Order.fence, older)
    plain.dispose()


def orders_in_sqlite(path: Any) -> tuple[Engine, Update]:
    """A database with order 42, and an UPDATE of it."""
    engine = create_engine(f"sqlite:///{path}/data")
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add(Order(id=42, state="new"))
    return engine, update(Order).where(Order.id == 42).values(state="paid")


@pytest.mark.parametrize("within", [False, True], ids=["alone", "in another block"])
def test_the_lost_block_of_a_thread(tmp_path: Any, shared_urls: list[str], name: str, within: bool) -> None:
    """The block of a thread goes on after a loss. Its own token is compared, although it is no longer held, and not
    that of the block around it, which belongs to another name."""
    engine, changed = orders_in_sqlite(tmp_path)
    with blocking.Redlock(shared_urls[0]) as client, blocking.Redlock(shared_urls[0]) as other, ExitStack() as around:
        if within:
            around.enter_context(client(f"{name}:outer"))
        with pytest.raises(LockLost), client(name) as lost:
            assert other.break_lock(name)
            assert lost.wait_lost()
            with other(name) as newer, Session(engine) as session, session.begin():
                fenced_sync(session, changed, Order.fence, newer)
            with Session(engine) as session, pytest.raises(StaleToken, match=f"token {lost.fence} of '{name}'"):
                fenced_sync(session, changed, Order.fence)
    engine.dispose()


async def test_a_lost_block_that_is_not_cancelled(tmp_path: Any, shared_urls: list[str], name: str) -> None:
    """As that of a thread, also after a further block in it has ended. After its end the block around it counts."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/data")
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    changed = update(Order).where(Order.id == 42).values(state="paid")
    async with (
        Redlock(shared_urls[0]) as client,
        Redlock(shared_urls[0]) as other,
        AsyncSession(engine) as session,
        client(f"{name}:outer") as outer,
    ):
        session.add(order := Order(id=42, state="new"))
        await session.commit()
        with pytest.raises(LockLost):
            async with client(name, cancel_on_lost=False) as lost:
                assert await other.break_lock(name)
                assert await lost.wait_lost()
                async with client(f"{name}:inner"):
                    pass
                async with other(name) as newer:
                    await fenced(session, changed, Order.fence, newer)
                with pytest.raises(StaleToken, match=f"token {lost.fence} of '{name}'"):
                    await fenced(session, changed, Order.fence)
        await session.execute(update(Order).values(fence=None))
        await fenced(session, changed, Order.fence)
        await session.refresh(order)
        assert order.fence == outer.fence
    await engine.dispose()


def test_a_session_that_reads_from_a_replica(tmp_path: Any, leases: tuple[Lease, Lease]) -> None:
    """The replica lags, and has no greater token: the database that is written is asked, and says that the token is
    stale."""
    older, newer = leases
    for each in ("leader", "replica"):
        (tmp_path / each).mkdir()
    leader, changed = orders_in_sqlite(tmp_path / "leader")
    replica, _ = orders_in_sqlite(tmp_path / "replica")

    class RoutingSession(Session):
        """That of SQLAlchemy's page on custom vertical partitioning."""

        def get_bind(self, mapper: Any = None, *, clause: Any = None, **_: Any) -> Engine:
            return leader if self._flushing or isinstance(clause, Update) else replica

    with RoutingSession() as session, session.begin():
        fenced_sync(session, changed, Order.fence, newer)
    with RoutingSession() as session, pytest.raises(StaleToken):
        fenced_sync(session, changed, Order.fence, older)
    for engine in (leader, replica):
        engine.dispose()


async def mapped_order(engine: AsyncEngine) -> Any:
    """A mapped class with order 42, in a table of its own."""
    orders = table()
    async with engine.begin() as connection:
        await connection.run_sync(orders.metadata.create_all)
        await connection.execute(orders.insert().values(id=42, state="new"))
    mapped = type("MappedOrder", (), {})
    registry().map_imperatively(mapped, orders)
    return mapped


async def test_an_object_has_the_values_that_were_written(engine: AsyncEngine, leases: tuple[Lease, Lease]) -> None:
    """A session does not have to read it again."""
    mapped = await mapped_order(engine)
    async with AsyncSession(engine) as session:
        order = await session.get_one(mapped, 42)
        changed = update(mapped).where(mapped.id == 42).values(state="paid")
        assert (await fenced(session, changed, mapped.fence, leases[1])).rowcount == 1
        assert (order.state, order.fence) == ("paid", leases[1].fence)


async def test_an_object_has_no_value_that_was_refused(engine: AsyncEngine, leases: tuple[Lease, Lease]) -> None:
    """A session has loaded the row before a newer holder wrote it. On MariaDB it reads it again after a refusal."""
    older, newer = leases
    mapped = await mapped_order(engine)
    changed = update(mapped).where(mapped.id == 42)
    async with AsyncSession(engine) as session:
        order = await session.get_one(mapped, 42)
        async with engine.begin() as connection:
            await fenced(connection, changed.values(state="paid"), mapped.fence, newer)
        with pytest.raises(StaleToken):
            await fenced(session, changed.values(state="late"), mapped.fence, older)
        assert vars(order).get("state", "expired") in {"new", "expired"}


async def test_a_scoped_session(engine: AsyncEngine, leases: tuple[Lease, Lease]) -> None:
    """The UPDATE is in the transaction of its session, as of any other one."""
    older, newer = leases
    mapped = await mapped_order(engine)
    changed = update(mapped).where(mapped.id == 42).values(state="paid")
    scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
    own: Any = scoped
    async with scoped() as session:
        assert (await fenced(own, changed, mapped.fence, newer)).rowcount == 1
        assert (await session.get_one(mapped, 42)).fence == newer.fence
        with pytest.raises(StaleToken):
            await fenced(own, changed, mapped.fence, older)
    await scoped.remove()


@pytest.mark.parametrize("own", [None, "evaluate"], ids=["default", "evaluate"])
def test_an_object_whose_row_was_left_out(tmp_path: Any, leases: tuple[Lease, Lease], own: str | None) -> None:
    """Of several rows, the object of the one with a greater token keeps its values. A statement that has an option of
    its own keeps the option: "evaluate" compares the tokens that were loaded."""
    older, newer = leases
    engine, changed = orders_in_sqlite(tmp_path)
    late = update(Order).values(state="late")
    if own:
        late = late.execution_options(synchronize_session=own)
    with Session(engine) as session:
        session.add(Order(id=43, state="new"))
        session.commit()
        orders = [session.get_one(Order, each) for each in (42, 43)]
        with engine.begin() as connection:
            fenced_sync(connection, changed, Order.fence, newer)
        assert fenced_sync(session, late, Order.fence, older).rowcount == 1
        assert [each.state for each in orders] == (["late", "late"] if own else ["new", "late"])
    engine.dispose()


def test_an_update_whose_rows_are_not_counted(tmp_path: Any, leases: tuple[Lease, Lease]) -> None:
    """SQLite's driver gives -1 for an UPDATE that begins with WITH. An older token is refused, a newer one is not."""
    older, newer = leases
    engine, changed = orders_in_sqlite(tmp_path)
    new = select(Order.id).where(Order.state != "sent").cte("new")
    changed = changed.where(Order.id.in_(select(new.c.id)))
    with engine.begin() as connection:
        assert fenced_sync(connection, changed, Order.__table__.c.fence, newer).rowcount == -1
        with pytest.raises(StaleToken):
            fenced_sync(connection, changed, Order.__table__.c.fence, older)
    engine.dispose()


async def test_an_update_with_returning_is_refused(tmp_path: Any, leases: tuple[Lease, Lease]) -> None:
    """Before it is sent: its result does not tell on each database how many rows it changed."""
    orders = table()
    changed = update(orders).where(orders.c.id == 42).values(state="paid").returning(orders.c.id)
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/data")
    async with engine.begin() as connection:
        await connection.run_sync(orders.metadata.create_all)
        await connection.execute(orders.insert().values(id=42, state="new"))
        with pytest.raises(ConfigError, match="RETURNING"):
            await fenced(connection, changed, orders.c.fence, leases[1])
        assert (await connection.execute(select(orders))).one() == (42, "new", None)
    await engine.dispose()


def test_a_stale_write_that_its_own_condition_leaves_out(tmp_path: Any, leases: tuple[Lease, Lease]) -> None:
    """It changes nothing, and is not told from a row that is absent."""
    older, newer = leases
    engine, changed = orders_in_sqlite(tmp_path)
    with Session(engine) as session:
        fenced_sync(session, changed, Order.fence, newer)
        assert fenced_sync(session, changed.where(Order.state == "new"), Order.fence, older).rowcount == 0
        assert session.get_one(Order, 42).fence == newer.fence
    engine.dispose()


class OwnBase(DeclarativeBase):
    """Of tables that no other process uses."""


class Note(OwnBase):
    __tablename__ = f"fenced_notes_{os.getpid()}"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(20))
    fence: Mapped[int | None] = mapped_column(BigInteger)
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "note"}  # noqa: RUF012 - as SQLAlchemy's page


class Letter(Note):
    __tablename__ = f"fenced_letters_{os.getpid()}"
    id: Mapped[int] = mapped_column(ForeignKey(Note.id), primary_key=True)
    state: Mapped[str] = mapped_column(String(20))
    seal: Mapped[int | None] = mapped_column(BigInteger)
    __mapper_args__ = {"polymorphic_identity": "letter"}  # noqa: RUF012 - as SQLAlchemy's page


class Memo(Note):
    __mapper_args__ = {"polymorphic_identity": "memo"}  # noqa: RUF012 - as SQLAlchemy's page


def test_a_column_of_another_table_is_refused(mariadb_url: str, leases: tuple[Lease, Lease]) -> None:
    """MariaDB would update both tables without a join. A column of the same table is not refused, whether it is named
    by a class, by its parent in one table, or by an alias."""
    older, newer = leases
    engine = create_engine(f"mysql+pymysql://{mariadb_url.partition('://')[2]}")
    OwnBase.metadata.create_all(engine)
    letters = update(Letter).where(Letter.id == 1).values(state="late")
    with Session(engine) as session:
        session.add_all([Letter(id=1, state="new", fence=newer.fence), Memo(id=2)])
        session.commit()
        with pytest.raises(ConfigError, match=r"fence is in the table fenced_notes_\d+, .* of fenced_letters_\d+"):
            fenced_sync(session, letters, Letter.fence, older)
        session.rollback()
        assert session.get_one(Letter, 1).state == "new"
        for seal in (Letter.seal, Letter.__table__.c.seal):
            assert fenced_sync(session, letters, seal, newer).rowcount == 1
        other = Note.__table__.alias()
        for changed, fence in ((update(Memo), Note.fence), (update(Note), Note.fence), (update(other), other.c.fence)):
            assert fenced_sync(session, changed.values(kind="memo"), fence, newer).rowcount >= 1
        session.rollback()
    OwnBase.metadata.drop_all(engine)
    engine.dispose()


class Counted(TypeDecorator[int]):
    """A type of the program's own, over one that is too small."""

    impl = Integer
    cache_ok = True


@pytest.mark.parametrize(
    "kind", [Integer(), SmallInteger(), Counted(), BigInteger().with_variant(Integer(), "mysql", "mariadb")]
)
async def test_a_column_that_is_too_small_for_a_token(mariadb_url: str, leases: tuple[Lease, Lease], kind: Any) -> None:
    """MariaDB without strict mode stores the greatest number that fits: then no token would be stale."""
    orders = table(kind)
    engine = create_async_engine(f"mysql+asyncmy://{mariadb_url.partition('://')[2]}")
    async with engine.connect() as connection:
        await connection.execute(text("SET sql_mode = ''"))
        await connection.run_sync(orders.metadata.create_all)
        await connection.execute(orders.insert().values(id=42, state="new"))
        changed = update(orders).where(orders.c.id == 42).values(state="paid")
        with pytest.raises(ConfigError, match="a token needs 64 bits"):
            await fenced(connection, changed, orders.c.fence, leases[1])
        await connection.rollback()
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    async with autocommit.connect() as connection:
        await connection.execute(orders.insert().values(id=43, state="new"))
        with pytest.raises(ConfigError, match="a token needs 64 bits"):
            await fenced(connection, changed.where(orders.c.id == 43), orders.c.fence, leases[1])
        assert (await connection.execute(select(orders.c.state).where(orders.c.id == 43))).scalar() == "new"
    async with AsyncSession(engine) as session:
        with pytest.raises(ConfigError, match="a token needs 64 bits"):
            await fenced(session, changed, orders.c.fence, leases[1])
    await engine.dispose()


async def test_criteria_that_only_the_database_evaluates(tmp_path: Any, leases: tuple[Lease, Lease]) -> None:
    """The ORM then fetches the rows that changed, with RETURNING; the older token is refused all the same."""
    older, newer = leases
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/data")
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    changed = update(Order).where(func.lower(Order.state) == "new").values(state="NEW")
    async with AsyncSession(engine) as session:
        session.add(Order(id=42, state="new"))
        assert (await fenced(session, changed, Order.fence, newer)).rowcount == 1
        with pytest.raises(StaleToken):
            await fenced(session, changed, Order.fence, older)
    await engine.dispose()


async def test_without_a_token_nothing_is_written(shared_urls: list[str], name: str) -> None:
    """No lease, or one without a token: an error that says so."""
    async with Redis.from_url(shared_urls[0]) as redis, Redlock(MemoryStore()) as client:
        with pytest.raises(ConfigError, match="no lease"):
            await fenced_set(redis, name, "paid")
        async with client("order:42", fencing=False):
            with pytest.raises(Unsupported, match="no fencing token"):
                await fenced_set(redis, name, "paid")
        assert not await redis.exists(name)


async def test_a_key_of_redis(shared_urls: list[str], name: str, leases: tuple[Lease, Lease]) -> None:
    """It is set under a token that is not smaller, and keeps its value else. Tokens are compared exactly."""
    older, newer = leases
    async with Redis.from_url(shared_urls[0], decode_responses=True) as redis:
        await fenced_set(redis, name, "older", older)
        for value in ("newer", "paid"):
            await fenced_set(redis, name, value, newer)
        with pytest.raises(StaleToken):
            await fenced_set(redis, name, "too late", older)
        assert await redis.get(name) == "paid"
        await redis.set(f"{{{name}}}:fence", f"1{'0' * len(str(newer.fence))}")  # more digits, and a smaller text
        with pytest.raises(StaleToken):
            await fenced_set(redis, name, "too late", newer)


async def test_a_pipeline_is_refused(
    shared_urls: list[str], shared_cluster: Cluster, name: str, leases: tuple[Lease, Lease]
) -> None:
    """And the write is not queued: a pipeline cannot tell whether the token is stale."""
    host, port = shared_cluster.members[0].address.split(":")
    async with Redis.from_url(shared_urls[0]) as redis, RedisCluster(host=host, port=int(port)) as cluster:
        for client in (redis, cluster):
            own: Any = client.pipeline()
            with pytest.raises(ConfigError, match="pipeline"):
                await fenced_set(own, name, "paid", leases[1])
            assert await own.execute() == []
    blocking_clients: list[Any] = [redis_sync.Redis.from_url(shared_urls[0]), redis_sync.RedisCluster(host, int(port))]
    for each in blocking_clients:
        with each, pytest.raises(ConfigError, match="pipeline"):
            await fenced_set(each.pipeline(), name, "paid", leases[1])


async def test_a_key_in_braces_has_a_token_of_its_own(
    shared_urls: list[str], name: str, leases: tuple[Lease, Lease]
) -> None:
    """The token of the key without the braces belongs to another lock, and so does that of a key with them turned
    round."""
    older, newer = leases
    async with Redis.from_url(shared_urls[0]) as redis:
        for key in (name, f"{name}}}{{"):
            await fenced_set(redis, key, "newer", newer)
        await fenced_set(redis, f"{{{name}}}", "older", older)
        assert await redis.mget(name, f"{name}}}{{", f"{{{name}}}") == [b"newer", b"newer", b"older"]


@pytest.mark.parametrize("pattern", ["{}", "shop:{{{}}}:order", "{{{}}}"])
async def test_keys_of_a_cluster(shared_cluster: Cluster, name: str, pattern: str, leases: tuple[Lease, Lease]) -> None:
    """The token is in the slot of the key, with a hash tag and without one."""
    key = pattern.format(name)
    host, port = shared_cluster.members[0].address.split(":")
    async with RedisCluster(host=host, port=int(port)) as redis:
        await fenced_set(redis, key, "paid", leases[1])
        with pytest.raises(StaleToken):
            await fenced_set(redis, key, "too late", leases[0])


@pytest.mark.parametrize("pattern", ["{}}}", "{{}}{}"])
async def test_a_closing_brace_without_a_tag(
    shared_urls: list[str], shared_cluster: Cluster, name: str, pattern: str, leases: tuple[Lease, Lease]
) -> None:
    """No other key is in the slot of such a key: one server fences it, and a cluster refuses it and writes nothing."""
    older, newer = leases
    key = pattern.format(name)
    async with Redis.from_url(shared_urls[0]) as redis:
        await fenced_set(redis, key, "paid", newer)
        with pytest.raises(StaleToken):
            await fenced_set(redis, key, "too late", older)
        assert await redis.get(key) == b"paid"
    host, port = shared_cluster.members[0].address.split(":")
    async with RedisCluster(host=host, port=int(port)) as redis:
        with pytest.raises(RedisClusterException, match="slot"):
            await fenced_set(redis, key, "paid", newer)
        assert not await redis.exists(key)
