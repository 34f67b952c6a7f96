"""Which text a PostgreSQL can write: its encoding, and that of a connection. Pure.

A name with other characters is found here, before it is sent: at the server one of them fails the statement that it
shares with others. What is not in this table is left to the server, and to the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Charset(NamedTuple):
    """One that has not all of Unicode."""

    name: str  # as the server says it
    codec: str  # as Python says it

    def lacks(self, texts: Iterable[str]) -> str:
        """The first character of these texts that it does not have; "" if it has them all."""
        return next((found for each in texts if not each.isascii() and (found := self._lacks(each))), "")

    def _lacks(self, text: str) -> str:
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


def narrowest(names: Sequence[str]) -> Charset | None:
    """The first of these character sets that has not all of Unicode, as far as that is known here."""
    return next((Charset(name, _OF_POSTGRESQL[name]) for name in names if name in _OF_POSTGRESQL), None)
