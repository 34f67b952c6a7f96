"""What the exceptions of kazoo mean for a lock."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from kazoo.exceptions import (
    AuthFailedError,
    BadArgumentsError,
    ConnectionClosedError,
    ConnectionLoss,
    InvalidACLError,
    KazooException,
    NoAuthError,
    QuotaExceededError,
    SessionExpiredError,
    UnimplementedError,
)

from asynclock._errors import ConfigError
from asynclock._untrusted import said

if TYPE_CHECKING:
    from collections.abc import Iterator

_WITH_TTL = "CreateTTL"
"""The request of `client.py` that makes a TTL node."""

_REFUSED = (AuthFailedError, InvalidACLError, NoAuthError)

HOPELESS = (*_REFUSED, BadArgumentsError, QuotaExceededError, UnimplementedError)
"""The servers did nothing, and will not do it the next time."""

LOST = (ConnectionClosedError, ConnectionLoss, SessionExpiredError)
"""The connection that had the request is lost. There may be another one by now."""


def error_of(label: str, error: Exception) -> Exception:
    """The error to tell: a ConfigError where only the user can help. Pure."""
    if isinstance(error, NoAuthError) and str(error):  # `Connection` says which permission
        return ConfigError(
            f"{label}: NoAuthError: this user lacks the permission {said(error)}: "
            "give zookeeper://user:password@host, or let the owner of the path grant all permissions (setAcl)"
        )
    if isinstance(error, _REFUSED):
        return ConfigError(
            f"{label}: {_named(error)}: this user may not create, read or delete nodes there: "
            "give zookeeper://user:password@host, or let the owner of the path grant all permissions"
        )
    if isinstance(error, QuotaExceededError):
        return ConfigError(f"{label}: the quota of the path is used up: raise it")
    if isinstance(error, UnimplementedError) and str(error) != _WITH_TTL:  # `Connection` says what they lack
        return ConfigError(
            f"{label}: the servers do not know the request {said(error)}: they need version 3.5 or later"
        )
    if isinstance(error, UnimplementedError):
        return ConfigError(
            f"{label}: the servers have no TTL nodes: start them with zookeeper.extendedTypesEnabled=true, or leave "
            "ttl_nodes out"
        )
    if isinstance(error, KazooException):
        return ConnectionError(f"{label}: {_named(error)}")
    return error


@contextmanager
def explained(label: str) -> Iterator[None]:
    """For a question of an operator: raise `error_of` in place of an error of kazoo."""
    try:
        yield
    except Exception as error:
        raise error_of(label, error) from None


def _named(error: Exception) -> str:
    name = type(error).__name__
    return f"{name} ({said(error)})" if str(error) and str(error) != "()" else name
