"""What other clients and programs wrote is data: numbers are read with limits, and text is shown escaped."""

from __future__ import annotations

import logging
import pickle

import pytest

from asynclock import ConfigError, LockError
from asynclock._options import LockSettings
from asynclock._untrusted import number_of, printable, said
from asynclock.cli.program import complain
from asynclock.locks.admin import free_permits
from asynclock.protocol.causes import Cause, HolderNote, NoLease, lock_lost_error, lock_timeout_error, note_of
from asynclock.rules.model import State
from asynclock.rules.semaphore import wants
from asynclock.stores.port import Refused
from asynclock.stores.redis.replies import ServerError, refusal_of
from asynclock.stores.sql.errors import reason
from asynclock.stores.sql.listening import notice_of
from asynclock.stores.sql.rows import Damaged, Row, key_of, looks_of, state_of
from asynclock.stores.zookeeper.contender import read
from asynclock.stores.zookeeper.layout import Layout, queue_of

RANDOM = "c0ffee" * 5 + "ab"
ODD_HOST = "web\x1b[2J\r\nroot: all is well\u202e"
SHOWN = r"web\x1b[2J\r\nroot: all is well\u202e"
ODD_NUMBERS = ["", "²", "٣", "-1", "+1", " 1", "1_0", "1e3", "0x1", "9" * 17, "9" * 5000]


@pytest.mark.parametrize("text", ODD_NUMBERS)
def test_f11_a_number_is_a_few_digits(text: str) -> None:
    """In the fields of an id, of a semaphore, of the data of ZooKeeper's nodes, and in the replies of Redis."""
    assert number_of(text) is None
    assert note_of(f"{RANDOM}|{text}|7|web|note") == note_of(f"{RANDOM}|1|{text}|web|note") == HolderNote()
    assert wants(f"{RANDOM}|s{text}/.1|7|web|") == (0, "")
    assert read(f"{RANDOM}|1|7|web|\0{text}".encode())[1] == 1
    slots = refusal_of([0, 5, b"x", 0, 0, f"3 {text} 4".encode()]).slots
    assert slots is not None
    assert slots.taken in ((3, 4), (3, 1, 4))  # the latter of " 1", which is a space and a slot
    assert free_permits([f"{RANDOM}|s{text}/.1|7|web|"]) is None


def test_f11_usual_numbers_are_read() -> None:
    """Up to 2^53."""
    assert (number_of("0"), number_of(str(2**53))) == (0, 2**53)
    assert note_of(f"{RANDOM}|s3/1.1700000000000000|4194304|web|a|b") == HolderNote("web", 4194304, 1.7e9, "a|b")
    assert wants(f"{RANDOM}|s10000/9999.1|7|web|") == (10000, "9999")


def test_f11_a_host_of_any_length_is_cut() -> None:
    """No host name is longer than 255 characters."""
    assert note_of(f"{RANDOM}|1|7|{'h' * 8000}|").host == "h" * 255


def test_f11_no_character_moves_the_cursor() -> None:
    """Letters of all languages are shown as they are; escaping twice changes nothing."""
    assert printable("Übung 物 é") == "Übung 物 é"
    assert printable(ODD_HOST) == printable(printable(ODD_HOST)) == SHOWN
    assert said(OSError("a\nb")) == r"a\nb"
    assert said(OSError()) == "OSError()"


def test_f11_each_error_is_one_line() -> None:
    """Also after it was pickled. Errors of servers that are no LockError are escaped where they are made."""
    error = ConfigError(f"the server said: {ODD_HOST}", name="k")
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == f"the server said: {SHOWN}"
    assert str(LockError("plain")) == "plain"
    assert str(ServerError(f"ERR {ODD_HOST}")) == f"ERR {SHOWN}"
    assert reason(OSError(ODD_HOST)) == SHOWN


