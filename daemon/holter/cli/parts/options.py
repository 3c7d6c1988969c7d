"""The settings that can be given on the command line of every command that starts a job."""

import argparse
from typing import Any

OPTIONS = {
    "run_dir": "this run's own directory (default: ./holter-runs/<run id>)",
    "run_id": "name of the run",
    "action": "what may be done about a critical cause: observe, notify or halt",
    "overhead_budget": "share of step time that holter may take (default: 0.01)",
    "coordinator": "address of a coordinator that already runs",
    "port": "port of the coordinator (default: a free one)",
}


def add(parser: argparse.ArgumentParser) -> None:
    """Add an option for each setting."""
    parser.add_argument("--config", help="holter.toml to read (default: ./holter.toml, if it is there)")
    for name, phrase in OPTIONS.items():
        parser.add_argument("--" + name.replace("_", "-"), help=phrase)


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given."""
    return {name: value for name in OPTIONS if (value := getattr(args, name)) is not None}
