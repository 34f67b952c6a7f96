"""The functions of docs/migration.md keep the names of the version before."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from enum import StrEnum
from pathlib import Path

import pytest

from asynclock.locks.template import namer

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text("utf-8")
FUNCTIONS: list[Callable[[object], str]] = [eval(each) for each in re.findall(r"`(lambda .*?)` \|", PAGE)]


class Shop(StrEnum):
    BERLIN = "berlin"


class Sku(str):
    def __str__(self) -> str:
        return f"sku {self[:]}"


OLD = [
    (0, Shop.BERLIN, "shop:{value}", "shop:BERLIN"),
    (
        1,
        datetime(2026, 1, 2, 17, tzinfo=timezone(timedelta(hours=9))),
        "slot:{value}",
        "slot:2026-01-02T17%3A00%3A00+09%3A00",
    ),
    (2, Sku("7"), "item:{value}", "item:sku 7"),
    (2, Sku("7:8"), "item:{value}", "item:sku 7%3A8"),
    (2, Sku("7/8"), "item:{value}", "item:sku 7%2F8"),
    (2, Sku("7%3A"), "item:{value}", "item:sku 7%253A"),
    (3, True, "report:{value}", "report:True"),
]
"""The number of the function, a value, the template, and the name that version 0.1 made of them."""


@pytest.mark.parametrize(("number", "value", "template", "name"), OLD)
def test_a_function_of_the_page_keeps_the_old_name(number: int, value: object, template: str, name: str) -> None:
    """In the place of a template, which gives another name now."""

    async def call(value: object) -> None: ...

    assert namer(FUNCTIONS[number], call)(value) == name
    try:
        assert namer(template, call)(value) != name
    except TypeError:
        assert value is True
