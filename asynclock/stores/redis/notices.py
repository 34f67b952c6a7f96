"""Reads the messages on the channel of a client: notices, and messages that other programs publish there."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

from asynclock.stores.port import Notice
from asynclock.stores.redis.replies import A_MS

if TYPE_CHECKING:
    from asynclock.stores.port import NodeConfig

log = logging.getLogger("asynclock")

_NOTICE = re.compile(rb"(\S{32}) (\d{1,16}) (\d{1,16}) (-?\d{1,16}) (.*)", re.DOTALL)


class Channel:
    """Handles the messages from one node."""

    def __init__(self, config: NodeConfig, label: str) -> None:
        self._config = config
        self._label = label
        self._warned = False

    def pushed(self, push: Any) -> None:
        """Handle a RESP3 push. Never raises, because an exception would close the connection."""
        if push[0] != b"message":
            return
        notice = notice_of(push[2], self._config.prefix)
        if notice is not None:
            self._config.listener.received(self._config.position, notice)
        elif not self._warned:
            self._warned = True
            log.warning("asynclock: ignored a message at %s that is not a notice: %.99r", self._label, push[2])


def notice_of(message: bytes, prefix: str) -> Notice | None:
    """The notice in a message of a script: the random part of the id, number, fence, left, key. `left` is the ms until
    the name is free; -1: it is free; -2: the hold was broken; -3: it is free, and the waiter continues the batch. None:
    the message is not a notice, or its key does not begin with the prefix of this client."""
    match = _NOTICE.fullmatch(message)
    if match is None:
        return None
    bare, number, fence, left, key = match.groups()
    try:
        random, name, ms = bare.decode(), key.decode(), int(left)
    except UnicodeDecodeError:
        return None
    if not name.startswith(prefix):
        return None
    wait = ms / 1000 + A_MS if ms >= 0 else 0.0
    its = name[len(prefix) :]
    return Notice(random, int(number), int(fence), wait, its, broken=ms == -2, continue_batch=ms == -3)
