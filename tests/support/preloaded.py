"""Importing this module imports the packages that the tests need and that take more than 10 ms each. One that is not
installed is left out: its tests say so."""

from __future__ import annotations

import contextlib
import importlib

for package in (
    "aiohttp.test_utils",
    "aiohttp.web",
    "aiosqlite",
    "anyio",
    "asyncmy",
    "asyncpg",
    "fakeredis",
    "fastapi.testclient",
    "hypothesis.stateful",
    "kazoo.client",
    "opentelemetry.exporter.prometheus",
    "opentelemetry.sdk.metrics",
    "pytest",
    "redis.asyncio.cluster",
    "redis.asyncio.sentinel",
    "rich.live",
    "sqlalchemy.dialects.mysql.asyncmy",
    "sqlalchemy.dialects.postgresql.asyncpg",
    "sqlalchemy.ext.asyncio",
    "trustme",
    "typer.testing",
    "uvicorn",
    "uvloop",
    "yaml",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(package)
