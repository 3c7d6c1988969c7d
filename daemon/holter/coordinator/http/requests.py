"""The one thing that can be asked of a coordinator: `POST /api/v1/halt`, by who has the token.

| 202 | it will be tried |
| 401, 403 | wrong token; a page of another host asks |
| 409 | it cannot be, and why |
| 408, 413, 422 | this is no request |

Everything else that is served is read-only.
"""

import asyncio
import hmac
from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import hdrs, web

AskHalt = Callable[[str, str], str | None]
"""(reason, by whom) -> why it cannot be; None: it will be tried."""

MAX_BODY_BYTES = 8 * 2**10
BODY_DEADLINE_S = 5.0


class HaltRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body."""

    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=2000)]
    by: Annotated[str, msgspec.Meta(max_length=200)] = ""


async def answer(request: web.Request, token: str, ask_halt: AskHalt | None) -> tuple[int, dict[str, Any]]:
    """Status and content of the answer."""
    if not _is_own_origin(request):
        return 403, {"error": "a page of another host may not ask for this"}
    shown = request.headers.get(hdrs.AUTHORIZATION, "").removeprefix("Bearer ")
    if not token or not hmac.compare_digest(shown.encode("utf-8", "surrogateescape"), token.encode()):
        return 401, {"error": "wrong token; it is in coordinator.json of the run directory"}
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            asked = msgspec.json.decode(await _body(request), type=HaltRequest)
    except OverflowError:
        return 413, {"error": f"the request is longer than {MAX_BODY_BYTES} bytes"}
    except TimeoutError:
        return 408, {"error": "the request did not come to its end"}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return 422, {"error": f"this is no request to halt: {error}"}
    why = "halting is not available here" if ask_halt is None else ask_halt(asked.reason, asked.by or "unknown")
    return (409, {"error": why}) if why is not None else (202, {"accepted": True, "reason": asked.reason})


def _is_own_origin(request: web.Request) -> bool:
    """Browsers say from which page a request comes; shells do not."""
    origin = request.headers.get(hdrs.ORIGIN)
    return origin is None or urlsplit(origin).netloc == request.host


async def _body(request: web.Request) -> bytes:
    """All of it. Raises OverflowError."""
    body = bytearray()
    async for chunk in request.content.iter_chunked(MAX_BODY_BYTES):
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise OverflowError
    return bytes(body)
