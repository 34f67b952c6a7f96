"""asynclock.fencing with Django: each test writes to a real database, in a program that configures Django once."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.programs import REPO

_numbers = itertools.count()
SNIPPETS = re.findall(r"```python\n(.*?)```", (REPO / "docs" / "fencing.md").read_text(), re.DOTALL)


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

_DJANGO_NO_AUTOCOMMIT = """
transaction.set_autocommit(False)
assert row.get().state == "new"
assert fenced_update(row.using("other"), "fence", newer, state="paid") == 1
try:
    print(fenced_update(row, "fence", older, state="late"))
except StaleToken:
    print("refused")
transaction.rollback()
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

_DJANGO_JOIN = """
from contextlib import nullcontext
from threading import Thread

class Customer(models.Model):
    email = models.CharField(max_length=20)
    class Meta:
        app_label = "shop"
        db_table = sys.argv[2] + "_customer"

class Sale(models.Model):
    customer = models.ForeignKey(Customer, models.CASCADE)
    state = models.CharField(max_length=20)
    fence = models.BigIntegerField(null=True)
    class Meta:
        app_label = "shop"
        db_table = sys.argv[2] + "_sale"

with connection.schema_editor() as editor:
    editor.create_model(Customer)
    editor.create_model(Sale)
Sale.objects.create(id=42, state="new", customer=Customer.objects.create(email="a@b"))
sales = Sale.objects.filter(customer__email="a@b")
other = Sale.objects.using("other").filter(id=42)

def write_late():
    try:
        print(fenced_update(sales, "fence", older, state="late"))
    except StaleToken:
        print("refused")
"""

_DJANGO_JOIN_CALLS = """
assert fenced_update(sales, "fence", newer, state="paid") == 1
assert fenced_update(sales.filter(id=1), "fence", newer, state="paid") == 0
for atomic in (nullcontext(), transaction.atomic()):
    with atomic:
        write_late()
print(sales.get().state, sales.get().fence == newer.fence)
connections.close_all()
"""

_DJANGO_ORDERED = """
class Owned(models.Model):
    owner = models.ForeignKey(Order, models.CASCADE, null=True)
    state = models.CharField(max_length=20)
    fence = models.BigIntegerField(null=True)
    class Meta:
        app_label = "shop"
        db_table = sys.argv[2] + "_owned"
        ordering = ["owner__state"]

with connection.schema_editor() as editor:
    editor.create_model(Owned)
Owned.objects.create(id=42, state="new")
with transaction.atomic():
    for rows in (Owned.objects.filter(id=42), Owned.objects.filter(id=42).distinct()):
        assert fenced_update(rows, "fence", newer, state="paid") == 1
        assert fenced_update(rows.filter(state="none"), "fence", newer, state="paid") == 0
        try:
            fenced_update(rows, "fence", older, state="late")
        except StaleToken:
            print("refused")
connections.close_all()
"""

_DJANGO_JOIN_LOCKED = """
def write_in_a_thread():
    write_late()
    connections.close_all()

waits = "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid))"
with transaction.atomic("other"):
    assert fenced_update(other, "fence", newer, state="paid") == 1
    with connections["other"].cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        (holder,) = cursor.fetchone()
    thread = Thread(target=write_in_a_thread)
    thread.start()
    with connection.cursor() as cursor:
        while thread.is_alive() and not cursor.execute(waits, [holder]).fetchone()[0]:
            thread.join(0.01)
thread.join()
print(sales.get().state, sales.get().fence == newer.fence)
connections.close_all()
"""

_DJANGO_JOIN_SELECTED = """
connection.features.update_can_self_select = False  # as that of MySQL

def write_between(execute, sql, *args):
    if sql.startswith("UPDATE"):
        assert "SELECT" not in sql
        assert fenced_update(other, "fence", newer, state="paid") == 1
    return execute(sql, *args)

with connection.execute_wrapper(write_between):
    write_late()
print(sales.get().state, sales.get().fence == newer.fence)
connections.close_all()
"""

_DJANGO_PARENTS = """
from asynclock import ConfigError

class Gift(Order):
    note = models.CharField(max_length=20)
    seal = models.BigIntegerField(null=True)
    class Meta:
        app_label = "shop"
        db_table = sys.argv[2] + "_gift"

class Paid(Order):
    class Meta:
        app_label = "shop"
        proxy = True

with connection.schema_editor() as editor:
    editor.create_model(Gift)
gifts = Gift.objects.filter(state="new")
Gift.objects.create(id=43, state="new", note="none")
for field, values in {"fence": {"note": "hi"}, "seal": {"state": "paid"}}.items():
    try:
        print(fenced_update(gifts, field, newer, **values))
    except ConfigError as refused:
        print(str(refused).partition(":")[0])
assert gifts.filter(note="none", fence=None, seal=None).count() == 1
print(fenced_update(gifts, "seal", newer, note="hi"), gifts.get().note)
print(fenced_update(Paid.objects.filter(id=42), "fence", newer, state="paid"))
connections.close_all()
"""

