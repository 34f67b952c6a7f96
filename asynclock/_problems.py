"""What a web application answers to an error of a lock, and to a readiness probe. Pure; knows no framework.

The bodies are problem details (RFC 9457). They are the same for all locks and servers: no name of a lock, no holder and
no address of a node goes to a client.

Source: https://www.rfc-editor.org/rfc/rfc9457
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from asynclock._errors import ConfigError, LockError, LockLost, LockTimeout, QuorumUnavailable, StaleToken

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asynclock.info import Health

ANSWERED: tuple[type[LockError], ...] = (LockTimeout, QuorumUnavailable, LockLost, StaleToken)
"""The errors that `answer_to` answers. The others are faults of the program, for a 500."""

BUSY_STATUS = 409
PROBLEM_JSON = "application/problem+json"

_RETRY_AFTER = "1"  # seconds; a waiter is notified of a release, so a client that comes back soon waits in the queue
_BUSY = "busy", "Another request is working on this. Try again."
_UNAVAILABLE = "unavailable", "The lock service is out of reach. Try again."
_LOST = "lost", "The lock was lost during the request. Parts of the request may have been carried out."
_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "code"],
    "properties": {
        "type": {"type": "string", "format": "uri-reference"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string", "enum": [_BUSY[0], _UNAVAILABLE[0], _LOST[0]]},
    },
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A response, as every framework can make it."""

    status: int
    headers: Mapping[str, str]
    """With Content-Type, and without Content-Length."""
    body: bytes


def answer_to(error: LockError, busy_status: int = BUSY_STATUS) -> Answer | None:
    """The answer to an error that a request ended with: LockTimeout `busy_status`, QuorumUnavailable, LockLost and
    StaleToken 503. None: another error, which is a fault of the program."""
    match error:
        case LockTimeout():
            return _problem(busy_status, *_BUSY)
        case QuorumUnavailable():
            return _problem(503, *_UNAVAILABLE)
        case LockLost() | StaleToken():
            return _problem(503, *_LOST)
    return None


def readiness(health: Health) -> Answer:
    """The answer to a readiness probe: 200 if a lock could be acquired now, else 503. The body has `ready`, the number
    of `nodes`, of those that are `voting`, and `spare`; the addresses and the reasons are in `Redlock.health` only."""
    voting = sum(node.ok for node in health.nodes)
    body = {"ready": health.ok, "nodes": len(health.nodes), "voting": voting, "spare": health.spare}
    headers = {"Content-Type": "application/json", "Cache-Control": "no-store"}
    if not health.ok:
        headers["Retry-After"] = _RETRY_AFTER
    return Answer(200 if health.ok else 503, headers, json.dumps(body).encode())


def openapi_responses(busy_status: int = BUSY_STATUS) -> dict[str, dict[str, Any]]:
    """The answers as `responses` of an operation of OpenAPI, by their status."""
    texts: dict[str, str] = {}
    for status, text in ((busy_status, _BUSY[1]), (503, _UNAVAILABLE[1]), (503, _LOST[1])):
        texts[str(status)] = f"{texts[str(status)]} Or: {text}" if str(status) in texts else text
    retry_after = {"Retry-After": {"description": "in seconds", "schema": {"type": "integer"}}}
    content = {PROBLEM_JSON: {"schema": _SCHEMA}}
    return {status: {"description": text, "headers": retry_after, "content": content} for status, text in texts.items()}


def check_busy_status(status: int) -> int:
    """The status. Raises ConfigError."""
    if isinstance(status, bool) or not isinstance(status, int) or not 400 <= status <= 599:
        raise ConfigError(f"busy_status is the status of an error, from 400 to 599, not {status!r}")
    return status


def check_ready(path: str | None) -> str | None:
    """The path of the readiness route. Raises ConfigError."""
    if path is not None and (not isinstance(path, str) or not path.startswith("/")):
        raise ConfigError(f'ready is the path of a route, such as "/ready", or None; not {path!r}')
    return path


def _problem(status: int, code: str, detail: str) -> Answer:
    try:
        title = HTTPStatus(status).phrase
    except ValueError:  # a status that the standard does not name
        title = "Error"
    body = {"type": "about:blank", "title": title, "status": status, "detail": detail, "code": code}
    headers = {"Content-Type": PROBLEM_JSON, "Retry-After": _RETRY_AFTER, "Cache-Control": "no-store"}
    return Answer(status, headers, json.dumps(body).encode())
