"""The program as scripts see it: its exit codes, and its errors, which are one line on stderr each."""

from __future__ import annotations

import errno
import logging
import signal
import sys
import warnings
from enum import IntEnum
from typing import Any

import typer
from typer.core import TyperGroup

from asynclock._errors import ConfigError, LockError, LockLost, LockTimeout, QuorumUnavailable, Unsupported
from asynclock._untrusted import printable
from asynclock.cli import output

log = logging.getLogger("asynclock")

EXAMPLE = "redis://host:6379"
"""The url in the messages of commands."""

_CLICK_ERROR: Any = typer.BadParameter.__mro__[2]
"""ClickException. Newer versions of typer have a copy of click of their own, older ones import click."""


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""Errors of a stdout that is a file on a disk."""


class Code(IntEnum):
    """The exit codes, after sysexits.h. `asynclock run` passes on those of its command, and 128+n for a signal n."""

    OK = 0
    NO = 1
    """Nothing was done: `break` found no holder, or was answered with no."""
    USAGE = 64
    """The command line, an option or the set-up of a server is wrong."""
    UNAVAILABLE = 69
    """A majority of the servers is out of reach."""
    LOST = 70
    """The lease was lost."""
    UNWRITTEN = 74
    """Stdout cannot be written."""
    HELD = 75
    """Another owner held the name for the whole time."""
    CANNOT_EXECUTE = 126
    NOT_FOUND = 127


def code_of(error: LockError) -> Code:
    """The exit code for an error of the library. Pure."""
    match error:
        case LockTimeout():
            return Code.HELD
        case QuorumUnavailable():
            return Code.UNAVAILABLE
        case ConfigError() | Unsupported():
            return Code.USAGE
        case LockLost() | _:
            return Code.LOST


class Program(TyperGroup):
    """Shows each error in one line, and gives it its exit code."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        extra |= {"prog_name": "asynclock", "standalone_mode": False}
        output.escape_the_unknown()
        quiet = logging.NullHandler()
        log.addHandler(quiet)  # the error of a command says what the log said before; `run` has a handler of its own
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                code = super().main(*args, **extra)
        except _CLICK_ERROR as error:
            code = _refuse(error)
        except typer.Abort:  # Ctrl-C at a question
            code = 128 + signal.SIGINT
        except LockError as error:
            complain(str(error))
            code = code_of(error)
        except output.Unwritten as error:
            code = _unwritten(error)
        except SystemExit as left:  # of typer, where the reader of a help text has gone
            code = Code.OK if _asks_for_help(args, extra) else left.code
        except OSError as error:
            if error.errno not in _FULL or not _asks_for_help(args, extra):
                raise
            output.drop_rest()
            code = _unwritten(output.Unwritten(error.strerror))
        finally:
            log.removeHandler(quiet)
        if not standalone_mode:
            return code
        try:
            output.flush()
        except output.Unwritten as error:
            code = _unwritten(error)
        _drop_unwritten()
        sys.exit(int(code) if isinstance(code, int) else Code.OK)


def _asks_for_help(args: tuple[Any, ...], extra: dict[str, Any]) -> bool:
    """Whether the command line is for a text that typer prints by itself."""
    given = args[0] if args else extra.get("args")
    words = list(sys.argv[1:] if given is None else given)
    own = words[: words.index("--")] if "--" in words else words
    return not {"--help", "--version"}.isdisjoint(own)


def complain(text: str, command: str = "") -> None:
    """Print one line on stderr."""
    who = f"asynclock {command}".rstrip()
    output.tell(f"{who}: {printable(' '.join(text.split()))}")


def _unwritten(error: output.Unwritten) -> Code:
    complain(f"stdout cannot be written: {error}")
    return Code.UNWRITTEN


def _drop_unwritten() -> None:
    """Python writes what is left of stderr when it ends. If that fails, it exits with 120 instead of the exit code."""
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except OSError:
        sys.stderr = None


def _refuse(error: Any) -> Code:
    path = error.ctx.command_path if getattr(error, "ctx", None) is not None else "asynclock"
    text = error.format_message().rstrip(".")
    if "://" in text.replace(EXAMPLE, ""):  # a url in a wrong place may hold a password, which is not repeated
        text = "a server is given as --url URL"
    complain(f"{text}: `{path} --help` shows how", path.removeprefix("asynclock").strip())
    return Code.USAGE


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    complain(f"warning: {message}")
