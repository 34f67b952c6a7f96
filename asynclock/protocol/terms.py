"""Terms: the request of one caller."""

from __future__ import annotations

from contextvars import copy_context
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable
    from contextvars import ContextVar

    from asynclock._options import LockSettings
    from asynclock.rules.model import Kind

_T = TypeVar("_T")


class Terms:
    """A request for a lock of this name and kind, under these settings, to be granted within `timeout` seconds."""

    __slots__ = ("_waits", "context", "kind", "name", "owner", "settings", "task", "timeout")

    _waits: bool  # without a value until it waits: most do not

    def __init__(
        self,
        name: str,
        kind: Kind,
        settings: LockSettings,
        task: Any,
        timeout: float | None,
        owner: Hashable = None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.settings = settings
        self.task = task  # the task that asks; for a thread, what stands for it (`blocking/calls.py`)
        self.timeout = timeout  # None: as long as it takes; 0: one try
        self.owner = owner  # the owner that may enter again, of a reentrant lock
        self.context = copy_context()  # of the caller: its log records and events are emitted there

    def one_try(self) -> Terms:
        """The same, for one try."""
        return Terms(self.name, self.kind, self.settings, self.task, 0, self.owner)

    def with_min_hold(self, min_hold: float) -> Terms:
        """The same with another min_hold, in seconds."""
        changed = copy(self)
        changed.settings = replace(self.settings, min_hold=min_hold)
        return changed

    def mark_waiting(self) -> None:
        """It was not granted at once: it waits in the local queue or at the servers, or it pauses."""
        self._waits = True

    @property
    def had_to_wait(self) -> bool:
        """Whether it waits, or did so before its end."""
        return getattr(self, "_waits", False)

    @property
    def owner_is(self) -> str:
        """The word of messages for the owner of its lease: "task", or "thread" if the task runs for a thread."""
        return owner_of(self.task)

    def variable(self, variable: ContextVar[_T], default: _T) -> _T:
        """The value of a variable in the context of the caller."""
        return self.context.get(variable, default)

    @property
    def described(self) -> tuple[str, str, str]:
        """The name, the kind and the label, as an event has them."""
        return self.name, self.kind.name, self.settings.label


def owner_of(task: object) -> str:
    """The word of messages for the owner of the leases that this task acquires: "task", or "thread" if the task runs
    for a thread (`blocking/calls.py`)."""
    return getattr(task, "owner_is", "task")
