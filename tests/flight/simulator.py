"""A job of ranks that call collectives and block in them, and the recorders that it leaves behind.

Every rank runs its own list of calls. A call is over when all ranks of its group have entered the one of the same number; if they called
different things it is never over (`mismatch_hangs`), or it is, as on gloo with other dtypes.
"""

import random
from dataclasses import dataclass, field, replace

from holter.records import Call, Flight, Group

TICK_NS = 1_000_000
START_NS = 1_000_000_000_000


@dataclass(frozen=True)
class Planned:
    """One call of a program."""

    group: str
    operation: str = "all_reduce"
    size: int = 10
    dtype: str = "float32"


Program = list[Planned]
Groups = dict[str, tuple[int, ...]]


def programs(groups: Groups, step: Program, num_steps: int) -> dict[int, Program]:
    """Each rank's program: the calls of the groups that it belongs to, step after step."""
    ranks = {rank for members in groups.values() for rank in members}
    return {rank: [planned for planned in step if rank in groups[planned.group]] * num_steps for rank in ranks}


@dataclass
class Rank:
    program: Program
    calls: list[Call] = field(default_factory=list)
    position: int = 0
    inside: tuple[str, int] | None = None
    entered: dict[str, int] = field(default_factory=dict)


class Job:
    def __init__(
        self, groups: Groups, rank_programs: dict[int, Program], seed: int = 0, *, mismatch_hangs: bool = True
    ):
        self.groups = groups
        self.ranks = {rank: Rank(program) for rank, program in rank_programs.items()}
        self.mismatch_hangs = mismatch_hangs
        self.random = random.Random(seed)  # noqa: S311
        self.now_ns = START_NS
        self.present: dict[tuple[str, int], dict[int, Planned]] = {}

    def run(self, num_moves: int = 1_000_000) -> int:
        """Moves ranks in random order until none can, or so many times; how often one did."""
        for done in range(num_moves):
            movable = [number for number, rank in self.ranks.items() if self._can_move(rank)]
            if not movable:
                return done
            self._move(self.random.choice(movable))
        return num_moves

    @property
    def finished(self) -> set[int]:
        return {
            number for number, rank in self.ranks.items() if rank.position == len(rank.program) and rank.inside is None
        }

    def flight(self, number: int, *, after_ns: int = 0, newest: int = 1_000_000) -> Flight:
        """A copy of one rank's recorder as it is now, taken so much later."""
        rank = self.ranks[number]
        groups = [
            Group(name, "default_pg" if name == "0" else "", members, rank.entered.get(name, -1), -1)
            for name, members in self.groups.items()
            if number in members
        ]
        return Flight(groups=groups, calls=rank.calls[-newest:], taken_ns=self.now_ns + after_ns)

    def flights(self, *, newest: int = 1_000_000) -> dict[int, Flight]:
        """Copies of all recorders, half a minute after the last one moved."""
        return {number: self.flight(number, after_ns=30_000_000_000, newest=newest) for number in self.ranks}

    def _is_over(self, call: tuple[str, int]) -> bool:
        present = self.present[call]
        agrees = len(set(present.values())) == 1
        return len(present) == len(self.groups[call[0]]) and (agrees or not self.mismatch_hangs)

    def _can_move(self, rank: Rank) -> bool:
        if rank.inside is not None:
            return self._is_over(rank.inside)
        return rank.position < len(rank.program)

    def _move(self, number: int) -> None:
        """Out of a call that is over, or into the next."""
        rank = self.ranks[number]
        self.now_ns += TICK_NS
        if rank.inside is not None:
            rank.inside = None
            call = rank.calls[-1]
            rank.calls[-1] = Call(
                *(getattr(call, name) for name in call.__struct_fields__[:6]), True, record=call.record
            )
            return
        planned = rank.program[rank.position]
        sequence = rank.entered.get(planned.group, 0) + 1
        rank.entered[planned.group] = sequence
        rank.inside = (planned.group, sequence)
        self.present.setdefault(rank.inside, {})[number] = planned
        sizes = ((planned.size,),)
        position, rank.position = rank.position, rank.position + 1
        rank.calls.append(
            Call(
                planned.group,
                sequence,
                planned.operation,
                sizes,
                (planned.dtype,),
                self.now_ns,
                False,
                record=position,
            )
        )


def deviated(program: Program, fault: str, at: int, extra: Planned | None = None) -> Program:
    """A program with one fault in it."""
    before, planned, after = program[:at], program[at], program[at + 1 :]
    return {
        "skip": lambda: before + after,
        "extra": lambda: [*before, extra or planned, planned, *after],
        "shape": lambda: [*before, replace(planned, size=planned.size + 7), *after],
        "dtype": lambda: [*before, replace(planned, dtype="bfloat16"), *after],
        "swap": lambda: [*before, *reversed(program[at : at + 2]), *program[at + 2 :]],
        "stop": lambda: before,
    }[fault]()
