"""Names that `synchronized` and `once` make of the arguments of a call."""

from __future__ import annotations

import asyncio
import enum
from datetime import UTC, date, datetime, time, timedelta, timezone
from functools import partial
from typing import Any
from unittest.mock import AsyncMock
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest

from asynclock import ConfigError, Redlock, Skipped
from asynclock.locks.template import namer


class Colour(enum.Enum):
    """Names may be made of its members."""

    RED = "#f00"
    BLUE = "#00f"


class City(enum.StrEnum):
    BERLIN = "berlin"


class Text(str, enum.Enum):  # noqa: UP042 - programs have it
    """As in Python 3.10, where there is no StrEnum."""

    BERLIN = "berlin"


class Number(enum.IntEnum):
    SEVEN = 7


class Rights(enum.IntFlag):
    READ = 1
    WRITE = 2


class Holiday(date, enum.Enum):
    XMAS = 2026, 12, 25


class Empty(enum.StrEnum):
    NOTHING = ""


class Shouted(str):
    def __str__(self) -> str:
        return self.upper()


class Padded(int):
    def __str__(self) -> str:
        return f"{int(self):05}"


async def takes_one(a: object) -> None: ...


NAMES: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("order:{a}", (42,), {}, "order:42"),
    ("order:{a}", (), {"a": "x"}, "order:x"),
    ("order:{b}", (1,), {}, "order:2"),
    ("{rest[0]}-{a}", (1, 2, 9), {}, "9-1"),
    ("{more[k]}", (1,), {"k": 5}, "5"),
    ("order:2026-{a}", ("order-6",), {}, "order:2026-order-6"),
    ("mail:{a} sent", ("alice",), {}, "mail:alice sent"),
    ("{a} to {b}", ("not", "to"), {}, "n%6F%74 to %74%6F"),
    ("{a}:{b}", ("x:y", "z"), {}, "x%3Ay:z"),
    ("{a}:{b}", ("x", "y:z"), {}, "x:y%3Az"),
    ("{a}--{b}", ("x-", "y"), {}, "x%2D--y"),
    ("{a}", ("100%",), {}, "100%25"),
    ("{a}", ("größe",), {}, "größe"),
    ("{a}é{b}", ("é", "x"), {}, "%C3%A9éx"),
    ("{{{a}}}", (1,), {}, "{1}"),
    ("{a}", (UUID(int=1),), {}, "00000000-0000-0000-0000-000000000001"),
    ("day {a}", (date(2026, 1, 2),), {}, "day 2026-01-02"),
    ("{a}", (Colour.RED,), {}, "RED"),
    ("{a.year}", (date(2026, 1, 2),), {}, "2026"),
]


@pytest.mark.parametrize(("template", "args", "kwargs", "wanted"), NAMES)
def test_names_are_made_of_arguments(template: str, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: str) -> None:
    """Defaults count; separators inside values are escaped, so that two calls never share a name by accident."""

    async def function(a: object, b: object = 2, *rest: object, **more: object) -> None: ...

    assert namer(template, function)(*args, **kwargs) == wanted


@pytest.mark.parametrize("value", [1.5, None, object(), b"x", ["x"], {}, True, False, time(12)])
def test_values_that_name_nothing_are_refused(value: object) -> None:
    """A name contains no object's address, and no rounded float."""

    async def function(a: object) -> None: ...

    with pytest.raises(TypeError, match="does not name a lock"):
        namer("x:{a}", function)(value)


def test_an_empty_value_is_refused() -> None:
    """All calls without a value would share one name."""

    async def function(a: object, b: object = 2) -> None: ...

    for template in ("p{a}", "{a}:{b}"):
        for empty in ("", Empty.NOTHING):
            with pytest.raises(ConfigError, match="a='' does not name a lock"):
                namer(template, function)(empty)
    assert namer("p{a}", function)(0) == "p0"


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("order:{id}", "'id'"),
        ("order:{}", "a field needs the name of a parameter"),
        ("order:{0}", "a field needs the name of a parameter"),
        ("order:{a.}", r"the field \{a\.\} cannot be read"),
        ("order:{a[0]b}", r"the field \{a\[0\]b\} cannot be read"),
        ("", "a lock's name is empty"),
        ("asynclock~{a}", r"reserved: rename 'asynclock~\{a\}'"),
        ("asynclock~all", "reserved: rename 'asynclock~all'"),
        ("{a}\ud800", "lone surrogate"),
        ("order:{a!r}", "without"),
        ("order:{a:>3}", "without"),
        ("order:{a}{b}", "between"),
        ("order:{a", "no template"),
        (17, "template"),
    ],
)
def test_a_template_that_does_not_fit_is_refused_when_it_decorates(template: Any, match: str) -> None:
    """The error comes at import, not at the first call."""
    client = Redlock("redis://nowhere")

    async def function(a: int, b: int) -> None: ...

    with pytest.raises(ConfigError, match=match):
        client.synchronized(template)(function)
    with pytest.raises(ConfigError, match=match):
        client.once(template, within=60)(function)


def test_a_field_without_a_name_is_refused_for_a_function_that_takes_all() -> None:
    """Of a function that takes any arguments, too: all its calls would share one name."""
    with pytest.raises(ConfigError, match="a field needs the name of a parameter"):
        namer("order:{}", AsyncMock())


