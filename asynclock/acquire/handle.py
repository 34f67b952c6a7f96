"""The string by which a detached hold goes from one process to another: a secret, since it holds the id."""

from __future__ import annotations

import base64
import binascii
import json
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

from asynclock._errors import ConfigError
from asynclock.rules.model import ID_LENGTH, mode_of

if TYPE_CHECKING:
    from asynclock.rules.model import Op

_MARK = "asynclock1."
_SUM = 6  # bytes that tell a damaged handle from one that came too late


class Known(NamedTuple):
    """What a handle tells."""

    name: str
    id: str
    token: int

    @property
    def mode(self) -> str:
        """What stands in the id of the kind of hold, and goes on to the next one's; "" for a mutex."""
        return self.id[ID_LENGTH + 1 :].partition(".")[0] + "." if mode_of(self.id) else ""


def handle_of(op: Op, token: int) -> str:
    """For the hold of `op`, whose token is `token`."""
    told = json.dumps([op.name, op.id, token]).encode()
    return _MARK + base64.urlsafe_b64encode(_sum(told) + told).decode()


def known_by(handle: object) -> Known:
    """Raises ConfigError for what detach() never answered."""
    if isinstance(handle, str) and handle.startswith(_MARK):
        try:
            raw = base64.b64decode(handle.removeprefix(_MARK), altchars=b"-_", validate=True)
            if raw[:_SUM] == _sum(raw[_SUM:]):
                return Known(*json.loads(raw[_SUM:]))
        except (binascii.Error, ValueError, TypeError):
            pass
    raise ConfigError("this is no handle: pass on unchanged what detach() answered")


def _sum(told: bytes) -> bytes:
    return sha256(told).digest()[:_SUM]
