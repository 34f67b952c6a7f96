"""Python programs that a test starts.

Most of the CPU of a short program goes into its imports: 0.3 s, hundreds of times. So each worker has a process that
imports the modules once, and makes a copy of itself for each `Program`. The copy is a child of the worker, as each
process that `subprocess.Popen` starts: signals, exit codes and pipes are those of any child. It differs from a fresh
interpreter only in that the modules are there, and that /proc shows another command line.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import inspect
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
LEAN = str(Path(__file__).parent / "lean")
"""The folder of sitecustomize.py, which makes the start of a program cheaper."""

PYTHONPATH = os.pathsep.join([LEAN, str(REPO)])
"""Of the programs that a test starts."""

QUIET = "import logging; logging.getLogger('asyncio').setLevel('ERROR')\n"  # in dev mode it complains of slow machines
CONNECTS = (
    "import functools, asynclock._options as _o\n"
    "_o.ClientSettings = functools.partial(_o.ClientSettings, connect_timeout=5.0)\n"
    "import sys; _p = sys.modules.get('asynclock.stores.sql.push'); _p and setattr(_p, '_PUSH', 2.0)\n"
    "del functools, sys, _o, _p\n"
)
"""As `patient_connects.py`: a server that answers late is reported as down, which is a line of the log. So is a first
push message of a database that is late."""

PATIENT = "1"
"""$ASYNCLOCK_NODE_TIMEOUT of programs over several nodes: on a busy machine a healthy node needs more than 50 ms."""

STRICT = ("-X", "dev", "-W", "error")
"""Options of the interpreter: a program that prints a warning ends with an error."""

LIBRARY = ("asynclock", "asynclock.stores.redis.store", "asynclock.stores.embedded.store")
COMMANDS = (*LIBRARY, "asynclock.cli.run", "tests.support.parsed_command")
DATABASES = (*LIBRARY, "asynclock.stores.sql.store", "aiosqlite", "asyncmy", "asyncpg")
STORES = (*DATABASES, "asynclock.stores.zookeeper.store")
"""What programs import. The drivers of databases take a second of CPU, so the tests whose programs import them are in
the group "database-programs" of xdist: one worker imports them for all."""

_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine()) if sys.platform == "linux" else None
"""The number of the system call; None: programs start afresh."""

_CLONE_PARENT = 0x00008000  # the parent of the new process is the worker, and not the process that is copied
_MOST = 1 << 20  # bytes of a request


def run_python(program: str, *args: str, preload: Sequence[str] = LIBRARY, **env: str) -> str:
    """The output of a program of its own; it must end well, and print no warning."""
    words = ["-c", QUIET + CONNECTS + textwrap.dedent(program), *args]
    done = run(words, preload, STRICT, env={"PYTHONPATH": PYTHONPATH, "PATH": "/usr/bin:/bin", **env})
    return _output(done)


def run_fresh_python(program: str) -> str:
    """The same, for a program in which other modules can be imported than here: nothing is imported before it."""
    words = [sys.executable, *STRICT, "-c", QUIET + textwrap.dedent(program)]
    env = {"PYTHONPATH": PYTHONPATH, "PATH": "/usr/bin:/bin"}
    return _output(subprocess.run(words, env=env, capture_output=True, text=True, timeout=50, check=False))


def _output(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def run(
    words: Sequence[str], preload: Sequence[str], options: Sequence[str] = (), **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a `Program` to its end."""
    with Program(words, preload, options, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more) as process:
        try:
            stdout, stderr = process.communicate(timeout=50)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


