"""The checks of options, without a client: asynclock._options is pure."""

from __future__ import annotations

import math
from dataclasses import fields
from datetime import timedelta
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynclock import ClientOptions, ConfigError, LockOptions
from asynclock._options import (
    MAX_METADATA,
    MIN_LEASE,
    ClientSettings,
    LockSettings,
    check_name,
    check_node_timeout,
    client_settings,
    lock_settings,
    seconds,
)

TIMES = ["lease", "timeout", "max_hold", "min_hold"]
CLIENT_TIMES = [*TIMES, "max_lease", "node_timeout", "patience", "fence_memory"]
FLAGS = ["cancel_on_lost", "fencing", "trust_restarts"]


def test_the_typed_options_are_the_settings() -> None:
    """The types and the checks have the same option names, so that neither is forgotten."""
    assert set(get_type_hints(LockOptions)) == {field.name for field in fields(LockSettings)}
    assert set(get_type_hints(ClientOptions)) == (
        {field.name for field in fields(LockSettings)} | {field.name for field in fields(ClientSettings)} - {"lock"}
    )


def test_defaults() -> None:
    """The defaults that the docs give."""
    assert client_settings({}) == ClientSettings()
    lock = ClientSettings().lock
    assert (lock.lease, lock.timeout, lock.renew, lock.max_hold) == (30.0, None, True, None)
    assert (lock.min_hold, lock.cancel_on_lost, lock.metadata, lock.fencing) == (0.0, True, "", True)
    client = ClientSettings()
    assert (client.max_lease, client.node_timeout, client.patience) == (60.0, None, 5.0)
    assert (client.prefix, client.fence_memory, client.trust_restarts) == ("lock:", 300.0, False)


@pytest.mark.parametrize("option", CLIENT_TIMES)
@pytest.mark.parametrize(
    "value",
    [-1, -0.001, math.nan, math.inf, -math.inf, timedelta(seconds=-1), 10**400],
    ids=["int", "float", "nan", "inf", "-inf", "timedelta", "huge"],
)
def test_b8_a_time_is_finite_and_not_negative(option: str, value: Any) -> None:
    """The error names the option and says what to give instead."""
    with pytest.raises(ConfigError, match=rf"{option}=.*give .*0"):
        client_settings({option: value})


@pytest.mark.parametrize("option", CLIENT_TIMES)
@pytest.mark.parametrize("value", [True, False, "30", b"30", [30], Ellipsis], ids=repr)
def test_b8_a_time_is_a_number_or_a_timedelta(option: str, value: Any) -> None:
    """True is no second, and "30" no number."""
    with pytest.raises(ConfigError, match=rf"{option} is a number of seconds or a timedelta"):
        client_settings({option: value})


@pytest.mark.parametrize("option", ["lease", "max_hold", "max_lease", "node_timeout", "connect_timeout"])
@pytest.mark.parametrize("zero", [0, 0.0, -0.0, timedelta()])
def test_b8_zero_where_it_means_nothing(option: str, zero: Any) -> None:
    """A lease of no length is refused."""
    with pytest.raises(ConfigError, match=f"{option}=.*more than 0"):
        client_settings({option: zero})


@pytest.mark.parametrize("option", ["timeout", "min_hold", "patience"])
def test_zero_where_it_means_something(option: str) -> None:
    """timeout=0 tries once; min_hold=0 and patience=0 mean none."""
    client_settings({option: 0})


@pytest.mark.parametrize("option", ["timeout", "max_hold", "node_timeout"])
def test_none_where_it_means_something(option: str) -> None:
    """These options may be None."""
    client_settings({option: None})


@pytest.mark.parametrize("option", ["lease", "min_hold", "max_lease", "patience", "connect_timeout", "fence_memory"])
def test_b8_none_where_it_means_nothing(option: str) -> None:
    """A lease has a length."""
    with pytest.raises(ConfigError, match=option):
        client_settings({option: None})


def test_b8_an_infinite_timeout_recommends_none() -> None:
    """The error for inf recommends None."""
    with pytest.raises(ConfigError, match="None"):
        lock_settings("a", {"timeout": math.inf}, ClientSettings())


def test_b8_lease_in_milliseconds() -> None:
    """30000 is no lease of thirty seconds: the message has the word 'seconds' and the bound."""
    with pytest.raises(ConfigError, match=r"30000 seconds is above max_lease=60 seconds"):
        lock_settings("order:42", {"lease": 30000}, ClientSettings())


def test_b8_lease_at_the_bounds() -> None:
    """The bounds themselves are allowed."""
    assert lock_settings("a", {"lease": 60}, ClientSettings()).lease == 60
    assert lock_settings("a", {"lease": MIN_LEASE}, ClientSettings()).lease == MIN_LEASE
    with pytest.raises(ConfigError, match=f"at least {MIN_LEASE:g} s"):
        lock_settings("a", {"lease": MIN_LEASE / 2}, ClientSettings())


def test_b8_lease_below_three_node_timeouts() -> None:
    """The message says the bound that follows from node_timeout."""
    with pytest.raises(ConfigError, match=r"at least 3 s"):
        client_settings({"lease": 2, "node_timeout": 1})
    with pytest.raises(ConfigError, match=r"at least 3 s") as caught:
        lock_settings("order:42", {"lease": 2}, client_settings({"node_timeout": 1}))
    assert caught.value.name == "order:42"
    check_node_timeout(LockSettings(lease=3), 1)


