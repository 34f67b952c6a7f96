"""The command `asynclock doctor`, with its options. What it does is in examination.py, whose imports (redis-py among
them) would cost each command without a url of Redis a third of its start."""

from __future__ import annotations

import asyncio
import math
import os
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from asynclock._options import client_settings, node_timeout, written_options
from asynclock.cli.doctor.severity import Terms
from asynclock.cli.options import (
    NODE_TIMEOUT,
    TRUST_RESTARTS,
    AsJson,
    MaxLease,
    Prefix,
    Urls,
    duration,
    named_urls,
    prefix_of,
)

if TYPE_CHECKING:
    from asynclock._options import ClientOptions


def doctor(
    url: Urls = None,
    prefix: Prefix = None,
    lease: Annotated[
        float, typer.Option(parser=duration, metavar="DURATION", envvar="ASYNCLOCK_LEASE", help="The usual lease.")
    ] = 30.0,
    max_lease: MaxLease = None,
    node_timeouts: Annotated[
        float | None,
        typer.Option(
            "--node-timeout",
            parser=duration,
            metavar="DURATION",
            envvar=NODE_TIMEOUT,
            show_default=False,
            help="The node_timeout of the clients. Default: lease/10; on a quorum the round trip decides, up to that.",
        ),
    ] = None,
    trust_restarts: Annotated[
        bool, typer.Option("--trust-restarts", envvar=TRUST_RESTARTS, help="The clients have trust_restarts=True.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check the servers for what could break locks, and say what to do. Changes no lock.

    Exit code: 0 nothing found; 1 warnings; 2 errors.
    """
    urls = named_urls(url)
    options: dict[str, Any] = {"lease": lease, "node_timeout": node_timeouts, "trust_restarts": trust_restarts}
    options |= written_options(os.environ, ("connect_timeout",))
    options |= {} if max_lease is None else {"max_lease": max_lease}
    options |= {} if (known := prefix_of(prefix)) is None else {"prefix": known}
    settings = client_settings(options)
    terms = Terms(
        settings.prefix,
        settings.lock.lease,
        settings.max_lease,
        node_timeout(settings, settings.lock, len(urls), measured=math.inf),  # the default follows the latency
        settings.trust_restarts,
        settings.connect_timeout,
    )
    from asynclock.cli.doctor.examination import examine, show

    examined = asyncio.run(examine(urls, cast("ClientOptions", options), terms))
    raise typer.Exit(int(show(examined, as_json)))
