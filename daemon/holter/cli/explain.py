"""`holter explain NAME`: the page of a detector, a cause or an alert about holter itself; without a name all of them, family by family."""

import argparse
import difflib
import json
import sys

from holter.errors import UsageError
from holter.exporters import alerts, pages


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="a detector, a cause, or an alert by the name that a pager shows; without it, all of them with a line each",
    )
    parser.add_argument("--json", action="store_true", help="print facts as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the page of a name, or all names."""
    if args.name is None:
        text = json.dumps(list(pages.names())) if args.json else "\n".join(pages.overview())
        sys.stdout.write(text + "\n")
        return 0
    name = alerts.page_of_alert(args.name) or args.name
    page = pages.page(name)
    if page is None:
        close = difflib.get_close_matches(name.lower().replace("-", "_"), pages.names())
        meant = f"do you mean {' or '.join(close)}? " if close else ""
        raise UsageError(
            f"there is no detector, cause or alert {args.name!r}; {meant}`holter explain` lists all that have a page"
        )
    sys.stdout.write((json.dumps({"name": name, "page": page}) if args.json else page.rstrip()) + "\n")
    return 0
