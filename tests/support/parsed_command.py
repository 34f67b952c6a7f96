"""Imports what typer imports once it parses an option: half of the CPU of a command."""

from __future__ import annotations

from typer.testing import CliRunner

from asynclock.cli import app

CliRunner().invoke(app, ["run", "--lease", "20"])  # a wrong usage: there is no name
