"""The body of a program's block, as the judge sees it: how it ends if the lease is lost, and what follows its end."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from asynclock.protocol.hold import Tenure
    from simulation.histories import Stay
    from simulation.plan import Job
    from simulation.stack.clients import Client


class Body:
    """Inside `async with lease`, which releases when this has ended."""

    def __init__(self, client: Client, job: Job, tenure: Tenure, stay: Stay) -> None:
        self._client = client
        self._job = job
        self._tenure = tenure
        self._stay = stay

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        client, tenure = self._client, self._tenure
        world = client.world
        if (loss := tenure.loss) is not None:
            world.trace(client.name, f"job {self._job.number} is interrupted: {loss}")
            if error is None:
                world.judge.fail("a loss did not interrupt the body", f"{self}: {loss}")
            whose: Any = client  # it has what the judge asks
            world.judge.told(whose, tenure, loss)
        world.histories.left(self._stay, tenure)
        # The options of an adoption are those of its client. The min_hold counts from the grant.
        lock = replace(self._job.lock, settings=tenure.terms.settings)
        since = min(self._stay.entered, client.loop.true_time(tenure.since))
        world.judge.released(tenure, lock, since)

    def __str__(self) -> str:
        return f"{self._tenure.hold.name} of {self._client.name} (job {self._job.number})"

    def check_told(self) -> None:
        """The block has ended without an error."""
        if self._tenure.loss is not None:
            self._client.world.judge.fail("a loss was not told", f"{self}: {self._tenure.loss}")
