"""`asynclock run NAME -- COMMAND`: a command that runs while a lock is held, as flock(1), but over a fleet."""

from __future__ import annotations

import asyncio
import os
import warnings
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from asynclock._errors import ConfigError
from asynclock.cli.guard import OnLost
from asynclock.cli.options import AsJson, MaxLease, Prefix, Urls, client, duration, named_urls
from asynclock.cli.program import EXAMPLE, Code
from asynclock.cli.runner import Mode, Plan, Runner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock._options import ClientOptions


class RunCommand(TyperCommand):
    """`--` ends the options: what follows is the command, with options of its own. Without `--` the first word after
    the options is NAME, the next begins the command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_interspersed_args = "--" in args
        return super().parse_args(ctx, args)


def mode_of(shared: bool, permits: int | None, once: bool, within: float | None) -> Mode:
    """What the options mean together. Raises BadParameter. Pure."""
    if shared + once + (permits is not None) > 1:
        raise typer.BadParameter("--shared, --permits and --once exclude each other: give one of them")
    if once != (within is not None):
        raise typer.BadParameter("--once and --within belong together, such as --once --within 1h")
    if once:
        return Mode.ONCE
    if shared:
        return Mode.SHARED
    return Mode.EXCLUSIVE if permits is None else Mode.PERMITS


def check_memory(once: bool, urls: Sequence[str]) -> None:
    """Refuse a store that no other process sees: it excludes nobody. Refuse --once over a store that ends with the
    programs that use it: the next run would not know of this one. Raises BadParameter."""
    schemes = {url.partition(":")[0] for url in urls}
    if "memory" in schemes:
        raise typer.BadParameter(
            "memory: locks within one process, and each asynclock run is a process of its own: give --url "
            f"{EXAMPLE}, or --url embedded: for this machine"
        )
    if once and "embedded" in schemes:
        raise typer.BadParameter(
            "--once needs a server that remembers the run. An embedded server ends with the last program that uses it: "
            f"give --url {EXAMPLE}"
        )


def run(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the lock.")],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What to run, after --.")],
    lease: Annotated[
        float,
        typer.Option(
            parser=duration,
            metavar="DURATION",
            envvar="ASYNCLOCK_LEASE",
            help="How long the hold outlives a machine that dies.",
        ),
    ] = 30.0,
    wait: Annotated[
        float | None,
        typer.Option(parser=duration, metavar="DURATION", help="Wait so long at most; 0: try once. Default: no limit."),
    ] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="Beside other --shared runs, but never beside others.")
    ] = False,
    permits: Annotated[int | None, typer.Option(min=1, help="Beside fewer than N other runs with --permits.")] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Only if no run of NAME has succeeded within --within. Exit 0 if one has.")
    ] = False,
    within: Annotated[
        float | None, typer.Option(parser=duration, metavar="DURATION", help="For how long a --once run counts.")
    ] = None,
    on_lost: Annotated[
        OnLost, typer.Option(help="When the lease cannot be kept: SIGTERM then SIGKILL, SIGKILL, or let it run.")
    ] = OnLost.TERM,
    conflict_exit_code: Annotated[
        int, typer.Option("-E", "--conflict-exit-code", min=0, max=255, help="The exit code if NAME stays held.")
    ] = int(Code.HELD),
    exit_zero: Annotated[bool, typer.Option("-x", "--exit-zero", help="Exit 0 if NAME stays held.")] = False,
    url: Urls = None,
    prefix: Prefix = None,
    max_lease: MaxLease = None,
    as_json: AsJson = False,
) -> None:
    """Run a command while a lock is held, over all machines.

    Exit code: that of the command, 128+n if signal n ended it; 75 NAME was held by another for the whole --wait; 69 a
    majority of the servers is out of reach; 70 the lease was lost; 64 wrong usage; 126, 127 the command cannot be run,
    or was not found.
    """
    if not hasattr(os, "fork"):
        raise ConfigError("asynclock run needs Linux or macOS: it ends its command with signals")
    if command[0].startswith("-"):
        raise typer.BadParameter("give the command after --: asynclock run NAME [OPTIONS] -- COMMAND...")
    urls = named_urls(url)
    check_memory(once, urls)
    plan = Plan(
        name,
        tuple(command),
        urls,
        prefix,
        mode_of(shared, permits, once, within),
        permits=permits or 0,
        within=within or 0.0,
        lease=lease,
        max_lease=max_lease,
        wait=wait,
        on_lost=on_lost,
        held_code=0 if exit_zero else conflict_exit_code,
    )
    path = os.fsencode(plan.command[0]).decode(errors="replace")  # a path need not be UTF-8, and metadata is
    options: ClientOptions = {"lease": lease, "cancel_on_lost": False, "metadata": path[:200]}
    if max_lease is not None:
        options["max_lease"] = max_lease
    with warnings.catch_warnings(record=True) as warned:
        redlock = client(plan.urls, prefix, options)
    runner = Runner(plan, redlock, as_json)
    for warning in warned:
        runner.say("warning", str(warning.message))
    raise typer.Exit(asyncio.run(runner.run()))
