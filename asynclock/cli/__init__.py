"""The command line, `asynclock`. `app` is the typer application. Without typer and rich it says how to install them."""

from __future__ import annotations

import sys
from typing import Any

_EXTRAS = ("typer", "rich")


def _missing() -> None:
    sys.exit("the command line of asynclock needs typer and rich: pip install 'asynclock[cli]'")


def __getattr__(name: str) -> Any:
    """Import `app` at its first use: the demo's workers import this package too, and must not need typer and rich."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from asynclock.cli._app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRAS:
            raise
        return _missing
    return app
