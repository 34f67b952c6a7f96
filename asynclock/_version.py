"""The version of the installed package."""

from __future__ import annotations

from functools import cache


@cache
def version() -> str:
    """The version in the metadata of the installed package; "unknown" if it runs from a folder without any. Reading the
    metadata takes 1 ms, so it is read at first use."""
    from importlib.metadata import PackageNotFoundError  # slow to import, and rarely used
    from importlib.metadata import version as installed

    try:
        return installed("asynclock")
    except PackageNotFoundError:
        return "unknown"
