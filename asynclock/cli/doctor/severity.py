"""A finding of `asynclock doctor`, and the terms by which it judges."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from asynclock._options import ClientSettings

_CORRECT = "Correct its url (user, password, database, TLS) or the server, as the error says."
"""The advice for an error that lasts until the user acts."""


def advice_for(remedy: str, *, misconfigured: bool, otherwise: str = "Start it, or correct its url.") -> str:
    """What to do about a server that does not answer. `remedy`: what its error says about that. Pure."""
    if remedy:
        return f"{remedy[0].upper()}{remedy[1:]}."
    return _CORRECT if misconfigured else otherwise


class Severity(IntEnum):
    """Its number is the exit code."""

    OK = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check."""

    severity: Severity
    check: str
    nodes: tuple[str, ...]
    """The servers that it is about."""
    what: str
    risk: str
    """What could happen."""
    advice: str
    """What to do."""


CONNECT = ClientSettings().connect_timeout
"""The default connect_timeout of clients, in seconds."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The options of the clients, as the doctor knows them."""

    prefix: str
    lease: float
    max_lease: float
    node_timeout: float
    trust_restarts: bool = False
    connect_timeout: float = CONNECT
