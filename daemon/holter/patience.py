"""How long each process waits for another before it draws a conclusion: the one table of these waits, as plain data.

    a sidecar waits for its rank          a phase may last so long; then the rank is suspect, and later overdue
    the detector of hangs, for a culprit  an overdue rank is named so much later, depending on what its stack shows
    a rank waits in a halt                before a step, before it dies, or after it saved: then it goes on by itself
    the coordinator waits in a halt       for ranks that stand or die to be explained, and for answers to its orders

How often something is polled, and how long one system call may take, is decided at the place of use.
"""

from dataclasses import dataclass

from holter.records import Phase

# A sidecar waits for its rank (`sidecar.progress`).

FIRST_STEPS = 3
"""Number of first steps in which everything may take long: compilers, caches, the first contact with every library."""
SETUP_S = 1800.0
"""Seconds allowed before the first step is done, when data sets are prepared and models loaded, often by one rank while
others wait."""
FIRST_S = 600.0
"""Seconds allowed for every phase of the first steps."""
PREPARING_S = 300.0
"""Seconds for which it is believed that kernels are being compiled: about twenty, 1 to 2 s each on a quiet machine."""
FIRST_LOOK_S = 15.0
"""Seconds after which a rank in its first steps is suspect: an examination is cheap, and may prove that it will never
go on."""
ENDING_S = 120.0
"""Seconds allowed for an interpreter that is ending: it frees memory, joins threads, and shows no phase."""
FACTOR, EXTRA_S = 3.0, 1.0
"""A phase may last FACTOR times its longest healthy wait plus EXTRA_S."""
BEYOND = 1.5
"""Factor on the longest healthy wait if that exceeds the phase's ceiling: what went well once is no alarm the second
time."""
LONGEST_S = 3600.0
"""Longest wait in seconds that is learned: a job that stood still for a night must not be allowed another one."""
HALF_LIFE_S, HALF_LIVES = 7200.0, 400.0
"""The longest wait loses half its weight after two hours, or after 400 times its own length, because long waits are
rare."""
CHECKPOINT_BYTES_PER_S, CHECKPOINT_S = 50e6, 20.0
"""A first checkpoint may take as long as its bytes take on slow storage, plus CHECKPOINT_S."""
CHECKPOINT_COPIES = 3
"""Number of tensors saved for each parameter: the parameter itself and an optimizer's two moments."""
HALTED_SUSPECT_S, HALTED_OVERDUE_S = 1.0, 3.0
"""Seconds for a process that the kernel does not let run (stopped, traced, frozen), since it does not go on by
itself."""
ASLEEP_SUSPECT_S = 5.0
"""Seconds for one uninterruptible sleep: a disk or a file system does not answer."""


@dataclass(frozen=True)
class PhaseWait:
    """How long a rank may stay in one phase."""

    floor_s: float = 6.0
    ceiling_s: float = 600.0
    unseen_s: float = 60.0
    """Seconds allowed until `num_enough` waits were seen; for a checkpoint they depend on its bytes."""
    num_enough: int = 4
    has_one_off: bool = False
    """Whether the first steps take longer here for a reason that does not return, such as compiling or building the
    model."""


PHASES = {
    Phase.ATTACH: PhaseWait(unseen_s=600.0, ceiling_s=1800.0),
    # Storage that hesitates for some seconds comes back.
    Phase.DATA: PhaseWait(floor_s=10.0, unseen_s=20.0, num_enough=16),
    Phase.FORWARD: PhaseWait(has_one_off=True),
    Phase.BACKWARD: PhaseWait(has_one_off=True),
    Phase.OPTIMIZER: PhaseWait(has_one_off=True),
    Phase.CHECKPOINT: PhaseWait(floor_s=10.0, ceiling_s=1800.0, num_enough=1),
    Phase.EVALUATION: PhaseWait(num_enough=1),
    Phase.OTHER: PhaseWait(has_one_off=True),
}


# The detector of hangs waits before it names a culprit (`faults.hangs`).


@dataclass(frozen=True)
class CulpritWaits:
    """How many more seconds a rank that seems to hold the job up is given, depending on what is known of it."""

    suspended_s: float = 3.0
    """Seconds for which a process may be stopped, traced or frozen while others are not."""
    unreachable_s: float = 3.0
    """Seconds for which a host may be silent while its peers wait for it."""
    compile_s: float = 600.0
    """Seconds given to a rank whose stack shows a compiler."""
    library_s: float = 600.0
    """Seconds given to a rank whose stack shows saving, evaluation, data, a library's code, a file, another process or
    one operation of torch's, in a phase that is none of these."""
    evaluation_s: float = 60.0
    """Seconds given to a rank whose stack shows an evaluation in the script's own code, unless it is the first one of
    the run."""
    unseen_s: float = 60.0
    """Seconds given to a rank whose stack cannot be seen."""
    everyone_s: float = 60.0
    """Seconds given to ranks for which nobody waits."""
    everyone_in_script_s: float = 300.0
    """Seconds given to ranks for which nobody waits, if they are in the script's own code."""
    proven_s: float = 20.0
    """Seconds given to ranks that provably cannot go on, even in their first steps."""
    setup_s: float = 7200.0
    """Seconds given to a rank that works before the first step is done."""
    late_s: float = 2.0
    """Seconds that the coordinator waits for the second look."""


# A rank waits in a halt (`halting.rank_protocol`, `rank.hold`). Each is longer than what the coordinator needs to decide.

HOLD_S = 20.0
"""Seconds that a rank waits before a step for a decision; then it trains on if its peers do too."""
DYING_S = 10.0
"""Seconds that a process which is about to end waits to be told whether it should save first."""
LEAVE_S = 30.0
"""Seconds beyond the save's deadline that a rank which has saved waits for the order to leave."""
ORPHAN_S = 2.0
"""Seconds that a rank without a sidecar waits for a peer's word in the commit register before it writes its own."""
TERMINATED_S = 30.0
"""Seconds after a SIGTERM that asks for a halt until the halt must begin; then the signal takes its course."""

# The coordinator waits in a halt (`halting.plan`, `coordinator.halt`).

STAND_S = 6.0
"""Seconds that standing ranks wait for the others to come to the same step."""
UNEXPLAINED_S = 8.0
"""Seconds after which ranks that stand without a diagnosis are halted for what they reported themselves."""
KEEP_DYING_S = 4.0
"""Seconds that a rank which is about to end is kept: a peer's death may explain it, and its state may be needed."""
REFUSE_S = 10.0
"""Seconds after which a requested halt that cannot start is refused."""
CALLED_OFF_S = 5.0
"""Seconds for which the abort of a halt is repeated to ranks that have not answered; then another halt may be tried."""
ANSWER_S = 10.0
"""Seconds beyond the deadline of a save for its answer to arrive."""