@pytest.mark.parametrize("template", ["{a}{{{b}", "{a}}}{b}", "{a}{{}}{b}"])
def test_values_stay_apart_with_only_braces_between_them(template: str) -> None:
    """Between two fields is only a literal brace: a value that has this brace does not run into the other one."""

    async def function(a: str, b: str) -> None: ...

    named = namer(template, function)
    between = template.replace("{{", "{").replace("}}", "}")[3:-3]
    assert named(f"x{between}y", "z") != named("x", f"y{between}z")


BERLIN, TOKYO = ZoneInfo("Europe/Berlin"), timezone(timedelta(hours=9))

EQUAL: list[tuple[object, object, str]] = [
    (City.BERLIN, "berlin", "berlin"),
    (Text.BERLIN, "berlin", "berlin"),
    (City.BERLIN, Text.BERLIN, "berlin"),
    (Shouted("berlin"), "berlin", "berlin"),
    (Number.SEVEN, 7, "7"),
    (Padded(7), 7, "7"),
    (Rights.READ | Rights.WRITE, 3, "3"),
    (Rights(0), 0, "0"),
    (Holiday.XMAS, date(2026, 12, 25), "2026-12-25"),
    (datetime(2026, 1, 2, 9, tzinfo=BERLIN), datetime(2026, 1, 2, 8, tzinfo=UTC), "2026-01-02T08%3A00%3A00+00%3A00"),
    (datetime(2026, 1, 2, 17, tzinfo=TOKYO), datetime(2026, 1, 2, 9, tzinfo=BERLIN), "2026-01-02T08%3A00%3A00+00%3A00"),
    (UUID(int=1), UUID("{00000000-0000-0000-0000-000000000001}"), "00000000-0000-0000-0000-000000000001"),
]


@pytest.mark.parametrize(("one", "other", "name"), EQUAL)
def test_equal_values_have_one_name(one: object, other: object, name: str) -> None:
    """A call with a member of an enum, and a call with its value, are calls for the same thing."""
    assert one == other
    named = namer("{a}", takes_one)
    assert (named(one), named(other)) == (name, name)


def test_values_that_differ_have_names_that_differ() -> None:
    """A datetime without a zone is no instant; the second half past two of an autumn night is another one."""
    night = datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN)
    values = [datetime(2026, 10, 25, 0, 30), date(2026, 10, 25), night, night.replace(fold=1), Colour.RED, Colour.BLUE]
    assert len({namer("{a}", takes_one)(each) for each in values}) == len(values)


def test_a_bool_is_refused() -> None:
    """It equals 1 or 0, and its text is another one. The message says why."""
    with pytest.raises(TypeError, match="a=bool does not name a lock: True equals 1"):
        namer("x:{a}", takes_one)(True)
    assert namer(lambda a: f"x:{a}", takes_one)(True) == "x:True"


async def test_calls_with_equal_values_exclude_each_other(redlock: Redlock, name: str) -> None:
    """The call with the member runs, so the call with its value is skipped."""
    running, go_on = asyncio.Event(), asyncio.Event()

    @redlock.once(name + ":{city}:{number}", within=60)
    async def count(city: str, number: int) -> None:
        running.set()
        await go_on.wait()

    first = asyncio.create_task(count(City.BERLIN, Number.SEVEN))
    await running.wait()
    assert await count("berlin", 7) is Skipped.RUNNING
    go_on.set()
    assert await first is None


async def test_a_name_that_is_a_member_of_an_enum_is_its_value(redlock: Redlock, name: str) -> None:
    """Also where the enum has another text: the key is made of the str."""
    member = enum.Enum("Names", {"ONE": name}, type=str).ONE
    assert str(member) == "Names.ONE"
    async with redlock(member):
        assert await redlock(name).locked()
    assert not await redlock(name).locked()


async def test_a_partial_and_a_mock_can_be_guarded(redlock: Redlock, name: str) -> None:
    """The arguments that a partial has count, too. A mock takes any arguments, and its keywords count."""
    seen: list[tuple[int, int, bool]] = []

    async def charge(order: int, fee: int = 1) -> None:
        seen.append((order, fee, await redlock(f"{name}:{order}:{fee}").locked()))

    guard = redlock.synchronized(name + ":{order}:{fee}")
    await guard(partial(charge, 7))()
    await guard(partial(charge, 7, fee=2))()
    await guard(partial(charge, fee=2))(7, fee=3)
    await guard(partial(partial(charge, 8), fee=2))(fee=4)
    assert seen == [(7, 1, True), (7, 2, True), (7, 3, True), (8, 4, True)]

    mock = AsyncMock(side_effect=charge)
    await guard(mock)(order=9, fee=9)
    mock.assert_awaited_once_with(order=9, fee=9)
    assert seen[-1] == (9, 9, True)
    with pytest.raises(TypeError, match="needs 'fee': give it as a keyword argument"):
        await guard(mock)(order=9)
    with pytest.raises(TypeError, match="'order'"):
        await guard(mock)(9, fee=9)


def test_a_partial_that_does_not_fit_is_refused() -> None:
    """The error names the function in it."""
    with pytest.raises(ConfigError, match="'b', which takes_one does not take; its parameters: a"):
        namer("{b}", partial(takes_one, 1))
