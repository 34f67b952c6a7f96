"""asynclock.fencing: the data refuses a write under an older token. Each test writes to a real database or server."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis, RedisCluster
from redis.exceptions import RedisClusterException
from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    Update,
    create_engine,
    func,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from asynclock import ConfigError, Lease, LockLost, Redlock, Unsupported, blocking
from asynclock.fencing import StaleToken, fenced, fenced_set, fenced_sync
from asynclock.stores.memory import MemoryStore
from tests.support.programs import REPO
from tests.support.services.cluster import Cluster

_numbers = itertools.count()
SNIPPETS = re.findall(r"```python\n(.*?)```", (REPO / "docs" / "fencing.md").read_text(), re.DOTALL)


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "fenced_orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str]
    fence: Mapped[int | None] = mapped_column(BigInteger)


def table() -> Table:
    """A table that no other test uses: all workers share one server of each kind."""
    columns = Column("id", Integer, primary_key=True), Column("state", String(20)), Column("fence", BigInteger)
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


@pytest.mark.parametrize("pattern", ["{}", "shop:{{{}}}:order"])
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


_DJANGO = """
import asyncio, json, sys
database = json.loads(sys.argv[1])
if database["ENGINE"].endswith("mysql"):
    import pymysql
    pymysql.version_info = (2, 2, 1, "final", 0)  # Django asks for a version of mysqlclient
    pymysql.install_as_MySQLdb()
import django
from django.conf import settings

settings.configure(DATABASES={"default": database, "other": database}, USE_TZ=True)
django.setup()
from django.db import connection, connections, models, transaction
from asgiref.sync import async_to_sync
from asynclock import Redlock
from asynclock.fencing import StaleToken, afenced_update, fenced_update

class Order(models.Model):
    state = models.CharField(max_length=20)
    fence = models.BigIntegerField(null=True)
    class Meta:
        app_label = "shop"
        db_table = sys.argv[2]

with connection.schema_editor() as editor:
    editor.create_model(Order)
Order.objects.create(id=42, state="new")
row = Order.objects.filter(id=42)

async def leases():
    async with Redlock("memory:") as client:
        async with client("order:42") as older:
            pass
        async with client("order:42") as newer:
            return older, newer

older, newer = asyncio.run(leases())
"""

_DJANGO_CALLS = """
async def in_a_block():
    async with Redlock("memory:") as client, client("order:42"):
        assert await afenced_update(row, "fence", state="paid") == 1
        assert await afenced_update(Order.objects.filter(id=1), "fence", state="paid") == 0
        try:
            await afenced_update(row, "fence", older, state="late")
        except StaleToken:
            print("refused")

asyncio.run(in_a_block())
row.update(fence=None)
exec(sys.argv[3])
pay(42, newer)
assert Order.objects.get(id=42).state == "paid"
assert fenced_update(row, "fence", newer, state="sent") == 1
assert fenced_update(row, "fence", newer, state="sent") == 1
assert fenced_update(Order.objects.filter(id=1), "fence", older, state="sent") == 0
for atomic in (False, True):
    try:
        if atomic:
            with transaction.atomic():
                fenced_update(row, "fence", older, state="late")
        else:
            fenced_update(row, "fence", older, state="late")
    except StaleToken:
        print("refused")
order = Order.objects.get(id=42)
print(order.state, order.fence == newer.fence)
connections.close_all()
"""

_DJANGO_SNAPSHOT = """
calls = {"sync": fenced_update, "async": async_to_sync(afenced_update)}
with transaction.atomic():
    assert row.get().state == "new"
    assert fenced_update(row.using("other"), "fence", newer, state="paid") == 1
    assert row.get().state == "new"
    try:
        print(calls[sys.argv[3]](row, "fence", older, state="late"))
    except StaleToken:
        print("refused")
print(row.get().state)
connections.close_all()
"""


_DJANGO_ROUTER = """
import copy
from contextlib import nullcontext
from django.test import override_settings

class Replicas:
    def db_for_read(self, model, **hints):
        return "replica"

    def db_for_write(self, model, **hints):
        return "default"

replica = copy.deepcopy(connections.databases["default"])
replica["NAME"] += "-replica"
connections.databases["replica"] = replica
with connections["replica"].schema_editor() as editor:
    editor.create_model(Order)
Order(id=42, state="new").save(using="replica")  # it lags: this row has no token
with override_settings(DATABASE_ROUTERS=[Replicas()]):
    assert fenced_update(row, "fence", newer, state="paid") == 1
    for atomic in (nullcontext(), transaction.atomic()):
        with atomic:
            try:
                print(fenced_update(row, "fence", older, state="late"))
            except StaleToken:
                print("refused")
    print(row.get().state, row.using("default").get().state)
connections.close_all()
"""


def django(program: str, database: dict[str, Any], *args: str) -> str:
    """The output of this program, which has a model, its row, and two leases; Django is configured once in a
    process."""
    pytest.importorskip("django")
    table = f"django_{os.getpid()}_{next(_numbers)}"
    command = [sys.executable, "-W", "error", "-c", _DJANGO + program, json.dumps(database), table, *args]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def database_of_django(request: pytest.FixtureRequest, kind: str) -> dict[str, Any]:
    """On MariaDB over PyMySQL; a transaction sees a snapshot there, which Django has turned off by default."""
    if kind == "sqlite":
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": str(request.getfixturevalue("tmp_path") / "data")}
    pytest.importorskip("pymysql")
    url = urlsplit(request.getfixturevalue("mariadb_url"))
    return {
        "ENGINE": "django.db.backends.mysql",
        "NAME": url.path[1:],
        "USER": url.username,
        "HOST": url.hostname,
        "PORT": url.port,
        "OPTIONS": {"isolation_level": "repeatable read"},
    }


@pytest.mark.parametrize("kind", ["sqlite", "mariadb"])
def test_a_queryset_of_django(request: pytest.FixtureRequest, kind: str) -> None:
    """In a program of its own, which configures Django, with the snippet of the page: in sync and in
    async code, in a transaction and without."""
    (snippet,) = (each for each in SNIPPETS if "Order.objects" in each)
    told = django(_DJANGO_CALLS, database_of_django(request, kind), snippet)
    assert told == "refused\nrefused\nrefused\nsent True\n"


@pytest.mark.parametrize("call", ["sync", "async"])
def test_a_snapshot_of_django_hides_no_greater_token(request: pytest.FixtureRequest, call: str) -> None:
    """A transaction on MariaDB has read the row before the newer holder wrote it, and still sees the older row. So
    does async code that `async_to_sync` calls in that transaction."""
    assert django(_DJANGO_SNAPSHOT, database_of_django(request, "mariadb"), call) == "refused\npaid\n"


def test_a_router_of_django_with_a_replica(request: pytest.FixtureRequest) -> None:
    """The replica lags, and has no greater token: the database that is written is asked, and says that the token is
    stale."""
    assert django(_DJANGO_ROUTER, database_of_django(request, "sqlite")) == "refused\nrefused\nnew paid\n"
