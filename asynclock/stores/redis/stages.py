"""The states of a node, and how far an attempt to connect has come."""

from __future__ import annotations

from enum import Enum

from asynclock.stores.lookups import NO_ANSWER


class NodeState(Enum):
    """Whether commands can be sent."""

    NEW = "new"
    UP = "up"
    DOWN = "down"
    CLOSED = "closed"


class Stage(Enum):
    """What an attempt to connect waits for. The value is the part of its error that says so."""

    CREDENTIALS = "no answer of the credential provider"
    LOOKUP = NO_ANSWER
    CONNECT = "no connection"
    TLS = "no TLS connection"
    LOGIN = "no reply to AUTH"
    HELLO = "no reply to HELLO"
