"""The options that a client without nodes takes from the environment; and hints for the words of other libraries."""

from __future__ import annotations

import pytest

from asynclock import ConfigError, Redlock
from asynclock._options import ENVIRONMENT, ClientSettings, environment_settings
from tests.support.default_keys import key_of
from tests.support.probes import id_of, session_of, settings_of
from tests.support.servers import Server


@pytest.fixture
def patient_connects() -> None:
    """These tests are about the defaults themselves."""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the variables is set."""
    for variable in (*ENVIRONMENT.values(), "ASYNCLOCK_URLS"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def ready_made(server: Server, monkeypatch: pytest.MonkeyPatch) -> Redlock:
    """A client like `asynclock.redlock`, on a server that the environment names."""
    client = Redlock()
    monkeypatch.setenv("ASYNCLOCK_URLS", server.url)
    return client


async def test_each_variable_sets_its_option(
    ready_made: Redlock, server: Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read at the first await: the client was made before they were set."""
    monkeypatch.setenv("ASYNCLOCK_PREFIX", "app:")
    monkeypatch.setenv("ASYNCLOCK_LEASE", "90.5")
    monkeypatch.setenv("ASYNCLOCK_MAX_LEASE", "120")
    monkeypatch.setenv("ASYNCLOCK_TIMEOUT", "0")
    monkeypatch.setenv("ASYNCLOCK_NODE_TIMEOUT", "5.25")
    monkeypatch.setenv("ASYNCLOCK_CONNECT_TIMEOUT", "7")
    monkeypatch.setenv("ASYNCLOCK_TRUST_RESTARTS", "yes")
    async with ready_made, ready_made(name) as lease:
        with server.cli() as cli:
            assert cli.get(f"app:{name}") == id_of(lease).encode()
        assert 60 < lease.remaining <= 90.5
        assert settings_of(lease).timeout == 0
        settings = session_of(ready_made).settings
        assert (settings.max_lease, settings.node_timeout, settings.trust_restarts) == (120.0, 5.25, True)
        assert settings.connect_timeout == 7.0


