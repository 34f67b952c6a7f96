"""Text that other programs wrote: ids, hosts and notes of clients, and replies of servers. It is data: numbers in it
are read with limits, and it is shown without characters that could move a cursor or begin a line.

Each error of this package, each of its log lines and each line of its commands goes through `printable`.
"""

from __future__ import annotations

import re

LONGEST = 16
"""Digits of the longest number: those of 2^53, up to which all servers count exactly."""

_NUMBER = re.compile(r"[0-9]+")


def number_of(text: str, digits: int = LONGEST) -> int | None:
    """The number that a text is; None: it is none, or has more digits. `str.isdigit` takes more signs than `int` does,
    and `int` raises ValueError for thousands of digits. Pure."""
    return int(text) if len(text) <= digits and _NUMBER.fullmatch(text) else None


def printable(text: str) -> str:
    """The text with its control characters, line feeds and the like escaped. Pure."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def said(error: BaseException) -> str:
    """What an error says, in one line. Pure."""
    return printable(str(error) or repr(error))
