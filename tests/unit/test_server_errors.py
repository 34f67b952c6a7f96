"""What the errors of servers say to their users."""

from __future__ import annotations

import pytest

from asynclock.stores.redis.replies import Fault, ServerError, config_error, fault_of, is_half_done

SHA = "2ce9e1" + "0" * 34
READONLY = "READONLY You can't write against a read only replica"


@pytest.mark.parametrize(
    "reply",
    [
        f"ERR Error running script (call to f_{SHA}): @user_script:17: @user_script: 17: -{READONLY}.",  # Redis 6.2
        f"{READONLY}. script: {SHA}, on @user_script:17.",  # Redis 7
        f"{READONLY}. script: on @user_script:17.",  # Valkey
        f"{READONLY}.",  # a command outside of a script
    ],
)
def test_an_error_names_no_script(reply: str) -> None:
    """Operators do not know the scripts of the library. The error says what to do instead."""
    error = ServerError(reply)
    assert str(error) == f"{READONLY}; it is a replica: name its master, or use Sentinel"
    assert fault_of(error) is Fault.RECONNECT
    assert is_half_done(error) is ("script" in reply)


@pytest.mark.parametrize(
    ("reply", "fault"),
    [
        ("BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.", Fault.DOWN),
        ("NOSCRIPT No matching script. Please use EVAL.", Fault.RESEND),
        ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", Fault.RECONNECT),
    ],
)
def test_an_error_before_the_script_leaves_nothing_in_doubt(reply: str, fault: Fault) -> None:
    """The server has not begun the script, whatever its error says of scripts."""
    assert fault_of(ServerError(reply)) is fault
    assert not is_half_done(ServerError(reply))


def test_a_script_that_refuses_is_understood_on_redis_6() -> None:
    """A name that is in use as something else is a ConfigError there, too, and no outage."""
    reply = f"ERR Error running script (call to f_{SHA}): @user_script:46: WRONGTYPE Operation against a key"
    assert fault_of(ServerError(reply)) is Fault.CONFIG
    said = str(config_error("a:6379", ServerError(reply)))
    assert said.startswith("a:6379 refuses: WRONGTYPE Operation against a key; the key is in use as something else")


def test_a_refused_right_names_no_script() -> None:
    """The rule to paste follows."""
    reply = "ERR ACL failure in script: User w has no permissions to run the 'set' command script: on @user_script:1."
    said = str(config_error("a:6379", ServerError(reply)))
    assert "has no permissions to run the 'set' command; the user needs this rule" in said


def test_a_failure_of_the_script_itself_names_its_line() -> None:
    """It is a fault of the library, so the line matters."""
    reply = f"ERR user_script:88: attempt to index a nil value script: {SHA}, on @user_script:88."
    assert str(ServerError(reply)) == reply
