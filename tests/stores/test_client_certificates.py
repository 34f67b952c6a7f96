"""Servers that want a certificate of the client, as `tls-auth-clients yes` of Redis: what is wrong with it is a
ConfigError at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
import redis
import trustme

from asynclock import ConfigError, Redlock
from tests.support.ports import free_port
from tests.support.servers import run
from tests.support.services import redis_server
from tests.support.waiters import LIMIT, PATIENT, works


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with certificates and keys: of the server, of a client, of a client of another CA; and with a file that
    has neither."""
    folder = tmp_path_factory.mktemp("certificates")
    known, unknown = trustme.CA(), trustme.CA()
    known.cert_pem.write_to_path(str(folder / "ca.pem"))
    for name, ca in (("server", known), ("client", known), ("stranger", unknown)):
        its = ca.issue_cert("localhost", "127.0.0.1")
        its.private_key_pem.write_to_path(str(folder / f"{name}.key"))
        its.cert_chain_pems[0].write_to_path(str(folder / f"{name}.crt"))
    (folder / "empty.crt").write_text("no certificate\n")
    return folder


@pytest.fixture(scope="module", params=["TLSv1.2", "TLSv1.3"])
def url(request: pytest.FixtureRequest, files: Path) -> Iterator[str]:
    """Of a server that wants a certificate of the client. With TLS 1.3 a client is connected before the server has seen
    that there is none."""
    port = free_port()
    options = {
        "port": "0",
        "tls-port": str(port),
        "bind": "127.0.0.1",
        "save": "",
        "dir": str(files),
        "tls-auth-clients": "yes",
        "tls-protocols": request.param,
        "tls-ca-cert-file": str(files / "ca.pem"),
        "tls-cert-file": str(files / "server.crt"),
        "tls-key-file": str(files / "server.key"),
    }
    process = run(redis_server(), *(word for name, value in options.items() for word in (f"--{name}", value)))
    try:
        _wait(files, port)
        yield f"rediss://127.0.0.1:{port}?ssl_ca_certs={files}/ca.pem"
    finally:
        process.kill()
        process.wait()


def _wait(files: Path, port: int) -> None:
    end = time.monotonic() + LIMIT
    certificate = {"ssl_certfile": str(files / "client.crt"), "ssl_keyfile": str(files / "client.key")}
    while True:
        try:
            with redis.Redis(port=port, ssl=True, ssl_ca_certs=str(files / "ca.pem"), **certificate) as cli:  # type: ignore[arg-type]
                cli.ping()
                return
        except redis.ConnectionError:
            assert time.monotonic() < end
            time.sleep(0.02)


WRONG = {
    "none": ("", "wants a certificate of the client", "write ssl_certfile and ssl_keyfile in the url"),
    "of another CA": (
        "&ssl_certfile={0}/stranger.crt&ssl_keyfile={0}/stranger.key",
        "it does not accept the certificate of the client (alert unknown ca)",
        "of a CA that the server trusts (tls-ca-cert-file)",
    ),
    "with the key of another one": (
        "&ssl_certfile={0}/client.crt&ssl_keyfile={0}/stranger.key",
        "ssl_keyfile is not the key of ssl_certfile",
        "correct the two paths in the url",
    ),
    "in a file without one": (
        "&ssl_certfile={0}/empty.crt&ssl_keyfile={0}/client.key",
        "a file of the TLS settings has no certificate or key",
        "let ssl_certfile, ssl_keyfile and ssl_ca_certs be PEM files",
    ),
}


@pytest.mark.parametrize(("settings", "why", "do"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("scheme", ["rediss", "rediss+sentinel", "rediss+cluster"])
async def test_c13_a_wrong_certificate(url: str, files: Path, scheme: str, settings: str, why: str, do: str) -> None:
    """The error says what to set."""
    address, _, query = url.removeprefix("rediss://").partition("?")
    path = "/mymaster" if scheme == "rediss+sentinel" else ""
    node = f"{scheme}://{address}{path}?{query}{settings.format(files)}"
    async with aclosing(Redlock(node, **PATIENT)) as client:
        with pytest.raises(ConfigError) as caught:
            await client("order:42").acquire(timeout=LIMIT)
    assert why in str(caught.value)
    assert do in str(caught.value)


async def test_the_right_certificate(url: str, files: Path, name: str) -> None:
    """With a login that the server refuses, the error is about that."""
    right = f"{url}&ssl_certfile={files}/client.crt&ssl_keyfile={files}/client.key"
    async with aclosing(Redlock(right, **PATIENT)) as client:
        await works(client, name)
    async with aclosing(Redlock(right.replace("//", "//me:secret@", 1), **PATIENT)) as client:
        with pytest.raises(ConfigError, match="check user and password in the url"):
            await client(name).acquire(timeout=LIMIT)
