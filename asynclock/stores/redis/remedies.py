"""The sentences with which a server refuses a new connection, and what to do about each. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from asynclock._errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Remedy(NamedTuple):
    """What to do about one cause."""

    said: str
    """A pattern of what the server, or the TLS library, says."""
    do: str
    what: str = ""
    """The cause in words, with {} for what the pattern finds; "": the first sentence of the server says it."""
    ends: bool = False
    """It may end without the user. Else it is a ConfigError."""


_REMEDIES = (
    Remedy(
        r"max\w* (number of |concurrent )?(clients|connections)",
        "raise its maxclients, or close connections to it that nobody needs",
        ends=True,
    ),
    Remedy(
        r"running in protected mode",
        "set a password at the server (requirepass) and write it in the url; or set protected-mode no, if only hosts "
        "that you trust can reach it",
    ),
    Remedy(
        r"DB index is out of range|invalid DB index",
        "correct the number of the database in the url, or raise the setting databases of the server",
    ),
    Remedy(
        r"SELECT is not allowed in cluster mode",
        "name the cluster (redis+cluster://host:port), which has only the db 0",
    ),
    Remedy(
        r"alert certificate required",
        "write ssl_certfile and ssl_keyfile in the url (?ssl_certfile=/path&ssl_keyfile=/path)",
        what="it wants a certificate of the client ({})",
    ),
    Remedy(
        r"alert handshake failure",
        "write ssl_certfile and ssl_keyfile in the url; if they are there, allow a common cipher on both sides",
        what="it ends the TLS handshake ({}); mostly it wants a certificate of the client",
    ),
    Remedy(
        r"alert (unknown ca|bad certificate|unsupported certificate|certificate (unknown|expired|revoked)|"
        r"decrypt error|access denied)",
        "let ssl_certfile be a certificate that is valid now, of a CA that the server trusts (tls-ca-cert-file)",
        what="it does not accept the certificate of the client ({})",
    ),
    Remedy(
        r"alert protocol version|unsupported protocol",
        "allow a common one (tls-protocols at the server, ssl_min_version in the url)",
        what="the two sides have no TLS version in common",
    ),
    Remedy(
        r"key values mismatch",
        "correct the two paths in the url",
        what="ssl_keyfile is not the key of ssl_certfile",
    ),
    Remedy(
        r"\[SSL\] PEM lib|no start line|no certificate or crl found|bad base64 decode",
        "let ssl_certfile, ssl_keyfile and ssl_ca_certs be PEM files",
        what="a file of the TLS settings has no certificate or key",
    ),
    Remedy(
        r'got "\\x1[56]"|Protocol Error: b.\\x1[56]',
        "turn TLS on in the url (rediss://)",
        what="it speaks TLS only",
    ),
)

SENTINEL_LOGIN = (
    "the sentinels have a login of their own: ?sentinel_username= and ?sentinel_password= in the url, or "
    "sentinel_kwargs of redis-py's Sentinel"
)
"""What to do where a sentinel refuses the login."""

_CODE = re.compile(r"^-?(ERR|DENIED) ")


def known_cause(label: str, error: BaseException) -> Exception | None:
    """The error to report for `error`; None: its cause is not in the table."""
    text = str(error)
    if remedy_in(text):  # it is such an error already
        return None
    for each in _REMEDIES:
        if found := re.search(each.said, text, re.IGNORECASE):
            if each.ends:
                return ConnectionError(f"{label} is out of reach: {sentence(text)}; {each.do}")
            cause = f": {each.what.format(found[0])}" if each.what else f" refuses the connection: {sentence(text)}"
            return ConfigError(f"{label}{cause}; {each.do}")
    return None


def sentence(text: str) -> str:
    """The first sentence of what a server says: the rest of it may be a page of advice."""
    return _CODE.sub("", text).partition(". ")[0].rstrip(".")[:300]


def joined(texts: Sequence[str]) -> str:
    """The errors of several servers. Where all have one remedy, it stands once."""
    common = {remedy_in(each) for each in texts}
    end = f"; {common.pop()}" if len(common) == 1 else ""
    return "; ".join(each.removesuffix(end) for each in texts) + (end if end != "; " else "")


def remedy_in(text: str) -> str:
    """What to do, if `text` is an error of `known_cause` or of a login at a sentinel; else ""."""
    return next((do for do in (*(each.do for each in _REMEDIES), SENTINEL_LOGIN) if text.endswith(do)), "")
