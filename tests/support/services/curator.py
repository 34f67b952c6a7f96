"""A program on the JVM that takes locks of Apache Curator's recipes, from Debian's packages."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

from tests.support.services import needs, program

_JARS = [
    Path("/usr/share/java") / f"{name}.jar"
    for name in ("curator-recipes", "curator-framework", "curator-client", "guava", "zookeeper")
]
_SOURCE = Path(__file__).parent / "java" / "Holder.java"
_OPTIONS = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto", "-Xmx128m")


class Curator:
    """One process with one Curator client."""

    def __init__(self, address: str, folder: Path) -> None:
        java, javac = needs("the JDK", program("java"), program("javac"))
        jars = needs("Curator", *(jar if jar.exists() else None for jar in _JARS))
        path = ":".join(map(str, jars))
        subprocess.run(
            [javac, *(f"-J{each}" for each in _OPTIONS), "-nowarn", "-cp", path, "-d", str(folder), str(_SOURCE)],
            check=True,
        )
        self._process = subprocess.Popen(
            [java, *_OPTIONS, "-cp", f"{path}:{folder}", "Holder", address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.said() == "connected"

    def tell(self, line: str) -> None:
        """One line of its input (see Holder.java)."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def said(self) -> str:
        """Its next line."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    async def ask(self, line: str) -> str:
        """Tell it a line, and wait for its answer."""
        self.tell(line)
        return await asyncio.to_thread(self.said)

    def stop(self) -> None:
        self._process.kill()
        streams: list[Any] = [self._process.stdin, self._process.stdout]
        for stream in streams:
            stream.close()
        self._process.wait()
