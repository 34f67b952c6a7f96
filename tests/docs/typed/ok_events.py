"""A listener of events, and the causes in the errors."""

from collections.abc import Callable, Mapping

from asynclock import Holder, LockLost, LockTimeout, Redlock
from asynclock.events import Acquired, Event, Lost, NodeDown, Quarantined


def listener(event: Event) -> None:
    if isinstance(event, Acquired):
        waited: float = event.waited
        print(event.name, event.kind, event.label, waited)
    elif isinstance(event, Lost):
        reason: str = event.reason
        print(reason)
    elif isinstance(event, NodeDown):
        print(event.node, event.error)
    elif isinstance(event, Quarantined):
        seconds: float = event.seconds
        print(seconds)


async def main(redlock: Redlock) -> float:
    unsubscribe: Callable[[], None] = redlock.subscribe(listener)
    try:
        async with redlock("order:42", timeout=1, label="order:{id}"):
            return 0.0
    except LockTimeout as late:
        holder: Holder | None = late.holder
        return late.waited if holder is None else holder.since
    except LockLost as lost:
        errors: Mapping[str, Exception] = lost.errors
        print(errors)
        return 0.0
    finally:
        unsubscribe()
