"""The four records of the pipeline: Observation -> Finding -> Diagnosis -> Directive.

    rank        --Observation-->  detectors  --Finding-->  diagnosis  --Diagnosis-->  halting  --Directive-->  rank

Records are frozen and know nothing of clocks, sockets or torch. Observations travel as msgpack and are kept so in the journal, so that a
past run can be judged again. Diagnoses are public JSON (`diagnosis.json`): fields are added, never changed.
Steps count optimizer steps from 0: step 30 is the one that runs when 30 have been completed.
"""

from holter.records.halting import (
    EXIT_CODE,
    HaltAnswered,
    HaltAsked,
    Halting,
    Order,
    Ordered,
    OrderKind,
    RankState,
    SaveFinished,
    Snapped,
    Verdict,
)
from holter.records.observation import (
    Body,
    Judged,
    Link,
    Observation,
    Own,
    Rare,
    SightLost,
    Unavailable,
    Unexamined,
    Watched,
)
from holter.records.rank import (
    NUMBERS,
    Attached,
    Census,
    Component,
    Feed,
    FirstStep,
    Group,
    Groups,
    Inspection,
    Logged,
    Mark,
    ModuleVitals,
    Named,
    Nonfinite,
    OnDevice,
    Origin,
    PackedTable,
    ScriptWarning,
    Skipped,
    StepDone,
    Swapped,
    Table,
    TensorEntry,
    View,
    Vitals,
    Where,
    Witness,
)
from holter.records.verdicts import (
    Action,
    Basis,
    Cause,
    Collective,
    Diagnosis,
    Directive,
    Evidence,
    ExamRequest,
    Finding,
    Fix,
    Healthy,
    Severity,
    TableRequest,
)
from holter.records.watching import (
    Call,
    CallBlock,
    Device,
    Exam,
    ExamDepth,
    Exited,
    Farewell,
    Flight,
    Frame,
    LastCalls,
    Overdue,
    Phase,
    ProcessState,
    StepCalls,
    ThreadStack,
    Traffic,
)

__all__ = [
    "EXIT_CODE", "NUMBERS", "Action", "Attached", "Basis", "Body", "Call", "CallBlock", "Cause", "Census",
    "Collective", "Component", "Device", "Diagnosis", "Directive", "Evidence", "Exam", "ExamDepth",
    "ExamRequest", "Exited", "Farewell", "Feed", "Finding", "FirstStep", "Fix", "Flight", "Frame", "Group",
    "Groups", "HaltAnswered", "HaltAsked", "Halting", "Healthy", "Inspection", "Judged", "LastCalls", "Link",
    "Logged", "Mark", "ModuleVitals", "Named", "Nonfinite", "Observation", "OnDevice", "Order", "OrderKind",
    "Ordered", "Origin", "Overdue", "Own", "PackedTable", "Phase", "ProcessState", "RankState", "Rare",
    "SaveFinished", "ScriptWarning", "Severity", "SightLost", "Skipped", "Snapped", "StepCalls", "StepDone",
    "Swapped", "Table", "TableRequest", "TensorEntry", "ThreadStack", "Traffic", "Unavailable", "Unexamined",
    "Verdict", "View", "Vitals", "Watched", "Where", "Witness",
]  # fmt: skip
