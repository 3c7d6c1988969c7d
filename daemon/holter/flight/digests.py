"""Signatures of calls, which must be equal on all ranks of a group, and digests of runs of calls.

    all_reduce float32 [100]                 all_to_all bfloat16                 barrier

A digest costs eight bytes of network traffic for 64 calls, so that ranks can be compared while the job runs: ranks
whose calls agree have the same digests, wherever their recorders begin.
"""

import functools
from hashlib import blake2b

from holter.records import Call, CallBlock, Flight

BLOCK_CALLS = 64
"""Number of sequence numbers of one group that make up one digest."""

UNEVEN = frozenset(
    {"all_to_all", "alltoall", "alltoall_base", "all_to_all_single", "gather", "scatter", "send", "recv"}
)
"""Operations whose sizes may differ from rank to rank, because the parts differ in size or only the root has all of them.

all_gather is not among them: gloo refuses a list of uneven tensors, and NCCL's recorder shows coalesced broadcasts
instead.
"""


def signature(call: Call) -> str:
    """Return what must be equal on all ranks that take part in a call: operation, dtypes, and sizes where they must agree."""
    return _line(call.operation, call.dtypes or call.output_dtypes, call.sizes, call.is_p2p)


@functools.lru_cache(maxsize=4096)
def _line(operation: str, dtypes: tuple[str, ...], sizes: tuple[tuple[int, ...], ...], is_p2p: bool) -> str:  # noqa: FBT001
    words = [operation, *dtypes]
    if not is_p2p and operation not in UNEVEN:
        words += [str(list(size)) for size in sizes]
    return " ".join(words)


def blocks(flight: Flight) -> list[CallBlock]:
    """Return a digest for each complete block of sequence numbers that the recorder still holds; messages are ignored.

    A block is complete if the recorder holds calls at or before its beginning and at or after its end. Numbers in
    between may be missing (gloo counts calls that it does not record), but then on all ranks alike.
    """
    lines: dict[tuple[str, int], list[str]] = {}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for call in flight.calls:
        if call.is_p2p:
            continue
        lines.setdefault((call.group, call.sequence // BLOCK_CALLS), []).append(f"{call.sequence} {signature(call)}")
        first.setdefault(call.group, call.sequence)
        last[call.group] = call.sequence
    return [
        CallBlock(group, block, _number(text))
        for (group, block), text in lines.items()
        if first[group] <= max(block * BLOCK_CALLS, 1) and last[group] >= (block + 1) * BLOCK_CALLS - 1
    ]


def _number(lines: list[str]) -> int:
    digest = blake2b("\n".join(lines).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # 63 bits: signed everywhere