def test_a_longer_max_lease_allows_longer_leases() -> None:
    """One figure per deployment, given together with the lease it is for."""
    settings = client_settings({"lease": 300, "max_lease": timedelta(minutes=5)})
    assert settings.lock.lease == settings.max_lease == 300


def test_b8_min_hold_above_the_lease() -> None:
    """The name cannot stay taken for longer than the lease."""
    with pytest.raises(ConfigError, match=r"min_hold=11 s is above lease=10 s"):
        lock_settings("a", {"lease": 10, "min_hold": 11}, ClientSettings())
    with pytest.raises(ConfigError, match="min_hold=30000 s"):
        lock_settings("a", {"min_hold": 30000}, ClientSettings())


def test_b8_fence_memory_too_short() -> None:
    """A counter that is forgotten at once orders nothing."""
    with pytest.raises(ConfigError, match="at least 60"):
        client_settings({"fence_memory": 59})


@pytest.mark.parametrize("option", FLAGS)
@pytest.mark.parametrize("value", [0, 1, None, "yes"])
def test_flags_are_bools(option: str, value: Any) -> None:
    """'yes' is refused."""
    with pytest.raises(ConfigError, match=f"{option} is a bool"):
        client_settings({option: value})


@pytest.mark.parametrize("option", ["prefix", "metadata"])
@pytest.mark.parametrize("value", [b"x", None, 1])
def test_texts_are_str(option: str, value: Any) -> None:
    """Bytes are not decoded by guess."""
    with pytest.raises(ConfigError, match=f"{option} is a str"):
        client_settings({option: value})


@pytest.mark.parametrize("option", ["prefix", "metadata"])
def test_texts_encode(option: str) -> None:
    """A lone surrogate fails here, not in the middle of an acquire."""
    with pytest.raises(ConfigError, match=option):
        client_settings({option: "\ud800"})


def test_metadata_has_an_end() -> None:
    """It travels with every command of its lock."""
    client_settings({"metadata": "x" * MAX_METADATA})
    with pytest.raises(ConfigError, match=f"at most {MAX_METADATA}"):
        client_settings({"metadata": "x" * (MAX_METADATA + 1)})


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("leese", "lease"), ("time_out", "timeout"), ("metdata", "metadata"), ("cancel_on_loss", "cancel_on_lost")],
)
def test_misspelt_lock_option(wrong: str, right: str) -> None:
    """Did you mean?"""
    with pytest.raises(ConfigError, match=f"'{wrong}' is no option of a lock: did you mean '{right}'"):
        lock_settings("a", {wrong: 1}, ClientSettings())


def test_misspelt_client_option() -> None:
    """The client's own options are suggested to a client."""
    with pytest.raises(ConfigError, match="did you mean 'max_lease'"):
        client_settings({"maxlease": 60})


def test_unknown_option_lists_all_options() -> None:
    """No option is close: all are listed."""
    with pytest.raises(ConfigError, match=r"cancel_on_lost, fencing, label, lease"):
        lock_settings("a", {"zzz": 1}, ClientSettings())


def test_a_clients_option_is_none_of_a_lock() -> None:
    """prefix belongs to the client."""
    with pytest.raises(ConfigError, match="no option of a lock"):
        lock_settings("a", {"prefix": "x"}, ClientSettings())


def test_a_lock_overrides_its_client_and_no_more() -> None:
    """Other settings of a lock are the client's; the client's own stay as they were."""
    client = client_settings({"lease": 10, "timeout": 3})
    lock = lock_settings("a", {"timeout": None}, client)
    assert (lock.lease, lock.timeout) == (10, None)
    assert client.lock.timeout == 3
    assert lock_settings("a", {}, client) is client.lock


def test_settings_are_set_whole_or_not_at_all() -> None:
    """client_settings over a base keeps the base as it was, whether it succeeds or not."""
    base = client_settings({"lease": 10})
    with pytest.raises(ConfigError):
        client_settings({"prefix": "x:", "lease": 600}, base)
    assert base == client_settings({"lease": 10})
    assert client_settings({"prefix": "x:"}, base).lock.lease == 10


@given(st.floats(min_value=1e-9, max_value=1e9))
def test_a_timedelta_is_the_same_seconds(value: float) -> None:
    """Both ways to say a time come to the same float."""
    delta = timedelta(seconds=value) or timedelta(microseconds=1)
    assert seconds("lease", delta) == delta.total_seconds()
    assert seconds("lease", value) == value


@given(st.one_of(st.integers(), st.floats(), st.booleans(), st.text(), st.none(), st.timedeltas(), st.binary()))
def test_a_time_is_seconds_or_a_config_error(value: Any) -> None:
    """No other exception ever comes out, and nothing but a finite number above zero goes in."""
    try:
        found = seconds("lease", value)
    except ConfigError:
        return
    assert isinstance(found, float)
    assert 0 < found < math.inf


@given(st.one_of(st.text(), st.binary(), st.integers(), st.none(), st.characters(codec=None)))
def test_a_name_is_a_non_empty_str_or_a_config_error(name: Any) -> None:
    """An accepted name can be sent."""
    try:
        found = check_name(name)
    except ConfigError:
        return
    assert found == name
    assert found.encode()
