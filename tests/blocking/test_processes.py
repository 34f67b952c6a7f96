"""asynclock.blocking at the end of a program, and in forked children. Each test is one program, which checks more than
one thing, since a start takes half a second."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from asynclock.blocking import Redlock
from tests.support.programs import LIBRARY, PYTHONPATH, QUIET, Program, run, run_python
from tests.support.waiters import LIMIT

posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


def test_an_exit_releases(client: Redlock, shared_urls: list[str], name: str) -> None:
    """The main thread ends while it holds, while a daemon waits and another one holds, and while a pool works on. The
    pool may use locks until its end; then what is held is released, and no ticket is left. It ends at once. A listener
    is told that these leases are lost, and nothing is logged."""
    program = """
        import sys, threading, time
        from concurrent.futures import ThreadPoolExecutor
        from asynclock.blocking import Redlock
        from asynclock.events import Lost

        client, other, name = Redlock(sys.argv[1]), Redlock(sys.argv[1]), sys.argv[2]
        client.subscribe(lambda event: isinstance(event, Lost) and print("lost", event.reason, flush=True))
        held = client(f"{name}:main").acquire()
        in_block = threading.Event()

        def hold():
            with client(f"{name}:daemon"):
                in_block.set()
                threading.Event().wait()

        def work():
            time.sleep(0.3)  # the main thread is at its end by now
            with client(f"{name}:pool"):
                print("worked", flush=True)

        threading.Thread(target=hold, daemon=True).start()
        threading.Thread(target=lambda: other(f"{name}:main").acquire(), daemon=True).start()
        in_block.wait()
        while not client.inspect(f"{name}:main").waiters:
            time.sleep(0.01)
        ThreadPoolExecutor().submit(work)
        """
    began = time.monotonic()
    assert run_python(program, shared_urls[0], name) == "worked\nlost closed\nlost closed\n"
    assert time.monotonic() - began < LIMIT
    for part in ("main", "daemon", "pool"):
        assert not client(f"{name}:{part}").locked()
        assert not client.inspect(f"{name}:{part}").waiters


def test_an_exit_inside_a_block(client: Redlock, shared_urls: list[str], name: str) -> None:
    """`sys.exit` leaves the block. A use after the end of the clients says so, and a block that is left then has lost
    its lease."""
    program = """
        import atexit, sys
        client = name = None

        def late():  # registered before asynclock registers its own end, so it runs after that
            try:
                client(name).acquire()
            except ValueError as error:
                print(error)
            lease = held
            try:
                lease.ensure_held()
            except Exception as error:
                print(error)
            client.close()

        atexit.register(late)
        from asynclock.blocking import Redlock
        client, name = Redlock(sys.argv[1]), sys.argv[2]
        held = client(name + ":held").acquire()
        with client(name) as lease:
            sys.exit(0)
        """
    output = run_python(program, shared_urls[0], name)
    assert "the interpreter exits" in output
    assert "its client was closed" in output
    assert not client(name).locked()


def test_ctrl_c_at_a_wait_ends_the_program(client: Redlock, shared_urls: list[str], name: str) -> None:
    """The main thread waits, a SIGINT comes, and the program ends as Python programs do."""
    program = """
        import sys
        from asynclock.blocking import Redlock
        client = Redlock(sys.argv[1])
        client(sys.argv[2]).acquire()
        """
    with client(name):
        running = Program(
            ["-c", textwrap.dedent(program), shared_urls[0], name],
            LIBRARY,
            env={"PYTHONPATH": PYTHONPATH, "PATH": "/usr/bin:/bin"},
            stderr=subprocess.PIPE,
            text=True,
        )
        while not client.inspect(name).waiters:
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=LIMIT)
        assert "KeyboardInterrupt" in errors
        assert running.returncode == -signal.SIGINT
        assert not client.inspect(name).waiters
    assert not client(name).locked()


def test_a_signal_handler_closes_its_client_during_the_first_call(shared_urls: list[str], name: str) -> None:
    """A SIGTERM comes while the main thread starts the background thread, just before it is known to the process. The
    handler closes the client. Then there is one background thread, which serves another client."""
    program = """
        import signal, sys, threading
        from asynclock.blocking import Redlock

        client, other, name = Redlock(sys.argv[1]), Redlock(sys.argv[1]), sys.argv[2]

        def close(*_):
            client.close()
            print("closed", flush=True)

        def profile(frame, event, arg):
            if event == "return" and (frame.f_code.co_name, frame.f_globals["__name__"]) == ("start_thread", MODULE):
                sys.setprofile(None)
                signal.raise_signal(signal.SIGTERM)

        MODULE = "asynclock._loop"
        signal.signal(signal.SIGTERM, close)
        sys.setprofile(profile)
        try:
            client(name).acquire()
        except ValueError as error:
            print(error)
        with other(name):
            print([each.name for each in threading.enumerate()].count("asynclock loop"))
        """
    closed, error, threads = run_python(program, shared_urls[0], name).splitlines()
    assert closed == "closed"
    assert "closed" in error
    assert threads == "1"


def test_a_background_thread_that_has_ended_is_replaced(shared_urls: list[str], name: str) -> None:
    """The program raises SystemExit in it, as some libraries end threads. The call of that moment may fail, and the
    next one runs in another thread."""
    program = """
        import contextlib, ctypes, sys, threading
        from asynclock.blocking import Redlock

        def loops():
            return [each for each in threading.enumerate() if each.name == "asynclock loop"]

        client, name = Redlock(sys.argv[1]), sys.argv[2]
        with client(name):
            pass
        old = loops()[0]
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(old.ident), ctypes.py_object(SystemExit))
        with contextlib.suppress(ValueError):
            client(name).locked()  # wakes the thread
        old.join()
        with client(name) as lease:
            print(lease.held, loops() != [old])
        """
    assert run_python(program, shared_urls[0], name) == "True True\n"


@posix
def test_c8_a_child_has_a_loop_of_its_own(client: Redlock, shared_urls: list[str], name: str) -> None:
    """Threads hold and wait while the main thread and another thread fork. A child holds nothing of its parent, says so
    at the end of a block that began there, and uses the same client. The parent goes on, and the child's hold is
    released at its exit."""
    program = """
        import logging, os, sys, threading, time, signal
        from asynclock import LockNotHeld
        from asynclock.blocking import Redlock, current_lease

        slow = "asynclock: the event loop did not run"
        logging.getLogger("asynclock").addFilter(lambda record: not record.getMessage().startswith(slow))
        options = {"lease": 6, "node_timeout": 2, "connect_timeout": 20, "patience": 20}  # the machine may be busy
        client, other, name = Redlock(sys.argv[1], **options), Redlock(sys.argv[1], **options), sys.argv[2]
        held, stop = threading.Event(), threading.Event()

        def hold():
            with client(f"{name}:held") as lease:
                held.set()
                stop.wait()
                lease.ensure_held()

        def wait():
            with other(f"{name}:held"):
                pass

        def child(mine):
            signal.alarm(40)
            assert not mine.held and current_lease() is None
            try:
                mine.release()
            except LockNotHeld as error:
                assert "parent process" in str(error)
            assert client(f"{name}:held").acquire(timeout=0) is None
            with client(f"{name}:child") as lease:
                for _ in range(2):  # a loop of this process renews it
                    left = lease.remaining
                    while (now := lease.remaining) <= left:
                        left = now
                        time.sleep(0.02)
                lease.ensure_held()
            globals()["left"] = client(f"{name}:exit").acquire()

        def fork(main=True):
            try:
                with client(f"{name}:{threading.get_ident()}") as mine:
                    pid = os.fork()
                    if pid == 0:
                        child(mine)
            except LockNotHeld as error:
                assert pid == 0 and "parent process" in str(error)
                sys.stdout.flush()
                sys.exit(0) if main else os._exit(0)
            assert pid and os.waitpid(pid, 0)[1] == 0
            mine  # the block has released it: no error in the parent

        threads = [threading.Thread(target=each, daemon=True) for each in (hold, wait, wait)]
        threads[0].start()
        held.wait()
        for each in threads[1:]:
            each.start()
        while not client.inspect(f"{name}:held").waiters:
            time.sleep(0.01)
        fork()
        client.break_lock(f"{name}:exit")  # a thread that forks ends its child by os._exit
        forking = threading.Thread(target=fork, args=(False,))
        forking.start()
        forking.join()
        stop.set()
        for each in threads:
            each.join()
        print("parent done")
        """
    assert run_python(program, shared_urls[0], name).strip() == "parent done"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the descriptors of a process are not listed here")
def test_c8_a_child_keeps_nothing_on_which_threads_of_its_parent_wait(
    client: Redlock, shared_urls: list[str], name: str
) -> None:
    """A listener forks in the middle of a call, while other threads wait. The child has closed the descriptors on which
    threads of the parent wait; it keeps one of the loop of the parent. Its own calls work, and end at once."""
    program = """
        import os, signal, sys, threading, time
        from asynclock.blocking import Redlock
        from asynclock.events import Acquired

        client, other, name, pids = Redlock(sys.argv[1]), Redlock(sys.argv[1]), sys.argv[2], []

        def fork(event):
            if isinstance(event, Acquired) and event.name.endswith("fork"):
                pids.append(os.fork())

        def events():
            links = []
            for each in os.listdir("/proc/self/fd"):
                try:
                    links.append(os.readlink(f"/proc/self/fd/{each}"))
                except OSError:
                    pass
            return links.count("anon_inode:[eventfd]")

        with client(f"{name}:held"):
            waiting = threading.Thread(target=lambda: other(f"{name}:held").acquire().release(), daemon=True)
            waiting.start()
            while not client.inspect(f"{name}:held").waiters:
                time.sleep(0.01)
            client.subscribe(fork)
            inherited = client(f"{name}:fork").acquire()
            if pids == [0]:
                signal.alarm(40)
                assert not inherited.held
                assert events() == 1  # of the loop of the parent
                for number in range(5):
                    with client(f"{name}:{number}"):
                        pass
                assert events() == 3  # and of its own, and of this thread
                os._exit(0)
            assert events() == 3  # of the loop, of the thread that waits, and of this one
            assert os.waitpid(pids[0], 0)[1] == 0
            inherited.release()
        waiting.join()
        print("parent done")
        """
    assert run_python(program, shared_urls[0], name).strip() == "parent done"


@posix
def test_a_forked_child_uses_the_client_of_its_parent(shared_urls: list[str], name: str) -> None:
    """A child of multiprocessing waits for the lock that its parent holds, and gets it after the parent."""
    program = """
        import multiprocessing, sys, time
        from asynclock.blocking import Redlock

        client, name = Redlock(sys.argv[1]), sys.argv[2]

        def work():
            with client(name) as lease:
                print(lease.fence, flush=True)

        with client(name) as lease:
            child = multiprocessing.get_context("fork").Process(target=work)
            child.start()
            while not client.inspect(name).waiters:
                time.sleep(0.01)
            print(lease.fence, flush=True)
        child.join()
        print(child.exitcode)
        """
    parent, child, exitcode = map(int, run_python(program, shared_urls[0], name).split())
    assert exitcode == 0
    assert parent < child


@pytest.fixture
def children(tmp_path: Path) -> dict[str, str]:
    """The environment of a program whose children can import the module `work`."""
    work = """
        import os
        from asynclock.blocking import Redlock

        def take_turns(url, name, folder):
            with Redlock(url) as client:
                for _ in range(10):
                    with client(name):
                        os.mkdir(folder)  # raises if another child has made it
                        os.rmdir(folder)

        def leave(url, name):
            global client, left
            client = Redlock(url, lease=60)
            left = client(name).acquire()
            print(left.held, flush=True)
        """
    (tmp_path / "work.py").write_text(QUIET + textwrap.dedent(work))
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), PYTHONPATH])}


@posix
def test_the_children_of_multiprocessing_exclude_each_other(
    shared_urls: list[str], name: str, tmp_path: Path, children: dict[str, str]
) -> None:
    """Three children, one forked, one spawned and one of a forkserver, wait at the same time. From then on one of them
    at a time is in its block."""
    program = """
        import multiprocessing, sys, time, work
        from asynclock.blocking import Redlock

        client, started = Redlock(sys.argv[1]), []
        with client(sys.argv[2]):
            for method in ("fork", "spawn", "forkserver"):
                started.append(multiprocessing.get_context(method).Process(target=work.take_turns, args=sys.argv[1:]))
            for each in started:
                each.start()
            while len(client.inspect(sys.argv[2]).waiters) < len(started):
                assert all(each.is_alive() for each in started)
                time.sleep(0.01)
        for each in started:
            each.join()
        print(*[each.exitcode for each in started])
        """
    assert run_python(program, shared_urls[0], name, str(tmp_path / "inside"), **children) == "0 0 0\n"


@pytest.mark.parametrize(
    "method", [pytest.param("fork", marks=posix), "spawn", pytest.param("forkserver", marks=posix)]
)
def test_a_child_of_multiprocessing_releases_at_its_end(
    shared_urls: list[str], name: str, method: str, children: dict[str, str]
) -> None:
    """A child ends while it holds a lock, with a lease of a minute. When its parent has joined it, the lock is free."""
    program = """
        import multiprocessing, sys, work
        from asynclock.blocking import Redlock

        child = multiprocessing.get_context(sys.argv[3]).Process(target=work.leave, args=sys.argv[1:3])
        child.start()
        child.join()
        client = Redlock(sys.argv[1])
        print(child.exitcode, client(sys.argv[2]).locked(), client.inspect(sys.argv[2]).fence > 0)
        """
    assert run_python(program, shared_urls[0], name, method, **children) == "True\n0 False True\n"


@posix
def test_a_child_of_multiprocessing_releases_after_the_blocks_of_its_threads(shared_urls: list[str], name: str) -> None:
    """The function of a child returns while a worker of a pool and a thread are in their blocks, which use more locks.
    The child waits for both, and nothing is released before that. Then the child releases what its main thread holds.
    The leases last for a minute."""
    program = """
        import multiprocessing, sys, threading, time
        from concurrent.futures import ThreadPoolExecutor
        from asynclock.blocking import Redlock

        client, name = Redlock(sys.argv[1], lease=60), sys.argv[2]
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        pool, in_block = ThreadPoolExecutor(), threading.Barrier(3)

        def until_the_end_of_the_pool():
            while True:
                try:
                    pool.submit(int)
                except RuntimeError:
                    return
                time.sleep(0.01)

        def work(part, wait):
            try:
                with client(f"{name}:{part}") as lease:
                    in_block.wait()
                    wait()
                    theirs.send(part)
                    theirs.recv()
                    with client(f"{name}:more"):
                        lease.ensure_held()
                theirs.send("left")
            except Exception as error:
                theirs.send(repr(error))

        def run():
            global kept
            kept = client(f"{name}:kept").acquire()
            pool.submit(work, "pool", until_the_end_of_the_pool)
            threading.Thread(target=work, args=("thread", threading.main_thread().join)).start()
            in_block.wait()

        child = context.Process(target=run)
        child.start()
        for _ in range(2):  # the pool ends first
            print(ours.recv(), *[client(f"{name}:{part}").locked() for part in ("pool", "thread", "kept")])
            ours.send("leave")
            print(ours.recv())
        child.join()
        print(child.exitcode, *[client(f"{name}:{part}").locked() for part in ("pool", "thread", "kept")])
        """
    assert run_python(program, shared_urls[0], name).splitlines() == [
        "pool True True True",
        "left",
        "thread False True True",
        "left",
        "0 False False False",
    ]


def test_a_lock_is_free_after_the_lease_of_a_killed_holder(client: Redlock, shared_urls: list[str], name: str) -> None:
    """A process that holds a lock ends by kill -9, which releases nothing. A waiter gets the lock when the lease of the
    killed process has ended."""
    program = """
        import os, signal, sys
        from asynclock.blocking import Redlock
        client = Redlock(sys.argv[1], lease=1)
        with client(sys.argv[2]):
            print("held", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """
    words = ["-c", textwrap.dedent(program), shared_urls[0], name]
    done = run(words, LIBRARY, env={"PYTHONPATH": PYTHONPATH, "PATH": "/usr/bin:/bin"})
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "held\n")
    with client(name, timeout=LIMIT):
        pass


@pytest.mark.parametrize("patched", ["patch_all()", "patch_select()", "patch_socket()"])
def test_gevent_is_refused(shared_urls: list[str], patched: str) -> None:
    """Where it made greenlets of threads, a wait would block them all; where it patched `select`, the loop could not
    wait. The error says so."""
    pytest.importorskip("gevent")
    program = f"""
        from gevent import monkey
        monkey.{patched}
        import sys
        from asynclock.blocking import Redlock
        try:
            Redlock(sys.argv[1])("a").acquire()
        except ValueError as error:
            print(error)
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), shared_urls[0]],
        env={"PYTHONPATH": PYTHONPATH, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    )
    assert "gevent has replaced" in done.stdout
