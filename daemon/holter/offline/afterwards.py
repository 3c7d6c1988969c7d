"""A diagnosis made from dumps: without the evidence, and without the actions, that need a live job."""

from collections.abc import Collection, Iterator

import msgspec

from holter.faults.shared.wording import ranks_text
from holter.records import Cause, Diagnosis, Directive, Evidence

LIVE = frozenset({"deadline", "process_state"})
"""Kinds of evidence that only a sidecar gathers: a dump says nothing for or against them."""
NOTHING = Directive(directive="observe", reason="judged from dumps after the event: holter was not there to act")
NO_STACKS = "stacks and process states: a dump has none. If the job still hangs, `py-spy dump --native --pid PID` on the named ranks shows what they do"


def afterwards(diagnosis: Diagnosis, dumped: Collection[int]) -> Diagnosis:
    """The same verdict, with the evidence that there is; `dumped` are the ranks of which there is a dump."""
    causes = tuple(
        msgspec.structs.replace(cause, evidence=tuple(_of_dumps(cause, dumped))) for cause in diagnosis.causes
    )
    return msgspec.structs.replace(diagnosis, causes=causes, action=NOTHING, detected_after_s=0.0)


def _of_dumps(cause: Cause, dumped: Collection[int]) -> Iterator[Evidence]:
    absent = [rank for rank in cause.ranks if rank not in dumped]
    if absent:
        text = f"a dump of {ranks_text(absent)}: what it did is inferred from its peers' waiting; it may have died, or never been asked"
        yield Evidence(kind="missing", summary=text, values={"ranks": absent})
    for one in cause.evidence:
        if one.kind == "missing" and "stack" in one.summary:
            yield Evidence(kind="missing", summary=NO_STACKS)
        elif one.kind not in LIVE:
            yield one
