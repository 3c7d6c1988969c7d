"""PyTorch's Flight Recorder: read its dumps in any format, and find the ranks whose calls do not match. Pure.

- reading: a dump, JSON or pickle, gloo or NCCL  -> Flight
- digests: a call as its signature, a run of calls as one number
- matching: all ranks' flights -> who waits for whom, who called something else
"""

from holter.errors import FlightError
from holter.flight.analysis import Analysis, Deviation, Kind, Wait
from holter.flight.digests import BLOCK_CALLS, blocks, signature
from holter.flight.matching import analyse
from holter.flight.reading import (
    from_bytes,
    from_json,
    from_pickle,
    is_over,
    script_lines,
    trimmed,
    with_lines,
    with_members,
)

__all__ = [
    "BLOCK_CALLS",
    "Analysis",
    "Deviation",
    "FlightError",
    "Kind",
    "Wait",
    "analyse",
    "blocks",
    "from_bytes",
    "from_json",
    "from_pickle",
    "is_over",
    "script_lines",
    "signature",
    "trimmed",
    "with_lines",
    "with_members",
]
