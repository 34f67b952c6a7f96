"""The typer application and its commands."""

from __future__ import annotations

import math
from typing import Annotated

import rich  # noqa: F401 - its absence is told at once, although only some commands need it
import typer

from asynclock._errors import ConfigError
from asynclock._version import version
from asynclock.cli import look, run
from asynclock.cli.demo import LONGEST, SHORTEST
from asynclock.cli.doctor.command import doctor
from asynclock.cli.options import AsJson  # noqa: TC001 - typer reads the annotations
from asynclock.cli.output import is_lively, tell
from asynclock.cli.program import Code, Program, complain
from asynclock.cli.top import top

app = typer.Typer(
    name="asynclock",
    cls=Program,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"asynclock {version()}")
        raise typer.Exit


@app.callback()
def main(
    ctx: typer.Context,
    version_wanted: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Distributed locks for asyncio, kept by Redis (a server, a quorum of servers, Sentinel, a cluster), a database or
    ZooKeeper."""
    if ctx.invoked_subcommand is None:
        tell(ctx.get_help())
        raise typer.Exit(Code.USAGE)


app.command(cls=run.RunCommand)(run.run)
app.command()(look.ls)
app.command()(look.inspect)
app.command(name="break")(look.break_)
app.command()(look.health)
app.command()(top)
app.command()(doctor)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a number of seconds")
    return value


@app.command()
def demo(
    nodes: Annotated[
        int, typer.Option(min=3, max=9, help="Servers to start: 3 or more, so that a minority of them can fail.")
    ] = 5,
    workers: Annotated[int, typer.Option(min=2, max=8, help="Processes that compete for the lock.")] = 4,
    seconds: Annotated[
        float, typer.Option(min=SHORTEST, max=LONGEST, callback=_finite, help="How long they work.")
    ] = 12.0,
    plain: Annotated[
        bool,
        typer.Option("--plain", help="Print a line per event, no live picture; the default if stdout is no terminal."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Processes compete for one invoice over real servers. The demo kills and freezes servers and holders, and checks.

    Exit code 0: the records show that the lock kept its promises; 1: they do not, or the demo could not run.
    """
    from asynclock.cli.demo.show import perform  # its imports would cost each other command 0.1 s

    lively = is_lively() and not plain and not as_json
    try:
        code = perform(nodes, workers, seconds, lively, as_json)
    except ConfigError as error:
        complain(str(error), "demo")
        code = 1
    raise typer.Exit(code)
