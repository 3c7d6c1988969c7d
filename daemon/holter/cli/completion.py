"""`holter completion bash|zsh|tcsh|man`: completion for a shell, or the man page, from the commands' own options.

bash   holter completion bash > ~/.local/share/bash-completion/completions/holter
zsh    holter completion zsh > DIR/_holter, where DIR is in $fpath
man    holter completion man > ~/.local/share/man/man1/holter.1

Shells need the package shtab (`pip install holter[completion]`); the man page needs nothing.
"""

import argparse
import sys
from collections.abc import Iterator

import holter
from holter import cli
from holter.errors import UsageError
from holter.exporters import pages

SHELLS = ("bash", "zsh", "tcsh")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=(*SHELLS, "man"), help="for which shell, or man")


def run(args: argparse.Namespace) -> int:
    """Print the completion script or the man page."""
    parser = cli.parser_of(*cli.COMMANDS)
    sys.stdout.write(("\n".join(man_page(parser)) if args.shell == "man" else _completion(parser, args.shell)) + "\n")
    return 0


def _completion(parser: argparse.ArgumentParser, shell: str) -> str:
    try:
        import shtab  # noqa: PLC0415 - only this command needs it
    except ImportError:
        raise UsageError("completion is made with shtab: `pip install holter[completion]`") from None
    for _, command in _commands(parser):
        for action in command._actions:  # noqa: SLF001
            if (command.prog, action.dest) == ("holter explain", "name"):
                action.choices = list(pages.names())
            elif action.nargs != 0 and not action.choices:
                # A run, a checkpoint, a log: shells offer no files by themselves where there is a completion.
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell=shell))


def man_page(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the lines of the man page, in man's own macros, with a section for each command."""
    yield f'.TH HOLTER 1 "" "holter {holter.__version__}" "User Commands"'
    yield from (".SH NAME", "holter \\- a Holter monitor for distributed training")
    yield from (".SH SYNOPSIS", ".B holter", ".I COMMAND", "[options]")
    yield from (".SH DESCRIPTION", *_lines(parser.description or ""), ".SH COMMANDS")
    for name, command in _commands(parser):
        yield f".SS {_escaped(command.prog)}"
        yield _escaped(cli.COMMANDS.get(name, ""))
        yield from (".PP", ".nf", *_lines(command.description or ""), ".fi")
        for action in command._actions:  # noqa: SLF001 - argparse has no other list of them
            if action.help != argparse.SUPPRESS and not isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
                yield from _option(command, action)
    yield from (".SH EXIT STATUS", ".TP", "0", "fine", ".TP", "1", "something is wrong with the run")
    yield from (".TP", "2", "wrong use", ".TP", "93", "of a job: halted by decision; do not restart it blindly")


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield all commands with their parsers, depth first."""
    for action in parser._actions:  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for name, command in action.choices.items():
                yield name, command
                yield from _commands(command)


def _option(command: argparse.ArgumentParser, action: argparse.Action) -> Iterator[str]:
    value = (
        ""
        if action.nargs == 0
        else str(action.metavar or (action.choices and "|".join(action.choices)) or action.dest.upper())
    )
    words = ", ".join(action.option_strings) + f" {value}" if action.option_strings else value
    formatter = command._get_formatter()  # noqa: SLF001
    text = formatter._expand_help(action) if action.help else ""  # noqa: SLF001
    yield from (".TP", f".B {_escaped(words.strip())}", *_lines(text))


def _lines(text: str) -> Iterator[str]:
    """Escape text for man; a line that begins with a dot or a quote would otherwise be a macro."""
    for line in text.strip().splitlines():
        yield ("\\&" if line.startswith((".", "'")) else "") + _escaped(line)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\e").replace("-", "\\-")