def test_f11_errors_show_the_host_of_a_holder_escaped() -> None:
    """Of one who holds the name, took it or broke it."""
    id_ = f"{RANDOM}|1700000000000000|812|{ODD_HOST}|note"
    timeout = lock_timeout_error("k", NoLease(id_, 19.0), None, 1_700_000_041.0, timeout=5.0, several=False)
    assert f"the holder is {SHOWN}, pid 812 ('note')" in str(timeout)
    assert timeout.holder is not None
    assert timeout.holder.host == ODD_HOST  # a value is left as it is
    facts = (LockSettings(), 0.0, 1.0, 0.0)
    taken = lock_lost_error("k", Cause("taken", *facts, None, {}, {0: Refused(5.0, id_)}), ["redis://a"])
    assert f"another owner holds the name now: {SHOWN}, pid 812" in str(taken)
    assert SHOWN in str(taken.errors["redis://a"])
    broken = lock_lost_error("k", Cause("broken", *facts, f"7\n|{ODD_HOST}|a\nb", {}, {}), [])
    assert rf"{SHOWN}, pid 7\n ('a\nb') broke it" in str(broken)


@pytest.mark.parametrize("logger", ["asynclock", "asynclock.kazoo"])
def test_f11_log_lines_are_escaped(caplog: pytest.LogCaptureFixture, logger: str) -> None:
    """Whatever they name."""
    log = logging.getLogger(logger)
    log.error("the node %s is down: %s", "redis://a", OSError(ODD_HOST))
    log.error("%s: 100%%", ODD_HOST)
    assert caplog.messages == [f"the node redis://a is down: {SHOWN}", f"{SHOWN}: 100%"]


def test_f11_a_command_complains_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the error says. A line feed of the command's own text becomes a space."""
    complain(f"the holder is {ODD_HOST}", "run")
    assert capsys.readouterr().err == "asynclock run: the holder is web\\x1b[2J root: all is well\\u202e\n"


DAMAGED = [
    "", "[]", "1", "null", "{", '{"v": "1"}', '{"holds": 1}', '{"holds": [["a"]]}', '{"holds": [[1, 2.0]]}',
    '{"undone": [["a", "b"]]}', '{"queue": [[1, "a"]]}', '{"queue": [["1", "a", 1, 2.0, 3.0, 1]]}',
    '{"queue": [[1, "a", 1, 2.0, 3.0, 1, 1, 1]]}', '{"fence": "7"}', '{"fence": 9223372036854775808}',
    '{"fence": 1e999}', '{"fence": ' + "9" * 5000 + "}", '{"fence_ends": NaN}', "[" * 100_000, '{"looks": [1]}',
    '{"looks": 1}',
]  # fmt: skip


@pytest.mark.parametrize("state", DAMAGED, ids=lambda state: state[:40])
def test_f11_a_row_of_another_program_is_told_as_such(state: str) -> None:
    """By an op of its name. A list of the holders leaves it out."""
    row = Row("lock:a\nb", state=state or "nothing")
    with pytest.raises(Damaged, match=r"the row 'lock:a\\nb' was written by another program") as caught:
        looks_of(row)
        state_of(row)
    assert isinstance(caught.value, ConfigError)
    if "looks" not in state:
        assert key_of(row) is None


def test_f11_a_state_without_an_end_is_read() -> None:
    """What `row_of` writes for a hold that never ends, and for a counter that is never forgotten."""
    row = Row("k", state='{"v":1,"holds":[["x",null]],"fence":7,"fence_ends":Infinity}')
    assert state_of(row) == State((("x", None),), 7, float("inf"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "message", ["", "{}", "[1]", "7", '{"id": 7, "number": 1}', '{"id": "a", "number": "1"}', "[" * 100_000]
)
def test_f11_a_message_of_another_program_is_no_notice(message: str) -> None:
    """Any program of the database may send one."""
    assert notice_of(message) is None


def test_f11_a_node_of_zookeeper_with_a_long_number_is_no_semaphore() -> None:
    """And no error."""
    names = [f"{RANDOM}s{'9' * 5000}__sem__0000000001", f"{RANDOM}s3__sem__0000000002"]
    assert [child.permits for child in queue_of(Layout.KAZOO, names)] == [3]
