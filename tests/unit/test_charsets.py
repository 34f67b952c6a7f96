"""Which characters the character sets of databases have."""

from __future__ import annotations

import codecs

import pytest

from asynclock.stores.sql.charsets import _OF_MYSQL, _OF_POSTGRESQL, narrowest


@pytest.mark.parametrize(
    ("backend", "names", "text", "lacks"),
    [
        ("postgresql", ["LATIN1", "UTF8"], "caf\xe9 \u20ac", "\u20ac"),
        ("postgresql", ["LATIN9", "UTF8"], "caf\xe9 \u20ac", ""),
        ("postgresql", ["UTF8", "WIN1252"], "\u03bb", "\u03bb"),
        ("mysql", ["latin1", "latin1"], "caf\xe9 \u20ac", ""),
        ("mariadb", ["utf8mb4", "utf8mb3"], "\uffff\U00010000", "\U00010000"),
        ("mariadb", ["utf8mb3", "utf8mb3"], "\u20ac", ""),
    ],
)
def test_the_first_character_that_is_missing(backend: str, names: list[str], text: str, lacks: str) -> None:
    """Of the narrowest of the character sets of a connection."""
    charset = narrowest(backend, names)
    assert charset is not None
    assert charset.lacks(["plain", text]) == lacks


@pytest.mark.parametrize(
    ("backend", "names"),
    [
        *(("postgresql", [each, "UTF8"]) for each in ("UTF8", "SQL_ASCII", "EUC_JP")),
        *(("mysql", [each, each]) for each in ("utf8mb4", "gb18030")),
    ],
)
def test_what_has_all_of_unicode_or_is_unknown_is_left_to_the_server(backend: str, names: list[str]) -> None:
    """It says which text it cannot write."""
    assert narrowest(backend, names) is None


def test_python_has_each_codec() -> None:
    """Else an op would fail with a LookupError."""
    for codec in {*_OF_POSTGRESQL.values(), *_OF_MYSQL.values()} - {"utf8mb3"}:
        codecs.lookup(codec)
