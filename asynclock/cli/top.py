"""`asynclock top`: holders, waiters, their ages, and lost leases, again and again."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asynclock.cli.options import AsJson, Prefix, Urls, client, duration, named_urls
from asynclock.cli.output import is_lively, plain, write
from asynclock.cli.program import Code
from asynclock.cli.watching import longest, look, lost, screen

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynclock.cli.watching import Hold, Moment
    from asynclock.client import Redlock
    from asynclock.info import Holder


def top(
    prefix_of_names: Annotated[
        str, typer.Argument(metavar="PREFIX", help="Only names that begin so.", show_default=False)
    ] = "",
    interval: Annotated[float, typer.Option(parser=duration, metavar="DURATION", help="Between two looks.")] = 1.0,
    iterations: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Stop after so many looks. Default: at Ctrl-C.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Look at so many names at most.")] = 200,
    url: Urls = None,
    prefix: Prefix = None,
    as_json: AsJson = False,
) -> None:
    """Show holders and waiters as they change. A lease counts as lost if it ended by time.

    With --json each look is a line. Exit code: 0; 69 if no majority of the servers answered at the last look.
    """
    redlock = client(named_urls(url), prefix, looks=True)
    error = ""

    def seen(moment: Moment) -> None:
        nonlocal error
        error = moment.error

    try:
        asyncio.run(_watch(redlock, prefix_of_names, interval, iterations, limit, as_json, seen))
    except KeyboardInterrupt:  # the usual end
        pass
    except asyncio.CancelledError:
        raise typer.Exit(128 + signal.SIGTERM) from None
    raise typer.Exit(Code.UNAVAILABLE if error else Code.OK)


async def _watch(
    redlock: Redlock,
    begin: str,
    interval: float,
    iterations: int | None,
    limit: int,
    as_json: bool,
    seen: Callable[[Moment], None],
) -> None:
    """Look again and again, and call `seen` with what each look saw."""
    losses, before = 0, None
    rests: dict[Hold, float] = {}
    lively = is_lively() and not as_json
    picture = Picture(whole=iterations is None) if lively else None
    if picture is not None and (task := asyncio.current_task()) is not None and sys.platform != "win32":
        # Otherwise SIGTERM would leave the terminal without its cursor, and with the last look on it.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        while True:
            moment = await look(redlock, begin, limit)
            seen(moment)
            gone: list[Holder] = [] if before is None else lost(before, moment, rests)
            losses += len(gone)
            if picture is not None:
                picture.show(moment, losses)
            elif not write(json.dumps(line(moment, gone, losses)) if as_json else screen(moment, losses)):
                return  # nobody reads it any more
            if iterations is not None:
                iterations -= 1
                if not iterations:
                    return
            if not moment.error:
                before, rests = moment, longest(rests, moment)
            await asyncio.sleep(interval)
    finally:
        if picture is not None:
            picture.close()
        await redlock.aclose()


class Picture:
    """A terminal on which each look takes the place of the one before."""

    def __init__(self, *, whole: bool) -> None:
        """`whole`: it takes the whole screen, and leaves nothing behind."""
        from rich.console import Console  # 0.1 s of import, needed here only
        from rich.live import Live

        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, screen=whole)
        self._live.start()

    def show(self, moment: Moment, losses: int) -> None:
        from rich.text import Text

        text = Text(screen(moment, losses, self._console.height - 6), no_wrap=True)
        text.highlight_regex(r"^NOT OK.*", "bold red")
        text.highlight_regex(r"\b[1-9]\d* lost", "bold magenta")
        text.highlight_regex(r"(?m)^NAME .*", "dim")
        self._live.update(text, refresh=True)

    def close(self) -> None:
        self._live.stop()


def line(moment: Moment, gone: list[Holder], losses: int) -> dict[str, Any]:
    """One look as JSON. Pure."""
    return {
        "time": moment.at,
        "ok": moment.health.ok and not moment.error,
        "error": moment.error,
        "nodes": plain(moment.health.nodes),
        "holders": len(moment.holders),
        "waiters": moment.waiters,
        "lost": plain(gone),
        "lost_total": losses,
        "more": moment.more,
        "locks": plain(moment.locks),
    }
