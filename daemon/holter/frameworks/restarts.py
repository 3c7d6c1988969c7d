"""A rank that is started again after a halt: it looks for the tombstone before anything else, and ends unless it was told to resume.

Told by HOLTER_RESUME=1 at a first start; what stands at a restart is a halt of this very job, which nobody has looked at.

Whatever the action is: the halt was decided, by an operator perhaps, and stands until somebody lifts it.
"""

import os
import threading
from collections.abc import Mapping
from pathlib import Path

from holter.config import Settings
from holter.frameworks.place import RankPlace
from holter.halting import tombstone
from holter.rank.guard import say
from holter.records import EXIT_CODE

RUNS = Path("holter-runs")
SAYS_S = 30.0
"""A launcher ends all ranks when the first has left: the others wait so long at most for rank 0, which says why and may still be importing."""


def settle(settings: Settings, here: RankPlace, environ: Mapping[str, str]) -> None:
    """End with 93 where a halt stands for this job; lift it where the user said so."""
    stands = tombstone.find(settings.run_dir, RUNS, tombstone.job_names(environ, os.getppid(), is_start=True))
    if stands is None:
        return
    run_dir, halt = stands
    if settings.resume and not tombstone.is_restart(environ):
        if here.rank == 0:
            tombstone.lift(run_dir)
        return
    if here.rank == 0:
        for sentence in tombstone.sentences(run_dir, halt, environ):
            say(sentence)
    else:
        threading.Event().wait(SAYS_S)
    raise SystemExit(EXIT_CODE)


def introduce(run_dir: str, environ: Mapping[str, str]) -> None:
    """A life of the run begins: leave word by which names this job goes, for the next start."""
    tombstone.begin(Path(run_dir))
    tombstone.introduce(Path(run_dir), tombstone.job_names(environ, os.getppid()))
