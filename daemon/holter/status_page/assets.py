"""The files of the status page, read once, and the headers that forbid content from other hosts and foreign scripts."""

import hashlib
import html
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aiohttp import hdrs, web

from holter.diagnosis import report

FOLDER = Path(__file__).resolve().parent / "static"
TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
INDEX = "index.html"
REPORT = "report.css"
"""Name of the style sheet that reports need."""
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}


@dataclass(frozen=True)
class Asset:
    """A file as it is sent."""

    body: bytes
    content_type: str
    etag: str


def load(folder: Path = FOLDER) -> dict[str, Asset]:
    """Return every file of the page by name; requested names are looked up here and never on the disk."""
    found = sorted(path for path in folder.glob("*") if path.suffix in TYPES)
    made = {path.name: _asset(path.read_bytes(), TYPES[path.suffix]) for path in found}
    return made | {REPORT: _asset(report.FRAGMENT_STYLE.encode(), "text/css")}


def serve(assets: Mapping[str, Asset], request: web.Request) -> web.Response:
    """Answer a request for a file; 304 if the reader has it already."""
    asset = assets.get(request.match_info["name"])
    if asset is None:
        return web.Response(status=404, text="no such file\n", headers=HEADERS)
    headers = HEADERS | {"Cache-Control": "no-cache", hdrs.ETAG: asset.etag}
    if request.headers.get(hdrs.IF_NONE_MATCH) == asset.etag:
        return web.Response(status=304, headers=headers)
    return web.Response(body=asset.body, content_type=asset.content_type, charset="utf-8", headers=headers)


def index(assets: Mapping[str, Asset], run_id: str, plain: str) -> str:
    """Return the page; `plain` is the HTML shown to readers without scripts."""
    if INDEX not in assets:
        return f"<!doctype html><meta charset=utf-8><title>holter</title>{plain}"
    page = assets[INDEX].body.decode()
    return page.replace("<!--run-->", html.escape(run_id)).replace("<!--plain-->", plain)


def _asset(body: bytes, content_type: str) -> Asset:
    return Asset(body, content_type, f'"{hashlib.sha256(body).hexdigest()[:20]}"')
