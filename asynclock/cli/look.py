"""The commands that look at locks, and `break`: ls, inspect, health."""

from __future__ import annotations

import asyncio
import getpass
import logging
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asynclock._errors import ConfigError, LockError
from asynclock._untrusted import printable
from asynclock.cli.options import AsJson, Prefix, Urls, client, is_terminal, named_urls
from asynclock.cli.output import (
    NO_SPARE,
    age,
    count,
    is_mark,
    length,
    print_json,
    table,
    who,
    why,
    why_taken,
    write,
)
from asynclock.cli.program import Code, complain, log
from asynclock.locks.admin import BREAK_FOREIGN
from asynclock.stores.port import OLD

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from asynclock.client import Redlock
    from asynclock.info import Health, Holder, LockInfo

Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of the lock.")]


def answer(
    url: Sequence[str] | None,
    prefix: str | None,
    question: Callable[[Redlock], Awaitable[Any]],
    *,
    enter: bool = True,
    looks: bool = False,
    note: str = "",
) -> Any:
    """Ask with a client of its own. With `enter` it connects first, and raises where no majority would vote: not for a
    question that only `looks`, which a user without the right to write may ask. `note`: what the holder of a lock reads
    of the client that breaks it."""

    async def ask() -> Any:
        redlock = client(named_urls(url), prefix, {"metadata": note}, looks=looks)
        if looks or not enter:
            try:
                return await question(redlock)
            finally:
                await redlock.aclose()
        async with redlock:
            return await question(redlock)

    remarks = _Remarks()
    log.addHandler(remarks)
    try:
        return asyncio.run(ask())
    finally:
        log.removeHandler(remarks)


