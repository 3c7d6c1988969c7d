"""One line of `holter doctor`."""

from typing import Literal

import msgspec

PreflightOutcome = Literal["ok", "warning", "failed", "skipped"]


class PreflightCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check, and what to do about it."""

    check: str
    outcome: PreflightOutcome
    says: str
    do: str = ""
    file: str = ""
    line: int = 0


def failed(check: str, says: str, do: str, *, file: str = "", line: int = 0) -> PreflightCheck:
    """Make a result for something that will not work."""
    return PreflightCheck(check=check, outcome="failed", says=says, do=do, file=file, line=line)


def warned(check: str, says: str, do: str, *, file: str = "", line: int = 0) -> PreflightCheck:
    """Make a result for something that will work, but may surprise somebody."""
    return PreflightCheck(check=check, outcome="warning", says=says, do=do, file=file, line=line)


def fine(check: str, says: str) -> PreflightCheck:
    """Make a result that needs no action."""
    return PreflightCheck(check=check, outcome="ok", says=says)


def skipped(check: str, says: str) -> PreflightCheck:
    """Make a result for something that could not be checked."""
    return PreflightCheck(check=check, outcome="skipped", says=says)
