"""Finds a file's rank by its name, for jobs in which each rank writes a file of its own.

logs/rank_3.log   train.rank03.out   attempt_0/3/stderr.log (torchrun's --log-dir)
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from holter.offline.found import Found, LoggedRun

_RANK = re.compile(r"(?:^|[^a-z])rank[_.-]?(\d{1,6})(?!\d)", re.IGNORECASE)
_ATTEMPT = re.compile(r"^attempt_\d+$")


def rank_of(file: str) -> int | None:
    """Return the rank that a path names; None if it names none."""
    path = Path(file)
    found = _RANK.findall(path.name) or _RANK.findall(path.parent.name)
    if found:
        return int(found[-1])
    is_torchrun = path.parent.name.isdigit() and _ATTEMPT.match(path.parent.parent.name)
    return int(path.parent.name) if is_torchrun else None


def note_ranks(found: Found, files: Iterable[Path]) -> None:
    """Assign errors and numbers of a file that names its rank to that rank, unless their own lines say otherwise."""
    found.named_ranks = {rank for path in files if (rank := rank_of(str(path))) is not None}
    found.errors = [replace(error, rank=rank_of(error.file)) if error.rank is None else error for error in found.errors]
    for run in found.runs:
        rank = rank_of(run.file)
        if rank is not None and set(run.by_rank) == {0}:
            run.by_rank = {rank: run.by_rank[0]}


def joined(runs: list[LoggedRun]) -> list[LoggedRun]:
    """Join the runs of files whose names differ only in the rank."""
    made: dict[tuple[str, int], LoggedRun] = {}
    for run in runs:
        rank = rank_of(run.file)
        if rank is None:
            made[run.file, run.number] = run
            continue
        key = (_without_rank(run.file, rank), run.number)
        known = made.get(key)
        if known is None or known.counted_by != run.counted_by or set(known.by_rank) & set(run.by_rank):
            made[key if known is None else (run.file, run.number)] = run
        else:
            known.by_rank |= run.by_rank
            known.num_resumed = max(known.num_resumed, run.num_resumed)
    return list(made.values())


def _without_rank(file: str, rank: int) -> str:
    path = Path(file)
    if _RANK.search(path.name):
        return str(path.with_name(_RANK.sub("*", path.name)))
    return str(path.parent.with_name("*") / path.name) if str(rank) in path.parent.name else file
