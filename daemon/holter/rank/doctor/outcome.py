"""Defines what a check returns: ok, failed or skipped, one sentence, and the numbers that prove it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

Verdict: TypeAlias = Literal["ok", "failed", "skipped"]
Number: TypeAlias = int | float | str | bool | None
Say: TypeAlias = Callable[[str], None]
"""Reports the progress of a check to whoever waits for it."""
SECONDS_SHOWN = 10.0


class CheckOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one check."""

    outcome: Verdict
    says: str
    """One sentence with the numbers that matter; for a skipped check, why it was skipped."""
    numbers: dict[str, Number] = {}
    details: list[str] = []
    """Further lines for the reader of a failure's report."""


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """An outcome in the form that is sent to the doctor's main process."""

    check: str
    outcome: Verdict
    says: str
    seconds: float
    numbers: dict[str, Number] = {}
    details: list[str] = []


def ok(says: str, numbers: Mapping[str, Number] | None = None) -> CheckOutcome:
    """Return the outcome of a check that found no problem."""
    return CheckOutcome(outcome="ok", says=says, numbers=dict(numbers or {}))


def failed(says: str, numbers: Mapping[str, Number] | None = None, details: list[str] | None = None) -> CheckOutcome:
    """Return the outcome of a check that found a problem; `says` names it."""
    return CheckOutcome(outcome="failed", says=says, numbers=dict(numbers or {}), details=details or [])


def skipped(why: str, numbers: Mapping[str, Number] | None = None) -> CheckOutcome:
    """Return the outcome of a check that cannot be made on this machine; `why` says why not."""
    return CheckOutcome(outcome="skipped", says=why, numbers=dict(numbers or {}))


def judged(
    problems: list[str], says: str, numbers: Mapping[str, Number] | None = None, said: Sequence[str] = ()
) -> CheckOutcome:
    """Return ok if there is no problem; else the first problem is the sentence, and the others and a job's output are the details."""
    if not problems:
        return ok(says, numbers)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return failed(problems[0] + more, numbers, [*problems[1:], *said])


def duration(seconds: float) -> str:
    """Return a duration as text: `0.31 ms`, `4.2 s`."""
    if seconds < 1e-3:  # noqa: PLR2004 - the unit's
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.1f} s" if seconds < SECONDS_SHOWN else f"{seconds:.0f} s"
