"""`holter alerts`: the alert rules for Prometheus and the pages behind them, generated from detectors and causes."""

import argparse
import json
import sys
import textwrap
from pathlib import Path

from holter.errors import UsageError
from holter.exporters import alerts, pages
from holter.exporters.alert_text import RUNBOOKS

PROMETHEUS_RULE = """\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: holter
spec:
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--write", metavar="DIR", help="write DIR/alerts/*.yml and DIR/runbooks/*.md instead of printing"
    )
    parser.add_argument(
        "--runbooks", metavar="URL", default=RUNBOOKS, help="where the pages are served (default: %(default)s)"
    )
    parser.add_argument("--operator", action="store_true", help="print them as a PrometheusRule, for Kubernetes")
    parser.add_argument("--json", action="store_true", help="names of the alerts and their pages")


def run(args: argparse.Namespace) -> int:
    """Print the alert rules, or write them with their pages into a directory."""
    if not args.runbooks.startswith(("http://", "https://")):
        raise UsageError(f"--runbooks {args.runbooks}: must begin with http:// or https://")
    base = args.runbooks.rstrip("/")
    if args.write:
        _write(Path(args.write), base)
    elif args.json:
        named = {rule.alert: rule.page for rules in alerts.groups().values() for rule in rules}
        sys.stdout.write(json.dumps(named, indent=2) + "\n")
    else:
        rules = alerts.rule_file(base)
        sys.stdout.write(PROMETHEUS_RULE + textwrap.indent(rules, "  ") if args.operator else rules)
    return 0


def _write(folder: Path, base: str) -> None:
    """Write the rules and pages, and remove pages whose alert no longer exists."""
    rules, runbooks = alerts.rule_files(base), pages.runbook_files()
    try:
        _fill(folder / "alerts", rules)
        _fill(folder / "runbooks", runbooks)
        for stale in {path.name for path in (folder / "runbooks").glob("*.md")} - set(runbooks):
            (folder / "runbooks" / stale).unlink()
    except OSError as error:
        raise UsageError(f"--write {folder}: {error.strerror}") from None
    sys.stderr.write(f"holter: {len(rules)} rule files and {len(runbooks)} pages in {folder}\n")


def _fill(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
