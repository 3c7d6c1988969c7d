"""`holter COMMAND`: one file a command, imported when it is called, so that a sidecar starts in a fraction of a second."""

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence

import holter
from holter.errors import ConfigError, UsageError

COMMANDS = {
    "status": "table of ranks, steps, phases and findings; --watch live",
    "runs": "all runs below a folder, or of a NATS server: state, steps, incidents",
    "hub": "one read-only page and /metrics for all runs of a NATS server",
    "report": "the incidents' diagnoses, for a person",
    "page": "the page of a run that is over, in a browser",
    "replay": "judge a recorded run again, with other thresholds if given",
    "diagnose": "judge what a job without holter left: logs, tables, tracebacks, configs, dumps",
    "verify": "did the fix work: two runs, logs, or an incident and a run, compared",
    "memory": "incidents of earlier runs: what was tried against them, and what came of it",
    "explain": "the page of a detector or a cause",
    "halt": "stop a run at an agreed step, with a checkpoint",
    "resume": "let a run that was halted start again",
    "launch": "run a job's own launcher so that a halt is obeyed",
    "checkpoint": "verify a checkpoint, or list those of a run",
    "doctor": "check a machine, a job's settings and its script before a long run",
    "mcp": "runs, incidents, diagnose, verify and memory for agents, as an MCP server",
    "skill": "the skill file for agents",
    "alerts": "print the alert rules for Prometheus",
    "dashboards": "print or write Grafana's dashboards",
    "coordinator": "run a coordinator by itself",
    "sidecar": "run a sidecar by itself",
    "agent": "run a host's agent by itself: it joins the sidecars of a host or pod",
    "completion": "print shell completion, or the man page",
}
WRONG_USE = 2


class _Parser(argparse.ArgumentParser):
    """A parser that reports wrong use in one sentence, without dumping the usage: at three in the morning the sentence is what counts."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 fine, 1 something is wrong with the run, 2 wrong use."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except (UsageError, ConfigError) as error:
        pointer = "" if "--help" in str(error) else f"; see `{_help(arguments)}`"
        sys.stderr.write(f"holter: {error}{pointer}\n")
        return WRONG_USE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # As in `holter report | head`: the reader has seen enough.
        sys.stderr.close()
        return 0


def _help(arguments: Sequence[str]) -> str:
    """Return the command line that shows the help of the intended command."""
    chosen = next((word for word in arguments if not word.startswith("-")), "")
    return f"holter {chosen} --help" if chosen in COMMANDS else "holter --help"


def parser_of(*commands: str) -> argparse.ArgumentParser:
    """Return a parser that knows all commands by name, and the options of the given ones, whose modules are imported."""
    parser = _Parser(prog="holter", description=holter.__doc__)
    parser.add_argument("--version", action="version", version=f"holter {holter.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, phrase in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=phrase)
        if name in commands:
            command = importlib.import_module(f"holter.cli.{name}")
            subparser.description = command.__doc__
            command.add_options(subparser)
    return parser


def _check_name(name: str) -> None:
    """Refuse a command that does not exist, naming only the most similar one."""
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        raise UsageError(f"there is no command {name!r}" + (f"; `holter {near[0]}` is near" if near else ""))


def _run(arguments: list[str]) -> int:
    if arguments and not arguments[0].startswith("-"):
        _check_name(arguments[0])
    parser = parser_of(*[argument for argument in arguments if not argument.startswith("-")][:1])
    # The words after `--` are somebody else's command.
    split = arguments.index("--") if "--" in arguments else len(arguments)
    args = parser.parse_args(arguments[:split])
    args.words = arguments[split + 1 :]
    if args.command is None:
        parser.print_help()
        return WRONG_USE
    return int(importlib.import_module(f"holter.cli.{args.command}").run(args))
