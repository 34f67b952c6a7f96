"""docs/containers.md and examples/worker.compose.yml: the settings that let a container release its locks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from asynclock._options import RELEASE_TIMEOUT
from asynclock.stores.urls import urls_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "containers.md").read_text("utf-8")
DOCKERFILE = (ROOT / "examples" / "Dockerfile").read_text("utf-8")
EXAMPLE = yaml.safe_load((ROOT / "examples" / "worker.compose.yml").read_text("utf-8"))
NODES = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))["services"]
SHOWN = yaml.safe_load(re.findall(r"```yaml\n(services:.*?)```", PAGE, re.DOTALL)[0])

services = pytest.mark.parametrize(
    ("service", "nodes"),
    [(each, list(NODES)) for each in EXAMPLE["services"].values()]
    + [(each, list(NODES)[:3]) for each in SHOWN["services"].values()],
    ids=["worker", "report", "page"],
)


@services
def test_a_worker_knows_the_nodes_and_starts_after_them(service: dict[str, Any], nodes: list[str]) -> None:
    """By the names that they have in their network. So it is stopped before them, too."""
    assert list(urls_of(service["environment"]["ASYNCLOCK_URLS"])) == [f"redis://{node}:6379" for node in nodes]
    assert service["depends_on"] == {node: {"condition": "service_healthy"} for node in nodes}


@services
def test_a_worker_receives_sigterm_and_has_time_to_release(service: dict[str, Any], nodes: list[str]) -> None:
    """No shell is in between. The engine's own period is 10 s."""
    assert service["command"][0] in ("python", "asynclock")
    assert int(service["stop_grace_period"].removesuffix("s")) > 2 * RELEASE_TIMEOUT


@services
def test_a_worker_is_healthy_when_it_can_get_locks(service: dict[str, Any], nodes: list[str]) -> None:
    """`asynclock health` says so by its exit code."""
    assert service["healthcheck"]["test"] == ["CMD", "asynclock", "health"]


def test_the_image_has_what_the_worker_runs() -> None:
    """Its program, the modules of the program, and the command line."""
    (copied,) = re.findall(r"^COPY (.*) \./$", DOCKERFILE, re.M)
    assert {*copied.split()} == {f"examples/{each}.py" for each in ("worker", "graceful", "shop")}


def test_the_image_has_the_asynclock_of_the_clone() -> None:
    """All that its build needs is copied from the root of the clone, and no package index is asked for it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    copied = {each for line in re.findall(r"^COPY (.*) /src", DOCKERFILE, re.M) for each in line.split()}
    assert copied == {"pyproject.toml", "asynclock", project["readme"], *project["license-files"]}
    assert re.findall(r"^RUN pip install .*$", DOCKERFILE, re.M) == ["RUN pip install --no-cache-dir '/src[cli]'"]
    assert EXAMPLE["x-client"]["build"] == {"context": ".", "dockerfile": "examples/Dockerfile"}


def test_each_file_of_the_image_is_there() -> None:
    """Its paths are those of the root of the clone."""
    for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.M):
        assert all((ROOT / each).exists() for each in line.split())
