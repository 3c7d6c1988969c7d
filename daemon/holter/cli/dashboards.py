"""`holter dashboards`: Grafana's dashboards of holter, generated; the same bytes as the files in `grafana/dashboards`.

Without a name all of them, as a JSON list; with one, that one as Grafana imports it. `--write` makes a file of each in a directory, from
where Grafana's provisioning takes them.
"""

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType

from holter.errors import UsageError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="one of them, such as holter-overview; without it, all")
    parser.add_argument("--write", metavar="DIR", help="write NAME.json into this directory instead of printing")


def run(args: argparse.Namespace) -> int:
    """Print or write."""
    dashboards = _dashboards()
    if args.name is not None and args.name not in dashboards.ALL:
        raise UsageError(f"there is no dashboard {args.name!r}; there are {', '.join(dashboards.ALL)}")
    texts = {uid: dashboards.render(uid) for uid in ([args.name] if args.name else dashboards.ALL)}
    if args.write is not None:
        _write(Path(args.write), texts)
    elif args.name is not None:
        sys.stdout.write(texts[args.name])
    else:
        sys.stdout.write(json.dumps([json.loads(text) for text in texts.values()], indent=2) + "\n")
    return 0


def _dashboards() -> ModuleType:
    try:
        from holter.exporters import dashboards  # noqa: PLC0415 - needs a package that only this command needs
    except ImportError as error:
        raise UsageError(f"dashboards are generated with a package that is not there ({error}): `pip install holter[dashboards]`") from None  # fmt: skip
    return dashboards


def _write(directory: Path, texts: dict[str, str]) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for uid, text in texts.items():
            (directory / f"{uid}.json").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{directory} cannot be written: {error.strerror or error}") from None
    sys.stdout.write("".join(f"{directory / uid}.json\n" for uid in texts))
