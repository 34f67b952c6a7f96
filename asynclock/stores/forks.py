"""The sockets of a process that forks, and what a child must not use.

A child that keeps a socket of its parent keeps the connection open after the parent has died: a server would count a
dead waiter as connected, and give it the lock. So in the child the null device takes the place of each socket. Nothing
is sent, and nothing is taken out of a selector, since the selector and the TLS session are those of the parent.

The child has copies of the nodes, too. If it runs a copy of the parent's event loop, as `asyncio.run` does at its end,
their tasks and timers go on there. They must not connect again: they would release the holds of the parent, and take
its notices.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING, NamedTuple

from asynclock._errors import OF_PARENT

if TYPE_CHECKING:
    import asyncio


class Kept(NamedTuple):
    """A socket, or a file. Its number may be that of another file once it is closed; device and inode are its own."""

    descriptor: int
    device: int
    inode: int

    @property
    def is_open(self) -> bool:
        """In this process."""
        try:
            return self == kept_of(self.descriptor)
        except OSError:
            return False

    def end(self) -> None:
        """End the connection, in other processes that have the socket, too: a close would leave it open there."""
        with contextlib.suppress(OSError):
            if self.is_open:
                with socket.socket(fileno=os.dup(self.descriptor)) as same:
                    same.shutdown(socket.SHUT_RDWR)


_sockets: dict[int, Kept] = {}
"""Those of the stores, by their descriptors."""

_forks = 0

_ancestors = 0
"""So many processes have forked one another down to this one."""


class Origin:
    """The process in which an object was made. The copy of the object in a forked child belongs to the parent: it opens
    no connection."""

    __slots__ = ("_ancestors",)

    def __init__(self) -> None:
        self._ancestors = _ancestors

    @property
    def is_here(self) -> bool:
        """Whether it is this process."""
        return self._ancestors == _ancestors

    def check(self) -> None:
        """Raise ConnectionError in a forked child."""
        if not self.is_here:
            raise ConnectionError(f"this connection was made before a fork: {OF_PARENT}")


def keep_from_children(descriptor: int) -> Kept | None:
    """A connection has come up on this socket. None: it is closed already, or has no identity. Any thread may call
    it."""
    try:
        kept = _sockets[descriptor] = kept_of(descriptor)
    except OSError:
        return None
    return kept


def descriptor_of(stream: asyncio.BaseTransport | asyncio.StreamWriter) -> int:
    """Of its socket; -1: it has none, or it is closed."""
    sock = stream.get_extra_info("socket")
    return -1 if sock is None else int(sock.fileno())


def number_of_forks() -> int:
    """Of this process and its ancestors. If it has changed during a connect, a child may have the socket as well."""
    return _forks


def kept_of(descriptor: int) -> Kept:
    """What this descriptor refers to. Raises OSError if it is closed, or has no identity."""
    found = os.fstat(descriptor)
    if not found.st_ino:  # a system where sockets have none: another one with the same number would count as this one
        raise OSError("this file cannot be distinguished from others")
    return Kept(descriptor, found.st_dev, found.st_ino)


def _before() -> None:
    global _forks  # noqa: PLW0603 - one process, one number
    _forks += 1


def _in_child() -> None:
    global _ancestors  # noqa: PLW0603 - the same
    _ancestors += 1
    inherited = [each.descriptor for each in _sockets.values() if each.is_open]
    _sockets.clear()
    if not inherited:
        return
    os.close(inherited[0])  # the null device needs a number, and the process may have no other one left
    null = os.open(os.devnull, os.O_RDWR)
    for each in inherited:
        if each != null:
            os.dup2(null, each, inheritable=False)
    if null not in inherited:
        os.close(null)


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(before=_before, after_in_child=_in_child)
