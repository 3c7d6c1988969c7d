"""Whether the ranks of a group call the same collectives, and equally many. Pure, incremental, bounded.

By the digests of runs of calls:

    group "0", block 7 (calls 448 to 511)     digest 0x51..  ranks 0, 2, 3
                                              digest 0xe0..  rank 1            two digests: they differ

By the number of calls of each rank at the end of each step:

    step 24   rank 0: 25   rank 1: 25
    step 25   rank 0: 26   rank 1: 25                                          rank 1 left one out, and stays one behind

The members of a group are not known here: the ranks that report a block are compared, whoever reports first. If a rank
reports a block again with another digest, it has started the group anew: the newest digest counts.
"""

from dataclasses import dataclass, field

from holter.faults.window import CallCounts, PartedBlock
from holter.records import CallBlock, StepCalls

MAX_GROUPS = 2048
MAX_BLOCKS = 48
"""Largest number of blocks kept of one group, the newest: a recorder holds two thousand calls, and ranks report them at
different times."""
MAX_RANKS = 64
"""Largest number of ranks kept of one digest, the lowest; more are not needed to look at what they called."""
MAX_DIGESTS = 16
"""Largest number of digests kept of one block."""
MAX_PARTED = 32
"""Largest number of differing blocks that are shown."""
QUIET_NS = 120 * 10**9
"""Nanoseconds without a report after which a group may be forgotten in favour of a new one."""
MAX_COUNTED_GROUPS = 64
MAX_COUNTED_STEPS = 512
"""Largest number of newest steps kept of one group."""
MAX_COUNTED_RANKS = 64
"""Largest number of agreeing ranks that are kept."""


@dataclass
class _Block:
    digests: dict[int, set[int]] = field(default_factory=dict)
    parted_ns: int | None = None
    """Since when more than one digest is known; None if there is only one."""

    def add(self, rank: int, digest: int, received_ns: int) -> bool:
        """Take in one rank's digest; return whether the rank had reported another one before."""
        is_anew = self.remove(rank, but=digest)
        ranks = self.digests.setdefault(digest, set())
        ranks.add(rank)
        if len(ranks) > MAX_RANKS:
            ranks.discard(max(ranks))
        if len(self.digests) > MAX_DIGESTS:
            del self.digests[min(self.digests, key=lambda known: (len(self.digests[known]), -known))]
        if len(self.digests) > 1 and self.parted_ns is None:
            self.parted_ns = received_ns
        return is_anew

    def remove(self, rank: int, but: int | None = None) -> bool:
        """Forget the digests that this rank reported, except one; return whether there were any."""
        told = [digest for digest, ranks in self.digests.items() if digest != but and rank in ranks]
        for digest in told:
            self.digests[digest].discard(rank)
            if not self.digests[digest]:
                del self.digests[digest]
        if len(self.digests) <= 1:
            self.parted_ns = None
        return bool(told)


@dataclass
class _Group:
    told_ns: int
    blocks: dict[int, _Block] = field(default_factory=dict)
    """Blocks in the order in which they were first reported."""

    def add(self, rank: int, told: CallBlock, received_ns: int) -> None:
        self.told_ns = received_ns
        entry = self.blocks.setdefault(told.block, _Block())
        if entry.add(rank, told.digest, received_ns):
            self.blocks[told.block] = self.blocks.pop(told.block)
        if len(self.blocks) > MAX_BLOCKS:
            # The block in which the ranks first differed is never dropped.
            first = min(self.parted(), default=(0, None))[1]
            del self.blocks[next(block for block in self.blocks if block != first)]

    def parted(self) -> list[tuple[int, int]]:
        """Return (since when, block) of the differing blocks, oldest first."""
        return sorted((entry.parted_ns, block) for block, entry in self.blocks.items() if entry.parted_ns is not None)


