"""The first data folder of a database is made once a run. Each server gets a copy, which takes a tenth of the CPU."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.services.shared import shared

_templates = ExitStack()
"""Those that this process uses. The last process of a run deletes them when it ends."""
atexit.register(_templates.close)


def copy_of_template(name: str, make: Callable[[Path], None], folder: Path) -> None:
    """Put into `folder` what `make` puts into an empty one. Owners and modes are kept: a server looks at both."""
    subprocess.run(["cp", "-a", f"{_template(name, make)}/.", str(folder)], check=True)


@functools.cache
def _template(name: str, make: Callable[[Path], None]) -> str:
    def start(folder: Path) -> dict[str, Any]:
        make(folder)
        return {"folder": str(folder)}

    def stop(service: dict[str, Any]) -> None:
        shutil.rmtree(service["folder"], ignore_errors=True)

    service: dict[str, Any] = _templates.enter_context(shared(f"{name}-template", start, stop))
    return str(service["folder"])
