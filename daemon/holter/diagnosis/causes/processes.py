"""Hangs, slow ranks, dead ranks."""

from holter.diagnosis.causes.entry import CauseEntry
from holter.records import Fix

RANK_DEAD = CauseEntry(
    cause="rank_dead",
    happened="A rank's process ended before the training was done.",
    mechanism=(
        "The process was killed, crashed in native code, or left with an error. Its peers then fail too: those in a collective get "
        "connection errors or wait until their timeout, and the launcher ends the rest with SIGTERM. Only the first death has a cause."
    ),
    would_refute="Another rank ended before the named one, and neither by SIGTERM nor over a lost connection.",
    refuting_fact="has_earlier_death",
    is_refuted_by=True,
    fix=Fix(
        do=(
            "Read the named rank's own log around its last line, and no other rank's. SIGKILL: ask the kernel (`dmesg -T | grep -i kill`) "
            "and the scheduler who sent it; most often memory ran out. SIGSEGV, SIGBUS, SIGABRT: native code, look for a core dump. "
            "An exception: its text and line are in the evidence. Then resume from the last good checkpoint."
        ),
        changes="Nothing in the numbers: steps since the last checkpoint are run again, nothing else is lost.",
        does_not_fix="What ended the process, if it is resumed unchanged: it may well die at the same place again.",
        expect="The resumed run passes this step with all ranks alive.",
        verify="`holter status` shows every rank past this step.",
        otherwise=(
            "If it dies again on the same host and not on others, suspect the host; at the same step on any host, suspect that step's "
            "data or code; at changing steps with growing memory, a leak."
        ),
    ),
)

CAUSES: tuple[CauseEntry, ...] = (RANK_DEAD,)
