"""Who may read: callers with the secret, who address this host by one of its names.

A Host header with a foreign name is refused: that is how a page elsewhere makes a browser read what only this network
may (DNS rebinding).
"""

import contextlib
import hmac
import ipaddress
import re
import socket
from collections import Counter
from collections.abc import Collection, Mapping
from typing import TypeVar

T = TypeVar("T")

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]*\]|[^:\[\]]*)(:[0-9]*)?")
"""A name or an address, and perhaps a port; an IPv6 address is in brackets."""


def is_same(shown: str, token: str) -> bool:
    """Compare a shown secret with the token in constant time."""
    return hmac.compare_digest(shown.encode("utf-8", "surrogateescape"), token.encode())


def bearer(authorization: str) -> str:
    """Return the secret in an Authorization header."""
    return authorization.removeprefix("Bearer ")


def oldest_of_busiest(held: Mapping[T, str]) -> T:
    """Return who must make room: of the address that holds most places, the one that came first.

    So a stranger's many connections displace each other, and not a sidecar's only one.
    """
    busiest, _ = Counter(held.values()).most_common(1)[0]
    return next(one for one, address in held.items() if address == busiest)


def own_names() -> set[str]:
    """Return the names by which this host calls itself, in lower case."""
    name = socket.gethostname()
    return {"localhost", name.lower(), name.partition(".")[0].lower(), socket.getfqdn().lower()}


def is_own_host(host: str, names: Collection[str]) -> bool:
    """Whether the Host of a request is a plain address, or one of these names."""
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    name = found[1].strip("[]").lower()
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return name in names