class Program(subprocess.Popen[Any]):
    """`python -m MODULE`, `python -c TEXT` or `python FILE`, from a process that has imported the modules `preload`."""

    def __init__(self, words: Sequence[str], preload: Sequence[str], options: Sequence[str] = (), **more: Any) -> None:
        self._options, self._preload = tuple(options), tuple(preload)
        super().__init__(words if _CLONE else [sys.executable, *options, *words], **more)

    if _CLONE:

        def _execute_child(self, *given: Any) -> None:
            """Popen calls it with the ends of the pipes (-1: the program shares the file of the worker)."""
            signature = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
            asked = signature.bind(self, *given).arguments
            ends = [asked[each] for each in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
            request = {
                "words": asked["args"],
                "env": dict(os.environ if asked["env"] is None else asked["env"]),
                "folder": str(asked["cwd"] or Path.cwd()),
                "preload": self._preload,
            }
            its = ends[0], ends[3], ends[5]
            self.pid = _started(self._options, request, [fd if fd >= 0 else number for number, fd in enumerate(its)])
            self._child_created = True
            self._close_pipe_fds(*ends)  # type: ignore[attr-defined]


def _started(options: tuple[str, ...], request: dict[str, Any], fds: list[int]) -> int:
    """The process id of a copy that runs what is asked for."""
    line = _origin(options)
    socket.send_fds(line, [json.dumps(request).encode()], fds)
    answer = line.recv(_MOST).decode()
    if not answer.isdigit():
        raise OSError(f"the program does not start: {answer or 'the process that is copied has ended'}")
    return int(answer)


@functools.cache
def _origin(options: tuple[str, ...]) -> socket.socket:
    """The way to the process that is copied, with these options of the interpreter."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = f"from tests.support.programs import serve; exec(serve({its.fileno()}))"  # as __main__, until its end
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    process = subprocess.Popen([sys.executable, *options, "-c", program], env=env, pass_fds=[its.fileno()], cwd=REPO)
    its.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def serve(number: int) -> str:
    """Make a copy of this process for each request, until the worker ends. This returns in the copy: the text of the
    program, which runs and ends as that of an interpreter that was started with it."""
    line = socket.socket(fileno=number)
    while True:
        data, fds, _, _ = socket.recv_fds(line, _MOST, 3)
        if not data:
            os._exit(0)  # as if it had never been: what runs at the exit is for the copies
        request = json.loads(data)
        try:
            _import(request["preload"])
            answer = str(pid := _copy())
        except Exception as error:
            answer, pid = repr(error), -1
        if pid == 0:
            line.close()
            return _begin(request, fds)
        line.send(answer.encode())
        for fd in fds:
            os.close(fd)


def _import(modules: Sequence[str]) -> None:
    """Those that are new. What they made stays until the end of each copy, so no garbage collection visits it: the last
    one, at the end of an interpreter, would take 0.2 s of CPU."""
    if {*modules} <= sys.modules.keys():
        return
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()


def _copy() -> int:
    """os.fork, but the new process is a child of our parent. Python's own half of a fork is around the system call."""
    python = ctypes.PyDLL(None, use_errno=True)  # a call that keeps the lock of the interpreter
    python.PyOS_BeforeFork()
    pid = int(python.syscall(_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return pid


def _begin(request: dict[str, Any], fds: list[int]) -> str:
    """In the copy: take over the files, the environment and the folder of the program. Returns its text."""
    for number, (fd, name) in enumerate(zip(fds, ("stdin", "stdout", "stderr"), strict=True)):
        os.dup2(fd, number)
        os.close(fd)
        errors = "backslashreplace" if name == "stderr" else None
        line_by_line = 1 if name == "stderr" or "-u" in sys.orig_argv or os.isatty(number) else -1
        stream = open(number, "w" if number else "r", line_by_line, errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    first = request["env"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [each for each in first if each and each not in sys.path]
    option, text, *_ = [*request["words"], ""]
    if option == "-c":
        sys.argv = request["words"][:1] + request["words"][2:]
        return str(text)
    sys.argv = request["words"][1:] if option == "-m" else request["words"]
    sys.path.insert(0, request["folder"] if option == "-m" else os.path.dirname(option))
    run = f"run_module({text!r}, alter_sys=True, " if option == "-m" else f"run_path({option!r}, "
    return f"import runpy; runpy.{run}run_name='__main__')"
