"""`holter explain NAME`: the page of a detector, a cause or an alert about holter itself."""

import argparse
import json
import sys
from typing import Any

from holter.errors import UsageError
from holter.exporters import alerts


def add_parser(subparsers: Any) -> None:
    """Options of the command."""
    parser = subparsers.add_parser("explain", help="the page of a detector or a cause", description=__doc__)
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a detector, a cause or an alert; without it, all names"
    )
    parser.add_argument("--json", action="store_true", help="print facts as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the page."""
    if args.name is None:
        text = json.dumps(list(alerts.page_names())) if args.json else "\n".join(alerts.page_names())
        sys.stdout.write(text + "\n")
        return 0
    page = alerts.page(args.name)
    if page is None:
        raise UsageError(
            f"there is no detector, cause or alert {args.name!r}; there are {', '.join(alerts.page_names())}"
        )
    sys.stdout.write((json.dumps({"name": args.name, "page": page}) if args.json else page.rstrip()) + "\n")
    return 0
