"""Who may read: by a secret, and under a name of this host.

A Host that is a name and not ours is refused: it is how a page elsewhere makes a browser read what only this network may (DNS rebinding).
"""

import contextlib
import hmac
import ipaddress
import socket
from collections.abc import Collection


def is_same(shown: str, token: str) -> bool:
    """Compared in constant time."""
    return hmac.compare_digest(shown.encode("utf-8", "surrogateescape"), token.encode())


def bearer(authorization: str) -> str:
    """The secret in such a header."""
    return authorization.removeprefix("Bearer ")


def own_names() -> set[str]:
    """Names by which this host calls itself."""
    name = socket.gethostname()
    return {"localhost", name.lower(), name.partition(".")[0].lower(), socket.getfqdn().lower()}


def is_own_host(host: str, names: Collection[str]) -> bool:
    """Whether the Host of a request is a plain address, or one of these names."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    name = name.strip("[]").lower()
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return name in names
