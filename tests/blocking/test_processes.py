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
from tests.support.programs import PYTHONPATH, run_python
from tests.support.waiters import LIMIT

posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


def test_an_exit_releases(client: Redlock, shared_urls: list[str], name: str) -> None:
    """The main thread ends while it holds, while a daemon waits and another one holds, and while a pool works on. The
    pool may use locks until its end; then what is held is released, and no ticket is left. It ends at once."""
    program = """
        import sys, threading, time
        from concurrent.futures import ThreadPoolExecutor
        from asynclock.blocking import Redlock

        client, other, name = Redlock(sys.argv[1]), Redlock(sys.argv[1]), sys.argv[2]
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
    assert run_python(program, shared_urls[0], name) == "worked\n"
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
        running = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), shared_urls[0], name],
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


@posix
def test_c8_a_child_has_a_loop_of_its_own(client: Redlock, shared_urls: list[str], name: str) -> None:
    """Threads hold and wait while the main thread and another thread fork. A child holds nothing of its parent, says so
    at the end of a block that began there, and uses the same client. The parent goes on, and the child's hold is
    released at its exit."""
    program = """
        import os, sys, threading, time, signal
        from asynclock import LockNotHeld
        from asynclock.blocking import Redlock, current_lease

        client, other, name = Redlock(sys.argv[1], lease=2), Redlock(sys.argv[1], lease=2), sys.argv[2]
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
            signal.alarm(20)
            assert not mine.held and current_lease() is None
            try:
                mine.release()
            except LockNotHeld as error:
                assert "parent process" in str(error)
            assert client(f"{name}:held").acquire(timeout=0) is None
            with client(f"{name}:child", lease=1.5) as lease:
                time.sleep(1.8)  # it is renewed by a loop of this process
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
                assert events() == 2  # of the loop of the parent, and of its own
                for number in range(5):
                    with client(f"{name}:{number}"):
                        pass
                os._exit(0)
            assert events() == 3  # of the loop, of the thread that waits, and of this one
            assert os.waitpid(pids[0], 0)[1] == 0
            inherited.release()
        waiting.join()
        print("parent done")
        """
    assert run_python(program, shared_urls[0], name).strip() == "parent done"


@posix
def test_the_children_of_multiprocessing(client: Redlock, shared_urls: list[str], name: str) -> None:
    """Forked and spawned: they exclude each other, and what they still hold at their end is released."""
    program = """
        import multiprocessing, sys
        from asynclock.blocking import Redlock

        client = Redlock(sys.argv[1])

        def work(url, name, here):
            own = client if here else Redlock(url)
            with own(name) as lease:
                print(lease.fence, flush=True)
            globals()["left"] = own(f"{name}:{here}").acquire()

        if __name__ == "__main__":
            url, name = sys.argv[1:3]
            with client(name):
                children = [multiprocessing.get_context("fork").Process(target=work, args=(url, name, True))]
                import json.tool  # a module that a spawned child can import
                for each in children:
                    each.start()
            for each in children:
                each.join()
            assert not client(f"{name}:True").locked()
            print(*[each.exitcode for each in children])
        """
    output = run_python(program, shared_urls[0], name).split()
    assert output[-1] == "0"
    assert len(output) == 2


@posix
def test_a_spawned_child(tmp_path: object, client: Redlock, shared_urls: list[str], name: str) -> None:
    """A pool of spawned processes makes its own clients; the holder dies by kill -9, and its lock is free after the
    lease."""
    program = """
        import os, signal, sys
        from asynclock.blocking import Redlock
        client = Redlock(sys.argv[1], lease=1)
        with client(sys.argv[2]):
            print("held", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), shared_urls[0], name],
        env={"PYTHONPATH": PYTHONPATH, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
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