class _Remarks(logging.Handler):
    """Says on stderr that what a node shows may be old."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "asynclock_reason", "") == OLD:
            complain(f"warning: {record.getMessage().removeprefix('asynclock: ')}")


def ls(
    prefix_of_names: Annotated[
        str, typer.Argument(metavar="PREFIX", help="Only names that begin so.", show_default=False)
    ] = "",
    all_names: Annotated[
        bool, typer.Option("--all", "-a", help="Also the names that --once or min_hold keeps taken. --json has them.")
    ] = False,
    url: Urls = None,
    prefix: Prefix = None,
    as_json: AsJson = False,
) -> None:
    """List all holds: who holds which name, for how long. If some servers do not answer, those of the others."""
    found: list[Holder] = []

    async def question(redlock: Redlock) -> LockError | None:
        try:
            async for holder in redlock.holders(prefix_of_names):
                found.append(holder)  # noqa: PERF401 - those before an error are kept
        except LockError as error:  # one master of a cluster is down: the holds of the others are shown
            return error
        return None

    error: LockError | None = answer(url, prefix, question, looks=True)
    found.sort(key=lambda holder: (holder.name, holder.since))
    if error is not None and not found:
        raise error
    if as_json:
        print_json(found)
    else:
        write(listing(found, all_names))
    if error is not None:
        raise error


def listing(found: Sequence[Holder], all_names: bool) -> str:
    """The holds; then the names that nobody holds although they are taken, or how many there are."""
    marks = [each for each in found if is_mark(each)]
    rows = [
        (each.name, holder_of(each), age(each.since), left(each), each.metadata) for each in found if not is_mark(each)
    ]
    lines = [table(("NAME", "HOLDER", "SINCE", "LEFT", "NOTE"), rows)]
    if marks and all_names:
        lines.append(table(("TAKEN", "LEFT", "WHY"), [(each.name, left(each), why_taken(each)) for each in marks]))
    elif marks:
        names = len({each.name for each in marks})
        lines.append(f"{count(names, 'name')} taken by --once or min_hold, and held by nobody: see ls --all")
    return "\n\n".join(lines)


def inspect(name: Name, url: Urls = None, prefix: Prefix = None, as_json: AsJson = False) -> None:
    """Show the holders and waiters of a lock, server by server."""
    info: LockInfo = answer(url, prefix, lambda redlock: redlock.inspect(name), looks=True)
    if as_json:
        print_json(info)
        return
    permits = "" if info.free is None else f", {count(info.free, 'permit')} free"
    write(f"{printable(name)}: {printable(info.kind) or 'free'}{permits}, last fencing token {info.fence or 'unknown'}")
    if info.holders:
        rows = [(holder_of(each), age(each.since), left(each), each.metadata) for each in info.holders]
        write("\n" + table(("HOLDER", "SINCE", "LEFT", "NOTE"), rows))
    if info.waiters:
        waiters = [(who(each.host, each.pid), age(each.since), str(each.tasks)) for each in info.waiters]
        write("\n" + table(("WAITER", "SINCE", "TASKS"), waiters))
    write("\n" + table(("SERVER", "SAYS"), list(info.nodes.items())))


def break_(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    foreign: Annotated[bool, typer.Option("--foreign", help="Delete the key of another program, too.")] = False,
    url: Urls = None,
    prefix: Prefix = None,
    as_json: AsJson = False,
) -> None:
    """Take a lock away from its holder.

    The holder works on without the lock until it is told.

    Exit code: 0 it was taken; 1 nobody held it, or you said no; 64 there is no terminal to ask on and no --yes, or
    the key is another program's and there is no --foreign.
    """
    urls = named_urls(url)
    if not yes:
        if not is_terminal():
            complain("there is no terminal to ask on: add --yes", "break")
            raise typer.Exit(Code.USAGE)
        info: LockInfo = answer(urls, prefix, lambda redlock: redlock.inspect(name), looks=True)
        held = ", ".join(map(holder_of, info.holders)) or "nobody"
        if not typer.confirm(f"{printable(name)} is held by {printable(held)}. Break it?", err=True):
            raise typer.Exit(Code.NO)
    note = f"asynclock break, {_user()}"
    try:
        broken: bool = answer(urls, prefix, lambda redlock: redlock.break_lock(name, foreign=foreign), note=note)
    except ConfigError as error:
        raise ConfigError(str(error).replace(BREAK_FOREIGN, "--foreign")) from None
    if as_json:
        print_json({"name": name, "broken": broken})
    elif broken:
        write(f"{printable(name)} was taken from its holder")
    else:
        complain(f"nobody held {printable(name)}", "break")
    raise typer.Exit(Code.OK if broken else Code.NO)


def _user() -> str:
    """The name of the user who runs the command."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container may run under a number that has no name
        return "unknown user"


def health(url: Urls = None, prefix: Prefix = None, as_json: AsJson = False) -> None:
    """Ask each server whether it would vote now.

    Exit code: 0 a lock could be acquired; 69 it could not.
    """
    found: Health = answer(url, prefix, lambda redlock: redlock.health(), enter=False)
    if as_json:
        print_json(found)
    else:
        write(health_text(found))
    raise typer.Exit(Code.OK if found.ok else Code.UNAVAILABLE)


def health_text(found: Health) -> str:
    """A line for each server, after the answer for all of them. Pure."""
    rows = [
        (each.node, "ok" if each.ok else "NOT OK", length(each.latency) if each.latency else "", why(each))
        for each in found.nodes
    ]
    head = "ok" if found.ok else f"NOT OK: {printable(found.reason)}"
    if found.ok and not found.spare and not all(each.ok for each in found.nodes):
        head = NO_SPARE
    return f"{head}\n\n{table(('SERVER', 'STATE', 'LATENCY', 'WHY'), rows)}"


def holder_of(holder: Holder) -> str:
    """The process of a holder; "nobody" for the marks after a release with min_hold and after a run of `once`."""
    return "nobody" if is_mark(holder) else who(holder.host, holder.pid)


def left(holder: Holder) -> str:
    """How long a hold lives without a renewal."""
    return "for ever" if holder.remaining is None else length(holder.remaining)
