"""Which characters the encodings of PostgreSQL have."""

from __future__ import annotations

import codecs

import pytest

from asynclock.stores.sql.charsets import _OF_POSTGRESQL, narrowest


@pytest.mark.parametrize(
    ("names", "text", "lacks"),
    [
        (["LATIN1", "UTF8"], "caf\xe9 \u20ac", "\u20ac"),
        (["LATIN9", "UTF8"], "caf\xe9 \u20ac", ""),
        (["UTF8", "WIN1252"], "\u03bb", "\u03bb"),
    ],
)
def test_the_first_character_that_is_missing(names: list[str], text: str, lacks: str) -> None:
    """Of the narrowest of the character sets of a connection."""
    charset = narrowest(names)
    assert charset is not None
    assert charset.lacks(["plain", text]) == lacks


@pytest.mark.parametrize("encoding", ["UTF8", "SQL_ASCII", "EUC_JP"])
def test_what_has_all_of_unicode_or_is_unknown_is_left_to_the_server(encoding: str) -> None:
    """It says which text it cannot write."""
    assert narrowest([encoding, "UTF8"]) is None


def test_python_has_each_codec() -> None:
    """Else an op would fail with a LookupError."""
    for codec in _OF_POSTGRESQL.values():
        codecs.lookup(codec)
