"""`holter skill`: the skill file for agents; `--install DIR` writes it to DIR/holter/SKILL.md, without it it is printed."""

import argparse
import json
import sys
from importlib import resources
from pathlib import Path

from holter.errors import UsageError
from holter.files import write_whole


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--install", metavar="DIR", help="the agent's folder of skills, e.g. ~/.claude/skills")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    """Print or install the skill file."""
    text = resources.files("holter.cli").joinpath("SKILL.md").read_text(encoding="utf-8")
    if args.install is None:
        sys.stdout.write(json.dumps({"skill": text}) + "\n" if args.json else text)
        return 0
    path = Path(args.install).expanduser() / "holter" / "SKILL.md"
    try:
        write_whole(path, text.encode(), makes_folder=True)
    except OSError as error:
        raise UsageError(f"--install {args.install}: {error.strerror}") from None
    sys.stdout.write(json.dumps({"installed": str(path)}) + "\n" if args.json else f"{path}\n")
    return 0