_DJANGO_SMALL = """
from asynclock import ConfigError

class Small(models.Model):
    fence = models.IntegerField(null=True)
    class Meta:
        app_label = "shop"
        db_table = sys.argv[2] + "_small"

with connection.schema_editor() as editor:
    editor.create_model(Small)
Small.objects.create(id=42)
try:
    print(fenced_update(Small.objects.filter(id=42), "fence", newer))
except ConfigError as refused:
    print(refused)
    assert Small.objects.get().fence is None
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
    pytest.importorskip({"postgresql": "psycopg", "mariadb": "pymysql"}[kind])
    url = urlsplit(request.getfixturevalue(f"{kind}_url"))
    database = {"NAME": url.path[1:], "USER": url.username, "HOST": url.hostname, "PORT": url.port}
    if kind == "postgresql":
        return {"ENGINE": "django.db.backends.postgresql", **database}
    return {"ENGINE": "django.db.backends.mysql", "OPTIONS": {"isolation_level": "repeatable read"}, **database}


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


def test_a_snapshot_without_autocommit(request: pytest.FixtureRequest) -> None:
    """A transaction is open then, also outside of `atomic()`."""
    assert django(_DJANGO_NO_AUTOCOMMIT, database_of_django(request, "mariadb")) == "refused\n"


def test_a_router_of_django_with_a_replica(request: pytest.FixtureRequest) -> None:
    """The replica lags, and has no greater token: the database that is written is asked, and says that the token is
    stale."""
    assert django(_DJANGO_ROUTER, database_of_django(request, "sqlite")) == "refused\nrefused\nnew paid\n"


@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "mariadb"])
def test_a_queryset_that_joins(request: pytest.FixtureRequest, kind: str) -> None:
    """Its rows are written under a newer token, and an older one is refused, in a transaction and without."""
    told = django(_DJANGO_JOIN + _DJANGO_JOIN_CALLS, database_of_django(request, kind))
    assert told == "refused\nrefused\npaid True\n"


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_a_queryset_that_is_ordered_by_a_relation(request: pytest.FixtureRequest, kind: str) -> None:
    """In a transaction, where PostgreSQL cannot lock what an outer join or a DISTINCT gives: absent and newer rows are
    told from each other all the same."""
    assert django(_DJANGO_ORDERED, database_of_django(request, kind)) == "refused\nrefused\n"


def test_a_queryset_that_joins_waits_for_a_newer_write(request: pytest.FixtureRequest) -> None:
    """The UPDATE under the older token waits for the row, and compares the token that the newer holder commits."""
    told = django(_DJANGO_JOIN + _DJANGO_JOIN_LOCKED, database_of_django(request, "postgresql"))
    assert told == "refused\npaid True\n"


@pytest.mark.parametrize("kind", ["sqlite", "mariadb"])
def test_a_newer_write_after_the_rows_of_a_join_were_selected(request: pytest.FixtureRequest, kind: str) -> None:
    """MySQL cannot select the rows in the UPDATE. The UPDATE compares the token again, after a newer holder's write."""
    told = django(_DJANGO_JOIN + _DJANGO_JOIN_SELECTED, database_of_django(request, kind))
    assert told == "refused\npaid True\n"


def test_fields_of_a_parent_model(request: pytest.FixtureRequest) -> None:
    """A token or a value in another table is refused, and nothing is written. A condition on one is not, and a proxy
    model has the table of its parent."""
    told = django(_DJANGO_PARENTS, database_of_django(request, "sqlite"))
    fence, state, *passed = told.splitlines()
    assert fence == "'fence' is in the table of Order, and not in that of Gift"
    assert state == "'state' is in the table of Order, and not in that of Gift"
    assert passed == ["1 hi", "1"]


@pytest.mark.parametrize(("kind", "told"), [("sqlite", "1"), ("mariadb", "'fence' is too small for a token")])
def test_a_field_that_is_too_small_for_a_token(request: pytest.FixtureRequest, kind: str, told: str) -> None:
    """Django would leave out the comparison. An integer of SQLite has 64 bits."""
    assert django(_DJANGO_SMALL, database_of_django(request, kind)).startswith(told)
