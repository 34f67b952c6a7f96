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
