"""Which text a database can write: its encoding, and the character set of a connection. Pure.

A name with other characters is found here, before it is sent: at the server one of them fails the statement that it
shares with others. What is not in this table is left to the server, and to the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_UTF8MB3 = "utf8mb3"
"""Of MariaDB and MySQL: no character beyond U+FFFF."""


class Charset(NamedTuple):
    """One that has not all of Unicode."""

    name: str  # as the server says it
    codec: str  # as Python says it

    def lacks(self, texts: Iterable[str]) -> str:
        """The first character of these texts that it does not have; "" if it has them all."""
        return next((found for each in texts if not each.isascii() and (found := self._lacks(each))), "")

    def _lacks(self, text: str) -> str:
        if self.codec == _UTF8MB3:
            return next((each for each in text if each > "\uffff"), "")
        try:
            text.encode(self.codec)
        except UnicodeEncodeError as error:
            return text[error.start]
        return ""


_OF_POSTGRESQL = {
    **{f"LATIN{number}": f"iso8859_{part}" for number, part in enumerate((1, 2, 3, 4, 9, 10, 13, 14, 15, 16), 1)},
    **{f"ISO_8859_{part}": f"iso8859_{part}" for part in range(5, 9)},
    **{f"WIN{page}": f"cp{page}" for page in (866, 874, *range(1250, 1259))},
    "KOI8R": "koi8_r",
    "KOI8U": "koi8_u",
}

_OF_MYSQL = {
    **{f"cp{page}": f"cp{page}" for page in (850, 852, 866, 1250, 1251, 1256, 1257)},
    "ascii": "ascii",
    "greek": "iso8859_7",
    "hebrew": "iso8859_8",
    "koi8r": "koi8_r",
    "koi8u": "koi8_u",
    "latin1": "cp1252",
    "latin2": "iso8859_2",
    "latin5": "iso8859_9",
    "latin7": "iso8859_13",
    "tis620": "tis_620",
    "utf8": _UTF8MB3,
    "utf8mb3": _UTF8MB3,
}


def narrowest(backend: str, names: Sequence[str]) -> Charset | None:
    """The first of these character sets that has not all of Unicode, as far as that is known here."""
    known = _OF_POSTGRESQL if backend == "postgresql" else _OF_MYSQL
    return next((Charset(name, known[name]) for name in names if name in known), None)
