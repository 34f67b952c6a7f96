"""`python -m asynclock`."""

from __future__ import annotations

from asynclock.cli import app

if __name__ == "__main__":
    app()
