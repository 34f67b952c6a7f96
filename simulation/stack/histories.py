"""What the programs saw of each name, judged as in `simulation/histories.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simulation.histories import Histories, Stay

if TYPE_CHECKING:
    from weakref import ref

    from asynclock.protocol.hold import Tenure
    from simulation.plan import LockPlan
    from simulation.stack.world import World


class StackHistories(Histories):
    """A tenure that a look has found held is released after that look, whatever becomes of its end: a refusal moves it
    into the past, and a process that was killed tells nothing."""

    _world: Any

    def __init__(self, world: World) -> None:
        super().__init__(world)  # type: ignore[arg-type]  # it has what the histories ask
        self._tenures: dict[Stay, ref[Tenure]] = {}
        self._held_at: dict[Stay, float] = {}

    def entered(self, client: Any, owner: str, lock: LockPlan, tenure: Tenure, began: float) -> Stay:
        stay = super().entered(client, owner, lock, tenure, began)
        self._tenures[stay] = tenure.weak_self
        return stay

    def look(self) -> None:
        """At the tenures that have not ended for their programs."""
        for stay in self._inside:
            tenure = self._tenures[stay]()
            if tenure is not None and self._world.judge.is_held(stay.client, tenure):
                self._held_at[stay] = self._world.schedule.now

    def left(self, stay: Stay, tenure: Tenure | None) -> None:
        if stay not in self._inside:
            return
        super().left(stay, tenure)
        if not self._world.judge.was_broken(stay.key):
            for part in stay.lock.parts:
                calls = self._calls[part.name]
                calls[-1] = calls[-1]._replace(began=max(calls[-1].began, self._held_at.get(stay, stay.entered)))