async def test_a_lock_that_was_made_before_a_variable_was_set(
    ready_made: Redlock, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the import of a module, before the program has read its file of variables. It has the settings of the first
    await, as the client has."""
    lock = ready_made(name)
    monkeypatch.setenv("ASYNCLOCK_LEASE", "10")
    monkeypatch.setenv("ASYNCLOCK_MAX_LEASE", "15")
    async with ready_made, lock as lease:
        assert settings_of(lease).lease == 10


async def test_what_configure_gives_wins(
    ready_made: Redlock, server: Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment sets the other options, with nodes of configure(), too."""
    monkeypatch.setenv("ASYNCLOCK_LEASE", "20")
    monkeypatch.setenv("ASYNCLOCK_TIMEOUT", "7")
    monkeypatch.setenv("ASYNCLOCK_MAX_LEASE", "300")
    ready_made.configure(server.url, lease=200)
    async with ready_made, ready_made(name) as lease:
        settings = settings_of(lease)
        assert (settings.lease, settings.timeout) == (200.0, 7.0)


async def test_a_client_with_nodes_of_its_own_reads_no_variable(
    server: Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment is that of the ready-made client."""
    monkeypatch.setenv("ASYNCLOCK_PREFIX", "app:")
    monkeypatch.setenv("ASYNCLOCK_LEASE", "nonsense")
    async with Redlock(server.url) as client, client(name) as lease:
        with server.cli() as cli:
            assert cli.get(key_of(name)) == id_of(lease).encode()


async def test_an_option_of_the_lock_wins(ready_made: Redlock, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables set defaults, also for the lock that is made before the first await."""
    monkeypatch.setenv("ASYNCLOCK_LEASE", "20")
    monkeypatch.setenv("ASYNCLOCK_TIMEOUT", "7")
    async with ready_made(name, lease=10) as lease:
        assert (settings_of(lease).lease, settings_of(lease).timeout) == (10.0, 7.0)
    await ready_made.aclose()


WRONG = {
    "a word": ("ASYNCLOCK_LEASE", "ten", "ASYNCLOCK_LEASE='ten' is no number .* write for example ASYNCLOCK_LEASE=10"),
    "no time": ("ASYNCLOCK_LEASE", "0", "ASYNCLOCK_LEASE='0' .*more than 0.*write for example ASYNCLOCK_LEASE=10"),
    "not finite": ("ASYNCLOCK_MAX_LEASE", "inf", "ASYNCLOCK_MAX_LEASE='inf' .*write for example"),
    "negative": ("ASYNCLOCK_TIMEOUT", "-1", "ASYNCLOCK_TIMEOUT='-1' .*0 or more"),
    "neither": ("ASYNCLOCK_TRUST_RESTARTS", "maybe", "ASYNCLOCK_TRUST_RESTARTS='maybe' .*write .*=1 or .*=0"),
    "too long": ("ASYNCLOCK_LEASE", "100", "ASYNCLOCK_LEASE='100': .*max_lease=60"),
    "far nodes": ("ASYNCLOCK_NODE_TIMEOUT", "20", "ASYNCLOCK_NODE_TIMEOUT='20': .*at least 60 s"),
    "too short": ("ASYNCLOCK_LEASE", "0.01", "ASYNCLOCK_LEASE='0.01': .*at least 0.1"),
}


@pytest.mark.parametrize(("variable", "text", "says"), WRONG.values(), ids=WRONG.keys())
async def test_a_wrong_value_is_an_error_at_the_first_await(
    ready_made: Redlock, name: str, monkeypatch: pytest.MonkeyPatch, variable: str, text: str, says: str
) -> None:
    """It names the variable and what to write. A program that only imports the client does not fail."""
    monkeypatch.setenv(variable, text)
    Redlock()
    lock = ready_made(name)
    with pytest.raises(ConfigError, match=says):
        await lock.acquire()
    monkeypatch.delenv(variable)
    async with ready_made, lock:
        pass


def test_an_empty_variable_counts_as_not_set_except_for_the_prefix() -> None:
    """An empty prefix is a prefix."""
    empty = dict.fromkeys(ENVIRONMENT.values(), "")
    assert environment_settings(empty, {}) == ClientSettings(prefix="")
    assert environment_settings({}, {}) == ClientSettings()


@pytest.mark.parametrize(("text", "means"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("No", False)])
def test_how_a_switch_is_written(text: str, means: bool) -> None:
    """In the usual ways, in any case."""
    assert environment_settings({"ASYNCLOCK_TRUST_RESTARTS": text}, {}).trust_restarts is means


HINTS = {
    "lease": ("expire", "ttl", "lock_timeout", "auto_release_time"),
    "timeout": ("blocking", "blocking_timeout", "wait"),
    "renew": ("auto_renewal",),
}


@pytest.mark.parametrize(("meant", "word"), [(meant, word) for meant, words in HINTS.items() for word in words])
def test_the_words_of_other_libraries_get_a_hint(meant: str, word: str) -> None:
    """In the client and in a lock."""
    with pytest.raises(ConfigError, match=f"'{word}' is no option of a client: did you mean '{meant}'"):
        Redlock("memory:", **{word: 10})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"'{word}' is no option of a lock: did you mean '{meant}'"):
        Redlock("memory:")("x", **{word: 10})  # type: ignore[call-overload]


@pytest.mark.parametrize("word", ["sleep", "retry_count", "retry_delay"])
def test_the_words_of_libraries_that_poll_get_a_hint(word: str) -> None:
    """They do not suggest an option whose name is similar: nothing here polls, and `timeout` limits the wait."""
    for make in (Redlock, Redlock("memory:").read):
        with pytest.raises(ConfigError, match=f"'{word}' is no option of a .*: a waiter does not poll.*'timeout'"):
            make("memory:", **{word: 10})  # type: ignore[operator]
