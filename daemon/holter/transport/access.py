"""Who may read: by a secret, and under a name of this host.

A Host that is a name and not ours is refused: it is how a page elsewhere makes a browser read what only this network may (DNS rebinding).
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
"""A name or an address, and a port; an address of version 6 stands in brackets."""


def is_same(shown: str, token: str) -> bool:
    """Compared in constant time."""
    return hmac.compare_digest(shown.encode("utf-8", "surrogateescape"), token.encode())


def bearer(authorization: str) -> str:
    """The secret in such a header."""
    return authorization.removeprefix("Bearer ")


def oldest_of_busiest(held: Mapping[T, str]) -> T:
    """Who makes room: of the address that holds most places, the one that came first. A stranger's many push out each other, not a sidecar's one."""
    busiest, _ = Counter(held.values()).most_common(1)[0]
    return next(one for one, address in held.items() if address == busiest)


def own_names() -> set[str]:
    """Names by which this host calls itself."""
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
