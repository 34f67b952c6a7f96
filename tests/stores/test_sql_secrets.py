"""Errors of SQLAlchemy show no parameters of statements: among them are the ids of holders, with which a hold can be
ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from asynclock import QuorumUnavailable, Redlock
from asynclock.stores import SQLStore

REFUSES = "CREATE TRIGGER no BEFORE INSERT ON asynclock BEGIN SELECT RAISE(ABORT, 'refused by a trigger'); END"


async def test_an_error_of_a_statement_shows_no_id(tmp_path: Path) -> None:
    """Over an engine of the user, too, whose own statements show theirs."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'locks.db'}")
    async with Redlock(SQLStore(engine), patience=0.5, metadata="of my host") as client:
        async with client("order:1"):
            pass
        async with engine.begin() as database:
            await database.execute(text(REFUSES))
        with pytest.raises(QuorumUnavailable, match="refused by a trigger") as refused:
            await client("order:2").acquire(timeout=0.5)
    await engine.dispose()
    told = f"{refused.value} {refused.value.__cause__}"
    assert "of my host" not in told
    assert "parameters hidden" in told
