"""Python programs that the tests start have this folder on their PYTHONPATH, so they import this module first.

redis-py imports OpenTelemetry where it is installed: a third of what its own import costs. The tests need OpenTelemetry
for asynclock's metrics, and start hundreds of programs. Here only redis-py's import of it fails, as it does for users
who have not installed it.

While modules are imported, a program makes objects that stay: the garbage collections that Python begins for their
number find nothing, and take a twentieth of the CPU of all tests. So they come more rarely."""

from __future__ import annotations

import gc
import sys

gc.set_threshold(50_000, 20, 20)

_ASKING = ("redis.observability.providers", "redis.observability.metrics")


class _NoTelemetryOfRedis:
    """A finder that finds nothing. It raises ImportError for OpenTelemetry while one of those modules is imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.startswith("opentelemetry") and any(
            getattr(getattr(sys.modules.get(each), "__spec__", None), "_initializing", False) for each in _ASKING
        ):
            raise ImportError(f"redis-py does without {name} in the programs of the tests")


sys.meta_path.insert(0, _NoTelemetryOfRedis())  # type: ignore[arg-type]
