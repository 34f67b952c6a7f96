"""The folder of an embedded server: where it is, and what happens when somebody else deletes it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from asynclock import ConfigError, Redlock
from tests.support.embedded_box import Box, leave

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")


# -- where it is -------------------------------------------------------------------------------------------------------


def test_an_empty_variable_is_one_that_is_not_set(box: Box, tmp_path: Path) -> None:
    """`ASYNCLOCK_EMBEDDED_DIR=`, as compose writes `${X:-}`: programs in two working folders use one server."""
    name = f"t{os.getpid()}"
    here, there = tmp_path / "a", tmp_path / "b"
    here.mkdir()
    there.mkdir()
    try:
        first, got = box.hold(f"embedded:{name}", cwd=here, ASYNCLOCK_EMBEDDED_DIR="")
        second, missed = box.hold(f"embedded:{name}", cwd=there, ASYNCLOCK_EMBEDDED_DIR="")
        assert (got, missed) == ("held", "refused")
        leave(first)
        leave(second)
    finally:
        shutil.rmtree(f"/tmp/asynclock-{os.getuid()}-{name}", ignore_errors=True)


@pytest.mark.parametrize("relative", ["locks", ".", "~/locks", " "])
def test_a_relative_folder_is_refused(relative: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be another folder, and another server, in each working folder. ConfigError when the client is made."""
    monkeypatch.setenv("ASYNCLOCK_EMBEDDED_DIR", relative)
    with pytest.raises(ConfigError, match="give an absolute path"):
        Redlock("embedded:")
