"""Each error is caught by its class, and its attributes are typed."""

from collections.abc import Mapping
from typing import Literal

from asynclock import (
    ConfigError,
    LockError,
    LockLost,
    LockNotHeld,
    LockTimeout,
    QuorumUnavailable,
    Redlock,
    SelfDeadlock,
    Unsupported,
)


async def main(redlock: Redlock) -> str:
    try:
        async with redlock("order:42", timeout=1):
            return "done"
    except LockTimeout as error:
        late: TimeoutError = error
        return f"held by somebody else: {error.name} {late}"
    except LockLost as error:
        reason: Literal["expired", "taken", "broken", "max_hold", "closed"] = error.reason
        return reason
    except QuorumUnavailable as error:
        errors: Mapping[str, Exception] = error.errors
        return ", ".join(f"{node}: {said}" for node, said in errors.items())
    except (SelfDeadlock, Unsupported, LockNotHeld) as error:
        return error.name
    except ConfigError as error:
        wrong: ValueError = error
        return str(wrong)
    except LockError as error:
        return error.name