class CallBlockBook:
    """The newest runs of calls of each group, as each rank reported them."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._groups_of: dict[int, set[str]] = {}
        """For each rank, the groups that it reported on."""
        self._parted: tuple[PartedBlock, ...] | None = ()

    def add(self, rank: int, blocks: list[CallBlock], received_ns: int) -> None:
        """Take in one rank's digests."""
        for told in blocks:
            group = self._groups.get(told.group) or self._new(told.group, received_ns)
            if group is not None:
                self._groups_of.setdefault(rank, set()).add(told.group)
                group.add(rank, told, received_ns)
                self._parted = None

    def forget(self, rank: int) -> None:
        """Forget a rank that runs in a new process and counts from the beginning."""
        for name in self._groups_of.pop(rank, ()):
            group = self._groups.get(name)
            if group is None:
                continue
            for entry in group.blocks.values():
                entry.remove(rank)
            group.blocks = {block: entry for block, entry in group.blocks.items() if entry.digests}
            if not group.blocks:
                del self._groups[name]
        self._parted = None

    def parted(self) -> tuple[PartedBlock, ...]:
        """Return the first and the newest differing block of each group, oldest first; the same object as long as nothing changed."""
        if self._parted is None:
            found = sorted(
                (since_ns, name, block)
                for name, group in self._groups.items()
                for since_ns, block in _ends(group.parted())
            )
            self._parted = tuple(self._view(name, block, since_ns) for since_ns, name, block in found[:MAX_PARTED])
        return self._parted

    def _new(self, name: str, received_ns: int) -> _Group | None:
        """Make a group; None if there are too many already, all of them in use."""
        if len(self._groups) >= MAX_GROUPS:
            oldest = min(self._groups, key=lambda known: self._groups[known].told_ns)
            if received_ns - self._groups[oldest].told_ns < QUIET_NS:
                return None
            del self._groups[oldest]
        group = self._groups[name] = _Group(received_ns)
        return group

    def _view(self, name: str, block: int, since_ns: int) -> PartedBlock:
        digests = self._groups[name].blocks[block].digests
        ordered = sorted((-len(ranks), tuple(sorted(ranks)), digest) for digest, ranks in digests.items())
        return PartedBlock(name, block, since_ns, {digest: ranks for _, ranks, digest in ordered})


def _ends(parted: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return parted if len(parted) <= 2 else [parted[0], parted[-1]]  # noqa: PLR2004


_Steps = dict[int, dict[int, list[int]]]
"""Step -> last number -> ranks."""


class CallCountBook:
    """How many calls each rank had made, for the newest steps of each group."""

    def __init__(self) -> None:
        self._groups: dict[str, _Steps] = {}
        self._counts: dict[str, tuple[CallCounts, ...]] = {}

    def add(self, rank: int, steps: list[StepCalls]) -> None:
        """Take in one rank's report."""
        for told in steps:
            for group, last in told.lasts.items():
                known = self._groups.get(group)
                if known is None:
                    if len(self._groups) >= MAX_COUNTED_GROUPS:
                        continue
                    known = self._groups[group] = {}
                ranks = known.setdefault(told.step, {}).setdefault(last, [])
                if len(ranks) < MAX_COUNTED_RANKS:
                    ranks.append(rank)
                if len(known) > MAX_COUNTED_STEPS:
                    del known[min(known)]
                self._counts.pop(group, None)

    def clear(self) -> None:
        """Forget everything, because a rank runs in a new process: it counts from the beginning, and so will the others."""
        self._groups.clear()
        self._counts.clear()

    def counts(self) -> dict[str, tuple[CallCounts, ...]]:
        """Return the steps of each group, ascending; the same objects as long as nothing changed."""
        for group in self._groups.keys() - self._counts.keys():
            steps = self._groups[group]
            self._counts[group] = tuple(
                CallCounts(step, {last: tuple(ranks) for last, ranks in steps[step].items()}) for step in sorted(steps)
            )
        return dict(self._counts)
