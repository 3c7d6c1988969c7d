"""`holter dashboards`: Grafana's dashboards of holter, generated; the same bytes as the files in `grafana/dashboards`.

Without a name all of them, as a JSON list; with one, that one as Grafana imports it. `--write` makes a file of each in a directory, from
where Grafana's provisioning takes them.
"""

import argparse
import json
import sys
from pathlib import Path

import holter
from holter.errors import UsageError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="one of them, such as holter-overview; without it, all")
    parser.add_argument(
        "--config-maps", action="store_true", help="print them as ConfigMaps that Grafana's sidecar loads"
    )
    parser.add_argument("--write", metavar="DIR", help="write NAME.json into this directory instead of printing")


def run(args: argparse.Namespace) -> int:
    """Print or write the dashboards."""
    texts = _dashboards()
    if args.name is not None:
        if args.name not in texts:
            raise UsageError(f"there is no dashboard {args.name!r}; there are {', '.join(texts)}")
        texts = {args.name: texts[args.name]}
    if args.write is not None:
        _write(Path(args.write), texts)
    elif args.config_maps:
        sys.stdout.write("---\n".join(_config_map(uid, text) for uid, text in texts.items()))
    elif args.name is not None:
        sys.stdout.write(texts[args.name])
    else:
        sys.stdout.write(json.dumps([json.loads(text) for text in texts.values()], indent=2) + "\n")
    return 0


def _dashboards() -> dict[str, str]:
    try:
        from holter.exporters import dashboards  # noqa: PLC0415 - needs a package that only this command needs
    except ImportError:
        return _shipped()
    return {uid: dashboards.render(uid) for uid in dashboards.ALL}


def _shipped() -> dict[str, str]:
    """Return the dashboards that the package brings, or those in the checkout that it runs from."""
    package = Path(holter.__file__).parent
    for folder in (package / "exporters" / "dashboards" / "made", package.parents[1] / "grafana" / "dashboards"):
        if found := sorted(folder.glob("holter-*.json")):
            return {path.stem: path.read_text(encoding="utf-8") for path in found}
    raise UsageError("the dashboards are not in this installation: `pip install holter[dashboards]` generates them")


def _config_map(uid: str, text: str) -> str:
    """Return a ConfigMap with the dashboard, as JSON, which is valid YAML."""
    labels = {"grafana_dashboard": "1"}
    metadata = {"name": f"{uid}-dashboard", "labels": labels}
    return (
        json.dumps({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {f"{uid}.json": text}})
        + "\n"
    )


def _write(directory: Path, texts: dict[str, str]) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for uid, text in texts.items():
            (directory / f"{uid}.json").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{directory} cannot be written: {error.strerror or error}") from None
    sys.stdout.write("".join(f"{directory / uid}.json\n" for uid in texts))
