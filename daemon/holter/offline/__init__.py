"""Reads what a job without holter left behind, and judges it with the same detectors, in the same words.

    found = offline.read([Path("logs/")])            series, errors, configs, code, dumps
    diagnoses = offline.judge(found, run_id="logs", now_ns=clock.wall_ns())
    record = offline.record_of_found(found, diagnoses, "logs")
    offline.verify(record, another).verdict          did the fix work

Nothing is executed: code is parsed, pickles go through the restricted reader. Dumps of the Flight Recorder are judged by
callers that may use the coordinator's window (`holter diagnose`).
"""

from holter.offline.dumps import Dumps, afterwards, rank_in_name, read_dumps
from holter.offline.found import Found, LoggedError, LoggedRun
from holter.offline.judging import curves_of, judge
from holter.offline.package import answer, lacking, questions
from holter.offline.proof import FixVerdict, RunRecord, record_of_found, verify
from holter.offline.reading import read

__all__ = [
    "Dumps",
    "FixVerdict",
    "Found",
    "LoggedError",
    "LoggedRun",
    "RunRecord",
    "afterwards",
    "answer",
    "curves_of",
    "judge",
    "lacking",
    "questions",
    "rank_in_name",
    "read",
    "read_dumps",
    "record_of_found",
    "verify",
]
