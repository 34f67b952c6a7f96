"""What a test leaves open is collected later, in another test, which is red then. So a transport names the test that
made it, and the lines that did."""

from __future__ import annotations

import os
import sys
import traceback
from asyncio.selector_events import _SelectorSocketTransport  # type: ignore[attr-defined]
from typing import Any

_LINES = 12

_init, _shown = _SelectorSocketTransport.__init__, _SelectorSocketTransport.__repr__


def name_transports() -> None:
    """Each transport of asyncio that is made from now on says in its repr, and so in a ResourceWarning, who made it."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stack = traceback.StackSummary.extract(traceback.walk_stack(sys._getframe(1)), limit=_LINES, lookup_lines=False)
        self.made_by = os.environ.get("PYTEST_CURRENT_TEST"), stack
        _init(self, *args, **kwargs)

    def shown(self: Any) -> str:
        test, stack = getattr(self, "made_by", ("", ()))
        lines = " < ".join(f"{os.path.basename(each.filename)}:{each.lineno} {each.name}" for each in stack)
        return f"{_shown(self)} made in {test} by {lines}"

    _SelectorSocketTransport.__init__ = init
    _SelectorSocketTransport.__repr__ = shown
