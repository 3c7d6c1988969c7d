"""What a job without holter left behind: read, and judged by the same detectors, in the same words.

    found = offline.read([Path("logs/")])            series, errors, configs, code, dumps
    diagnoses = offline.judge(found, run_id="logs", now_ns=clock.wall_ns())

Nothing is executed: code is parsed, pickles go through the restricted reader. Dumps of the Flight Recorder are judged by whoever may ask
the coordinator's window (`holter diagnose`).
"""

from holter.offline.dumps import Dumps, afterwards, rank_in_name, read_dumps
from holter.offline.found import Found, LoggedError, LoggedRun
from holter.offline.judging import curves_of, judge
from holter.offline.reading import read

__all__ = [
    "Dumps",
    "Found",
    "LoggedError",
    "LoggedRun",
    "afterwards",
    "curves_of",
    "judge",
    "rank_in_name",
    "read",
    "read_dumps",
]
