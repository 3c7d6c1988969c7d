"""Proves a fix: what was wrong, whether it came back, and what earlier attempts taught.

record    what one run shows, whoever watched it: its curves, its faults, its settings
changes   what differs between two runs besides the fault
memory    incidents of earlier runs, with what was tried against them and what came of it
verify    did the fix work: a pure function over two records
"""

from holter.offline.proof.changes import SettingChange, setting_changes
from holter.offline.proof.record import PastFault, RunRecord, record_of_found
from holter.offline.proof.verify import FixVerdict, verify

__all__ = ["FixVerdict", "PastFault", "RunRecord", "SettingChange", "record_of_found", "setting_changes", "verify"]
