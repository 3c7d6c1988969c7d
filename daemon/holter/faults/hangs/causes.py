"""Hangs and dead ranks."""

from holter.faults.family import (
    NOT_BY_A_NUMBER,
    NOT_BY_A_SCRIPT,
    CauseEntry,
    Consequence,
    Damage,
    DetectorEntry,
    Family,
    Row,
    Stage,
)
from holter.faults.hangs.collective_mismatch import CollectiveMismatch
from holter.faults.hangs.dead_rank import DeadRank
from holter.faults.hangs.stalled_rank import StalledRank
from holter.records import Fix

_NO_OTHER_SIDE = "the other side's record of this call: its process ended before a copy could be made, so that what it called is inferred from what it always called"
_NO_LATER_CALL = "the call after the one it stands in, which tells whether it left a call out or swapped two: it never came to make it"
_NO_CALLS = "the calls themselves: the digests of a run of calls differ between ranks, but the recorders had gone past them when they were read"
_HELD = ("is_suspended", "is_unreachable", "has_ended", "is_interpreter_locked")
"""Facts of a process that is held; then nothing that the script does is to blame."""
_NO_STACK = "the stack of the rank that did not come: py-spy could not read it"
_NO_THIRD = "a third rank, or calls from before that tell which side is right: both sides wait for each other, so both are named"
_NO_ABSENT = (
    "a rank that is missing: all ranks look alike, so that the network or the collective itself may be at fault"
)
_NO_SIGN = "what the rank does instead: neither its stack nor the ranks' recorders tell"
_NO_SECOND_SIGN = "a sign that it took another branch: its stack shows the usual one, in which it does not go on"
_BUSY_DEVICE = (
    "the wait channel's reason (`dmesg -T` on its host): a storage or a device that does not answer looks like this"
)
_SAVED_BELOW = "native code that holds the lock: the stack shows only that of the save"
_NO_NEXT_CALL = "the call after the one it waits in: if it only swapped two calls, the one it left out comes next"
_NOT_LOOKED_AT = (
    "a look at the named rank before its peer's timeout was over: it is the only one left that can have been missing"
)
_NO_ABSENTEE = "the ranks' recorders from before the timeout: a rank gave up waiting, and nothing tells which of its peers was missing"
_LOCKED_TOO = "the interpreter's answer: it is locked, and that alone would explain the wait"

_BETTER_KNOWN = ("is_own_error", "is_out_of_memory", "is_worker_lost")
"""Facts of an end whose cause has a name of its own."""

RANK_SUSPENDED = CauseEntry(
    cause="rank_suspended",
    happened="A rank's process is held: stopped by a signal, a debugger or the freezer, or in a system call that does not return.",
    mechanism=(
        "The kernel does not let the process run. SIGSTOP or SIGTSTP came from a shell, a scheduler or a script; a debugger is attached; a container was "
        "paused; or a storage, a device or its driver does not answer and the process sleeps uninterruptibly. Its peers wait in their next collective."
    ),
    would_refute="The kernel shows the process running or in ordinary sleep.",
    refuting_fact="is_process_normal",
    is_refuted_by=True,
    is_hang=True,
    passes_after_steps=1,
    rows=(
        Row("stalled_rank", 0.95, "observation", seen=("is_suspended",)),
        Row("stalled_rank", 0.88, "observation", seen=("is_uninterruptible",), unless=("is_in_data", "is_in_checkpoint", "has_ended", "is_unreachable")),
        Row("stalled_rank", 0.50, "inference", seen=("is_uninterruptible",), missing=_BUSY_DEVICE),
    ),
    fix=Fix(
        do=(
            "On the rank's host: `grep State /proc/PID/status`. T: `kill -CONT PID` lets it go on, the job with it. t: `grep TracerPid /proc/PID/status` names "
            "the debugger; detach it. Frozen: unpause the container (`docker unpause`, or write 0 to its cgroup.freeze). D: `cat /proc/PID/wchan` and "
            "`dmesg -T | tail -50` say what it waits for; a dead mount or device must be mended there, no signal helps."
        ),
        changes="Nothing in the numbers: the rank goes on where it stood, if its peers have not given up by then.",
        does_not_fix="Who stopped it: a scheduler that preempts, or a limit of the container, will do it again.",
        expect="All ranks go on within a second. If a timeout has passed meanwhile, the peers fail and the job must be resumed from a checkpoint.",
        verify="`holter status` shows the rank's step rising again.",
        otherwise="If it is stopped again at once, look for a background job that reads from the terminal (SIGTTIN), and at the host's audit log for who sends the signal.",
    ),
)  # fmt: skip

HOST_UNREACHABLE = CauseEntry(
    cause="host_unreachable",
    happened="A rank's host is silent: neither its sidecar nor the rank itself is heard, and nobody hung up.",
    mechanism=(
        "The host lost power or froze, its network went down, or something between drops packets without a word. No connection is closed, so nothing fails: "
        "the peers wait in a collective until their timeout."
    ),
    would_refute="The rank's sidecar answered since.",
    refuting_fact="has_answered",
    is_refuted_by=True,
    is_hang=True,
    passes_after_steps=1,
    rows=(
        Row("stalled_rank", 0.90, "observation", seen=("is_unreachable",)),
    ),
    fix=Fix(
        do=(
            "Look at the host from outside: `ping HOST`, `ssh HOST uptime`, its management console, the scheduler's view of the node. Alive: look at "
            "`ip -s link` and `dmesg -T` for a link that went down. Dead: take the node out, end the job, and resume from the last good checkpoint without it."
        ),
        changes="Which hosts the job runs on.",
        does_not_fix="A switch or cable that also serves the next host.",
        expect="All ranks of the resumed job report within a minute.",
        verify="`holter status` shows every rank connected and past this step.",
        otherwise="If only holter's connection were dead while the ranks still exchange data, the job would not wait: look at the waiting ranks' collective for another culprit.",
    ),
)  # fmt: skip

INTERPRETER_LOCKED = CauseEntry(
    cause="interpreter_locked",
    happened="A rank holds the interpreter lock in native code, so that no Python runs in it.",
    mechanism=(
        "Native code (an extension, ctypes.PyDLL, a callback from C++) runs or waits without giving up the interpreter lock. No other thread of the "
        "process can run Python: heartbeats, watchdogs and signal handlers written in Python are silent, although the process is alive. If the native "
        "code waits for something that needs Python in the same process, it waits for ever."
    ),
    would_refute="A question that only the rank's interpreter can answer was answered.",
    refuting_fact="is_lock_free",
    is_refuted_by=True,
    is_hang=True,
    passes_after_steps=1,
    rows=(
        Row("stalled_rank", 0.95, "observation", seen=("is_interpreter_locked", "has_stack"), unless=("is_suspended", "is_unreachable", "has_ended", "is_uninterruptible", "is_elsewhere", "is_saving")),
        Row("stalled_rank", 0.85, "observation", seen=("is_interpreter_locked",), unless=("is_suspended", "is_unreachable", "has_ended", "is_uninterruptible", "is_saving")),
        Row("stalled_rank", 0.50, "inference", seen=("is_interpreter_locked", "is_saving"), missing=_SAVED_BELOW),
        Row("stalled_rank", 0.45, "inference", seen=("is_interpreter_locked",), missing="a native stack that shows the lock's owner at work, not in a system call"),
    ),
    fix=Fix(
        do=(
            "The native frame in the evidence names the function. In code of your own: release the lock around it (`Py_BEGIN_ALLOW_THREADS`, "
            "`py::call_guard<py::gil_scoped_release>()`, ctypes.CDLL instead of PyDLL). In a library: update it, or call it in another process. Take "
            "`py-spy dump --native --pid PID` once more: another frame means slow work, the same frame a wait. End the job with SIGKILL (Python's handlers "
            "cannot run) and resume from the last good checkpoint."
        ),
        changes="Other threads may run while the native code does: it must not touch Python objects meanwhile.",
        does_not_fix="Native code that takes as long without the lock: the rank's peers still wait for it.",
        expect="The interpreter answers while the native function runs, and the rank comes to its collectives.",
        verify="`py-spy dump --pid PID` during that call shows no thread with `+gil` in native code for seconds.",
        otherwise="If the frame is a lock (`pthread_mutex_lock`, `PyGILState_Ensure`), look at the other threads' stacks for who holds it.",
    ),
)  # fmt: skip

STALLED_DATA_LOADER = CauseEntry(
    cause="stalled_data_loader",
    happened="A rank waits for its next batch, and its peers wait for it.",
    mechanism=(
        "The next batch does not come: a worker process died or is deadlocked, a file system or an object store does not answer, a sample makes the "
        "preprocessing loop, or shared memory is full. The rank waits in its loader, which has no timeout unless one is set."
    ),
    would_refute="Neither the rank's phase nor its stack shows the loader.",
    refuting_fact="is_in_data",
    is_refuted_by=False,
    is_hang=True,
    passes_after_steps=1,
    rows=(
        Row("stalled_rank", 0.93, "observation", seen=("is_in_data",), absent=("is_everyone_stuck",), unless=(*_HELD, "is_elsewhere")),
        Row("stalled_rank", 0.88, "observation", seen=("is_in_data", "is_everyone_stuck"), unless=(*_HELD, "is_elsewhere")),
        Row("stalled_rank", 0.40, "inference", seen=("is_in_data", "is_interpreter_locked"), missing=_LOCKED_TOO),
        Row("dead_rank", 0.90, "observation", seen=("is_worker_lost",), unless=("is_worker_killed", "is_out_of_memory")),
        Row("dead_rank", 0.60, "inference", seen=("is_worker_killed",), missing="who killed the worker: `dmesg -T | grep -i kill` on its host"),
    ),
    fix=Fix(
        do=(
            "On the rank's host: `ps --ppid PID -o pid,stat,wchan:20,cmd` shows the loader's workers; `py-spy dump --pid WORKER` what each does. D or a read: the "
            "storage (`dmesg -T`, `df`, the object store's own status). Z or none left: they died, see the kernel's log for memory. A lock: workers that were forked "
            "while a thread held it; use `multiprocessing_context='spawn'`. Set `timeout=` on the DataLoader, so that a stall becomes an error with a name."
        ),
        changes="A batch that does not come ends the job with an error instead of hanging it.",
        does_not_fix="The storage, or the sample: log the index that is being loaded to find the latter.",
        expect="Batches come again, and the data phase takes what it took before.",
        verify="`holter status` shows every rank past this step; the data phase of later steps is short.",
        otherwise="If it happens at the same step again, it is a sample: load that batch alone in a small script. At any step on one host only, it is that host's storage.",
    ),
)  # fmt: skip

STALLED_CHECKPOINT = CauseEntry(
    cause="stalled_checkpoint",
    happened="A rank does not come back from a save, and its peers wait for it.",
    mechanism=(
        "The write does not end: the file system or the object store does not answer, a quota or a lock holds the writer, or the save itself needs a collective "
        "that not all ranks enter (a sharded state dict that is saved under `if rank == 0`). The peers wait in the next collective."
    ),
    would_refute="Neither the rank's phase nor its stack shows a save.",
    refuting_fact="is_in_checkpoint",
    is_refuted_by=False,
    is_hang=True,
    passes_after_steps=1,
    rows=(
        Row("stalled_rank", 0.93, "observation", seen=("is_in_checkpoint",), absent=("is_everyone_stuck",), unless=(*_HELD, "is_elsewhere", "is_in_data")),
        Row("stalled_rank", 0.88, "observation", seen=("is_in_checkpoint", "is_everyone_stuck"), unless=(*_HELD, "is_elsewhere", "is_in_data")),
        Row("stalled_rank", 0.93, "observation", seen=("is_saving", "is_interpreter_locked"), unless=(*_HELD[:3], "is_elsewhere")),
        Row("stalled_rank", 0.40, "inference", seen=("is_in_checkpoint", "is_interpreter_locked"), missing=_LOCKED_TOO),
    ),
    fix=Fix(
        do=(
            "On the rank's host: `df -h TARGET`, `cat /proc/PID/wchan`, `dmesg -T | tail -50`, and write a file of the same size there by hand (`dd`, `aws s3 cp`). "
            "If the stack shows a collective below the save, call the save on all ranks. Do not trust the file that was being written: keep the checkpoint "
            "before it, and resume from that. Save to local disk first and copy from there in the background."
        ),
        changes="Where and when checkpoints are written.",
        does_not_fix="A storage that is too slow for checkpoints of this size: save less often, or sharded.",
        expect="The next save takes what saves took before.",
        verify="`holter checkpoint verify DIR` accepts the next checkpoint, and `holter status` shows every rank past this step.",
        otherwise="If the save does come back after minutes, it was slow, not stuck: the deadline is learned from it, and it is not reported again.",
    ),
)  # fmt: skip

RANK_STUCK_IN_PYTHON = CauseEntry(
    cause="rank_stuck_in_python",
    happened="A rank loops, sleeps or waits for a lock in its own code.",
    mechanism=(
        "The rank's main thread is in the script's own functions and does not come back: a loop whose condition never turns false, a sleep or a retry "
        "without an end, a lock that nobody releases, a queue that nobody fills, an event that nobody sets. It calls nothing of torch's, so no timeout of torch's ends it. Its peers wait in "
        "the next collective."
    ),
    would_refute="The named rank itself waits in a collective.",
    refuting_fact="is_elsewhere",
    is_refuted_by=True,
    is_hang=True,
    passes_after_steps=1,
    rows=(
        Row("stalled_rank", 0.93, "observation", seen=("is_in_script",), absent=("is_interpreter_locked", "is_everyone_stuck"), unless=(*_HELD[:3], "is_uninterruptible", "is_elsewhere", "is_in_data", "is_in_checkpoint")),
        Row("stalled_rank", 0.85, "observation", seen=("is_in_script",), unless=(*_HELD, "is_uninterruptible", "is_elsewhere", "is_in_data", "is_in_checkpoint")),
    ),
    fix=Fix(
        do=(
            "Open the file at the line that the stack shows. High processor time: a loop, see what should end it and print that. None: it waits, find who "
            "should release the lock or fill the queue, and whether that thread or process still lives (`py-spy dump --pid PID --locals` on its host shows the "
            "variables). Give every wait in the script a timeout that raises. Then end the job and resume from the last good checkpoint."
        ),
        changes="A wait that cannot end becomes an error with a line number.",
        does_not_fix="Why the condition failed on this rank and not on the others; that is often in its data.",
        expect="The rank comes to the next collective as soon as its peers do.",
        verify="`holter status` shows every rank past this step, and this incident is not opened again.",
        otherwise="If the work at this line is meant to take so long, do it before the loop, or on all ranks alike, or while the others do not wait for it.",
    ),
)  # fmt: skip

RANK_MISSING_FROM_COLLECTIVE = CauseEntry(
    cause="rank_missing_from_collective",
    happened="A rank took another way and never entered the collective in which its peers wait.",
    mechanism=(
        "A collective ends only when every rank of its group has called it. A branch that depends on the rank, on its data or on a number that differs "
        "between ranks (`if rank == 0`, `if loss > x`, an `except` that skips the batch, a loop that is shorter here) leaves one call out, or leaves "
        "the loop altogether. The others wait until the backend's timeout, and their logs blame each other."
    ),
    would_refute="The named rank's recorder shows that it has entered that collective.",
    refuting_fact="has_entered",
    is_refuted_by=True,
    is_hang=True,
    passes_after_steps=1,
    rows=(
        Row("collective_mismatch", 0.93, "observation", seen=("is_missing", "is_seen_on_both_sides")),
        Row("collective_mismatch", 0.45, "inference", seen=("is_perhaps_missing",), missing=_NO_LATER_CALL),
        Row("stalled_rank", 0.93, "observation", seen=("is_elsewhere", "is_culprit_clear"), unless=_HELD[:3]),
        Row("stalled_rank", 0.90, "observation", seen=("has_ended",)),
        Row("stalled_rank", 0.65, "inference", seen=("is_elsewhere",), absent=("is_culprit_clear",), unless=_HELD[:3], missing=_NO_THIRD),
        Row("stalled_rank", 0.80, "observation", seen=("has_flight", "has_stack", "is_culprit_clear"), absent=("is_in_script", "is_in_data", "is_in_checkpoint", "is_everyone_stuck", "has_entered"), unless=_HELD),
        Row("stalled_rank", 0.65, "inference", seen=("has_flight", "is_culprit_clear"), absent=("has_stack", "is_everyone_stuck"), unless=(*_HELD, "is_in_data", "is_in_checkpoint"), missing=_NO_STACK),
        Row("stalled_rank", 0.45, "inference", seen=("is_in_script", "has_flight"), unless=_HELD, missing=_NO_SECOND_SIGN),
        Row("stalled_rank", 0.30, "inference", seen=("is_everyone_stuck",), absent=("is_culprit_clear",), unless=_HELD, missing=_NO_ABSENT),
        Row("stalled_rank", 0.15, "inference", missing=_NO_SIGN),
        Row("dead_rank", 0.85, "observation", seen=("is_timed_out", "is_absent_seen")),
        Row("dead_rank", 0.65, "inference", seen=("is_timed_out", "is_absent_known"), absent=("is_absent_seen",), missing=_NOT_LOOKED_AT),
        Row("dead_rank", 0.40, "inference", seen=("is_timed_out",), absent=("is_absent_known",), missing=_NO_ABSENTEE),
        Row("dead_rank", 0.35, "inference", seen=("is_timed_out",), missing=_NO_ABSENTEE),
    ),
    fix=Fix(
        do=(
            "Compare the named rank's last collectives with a waiting rank's, both in the evidence: the first line that differs is the call that was "
            "left out or put in. Find the branch around it, and let all ranks decide alike: compute the condition on one rank and broadcast it, or "
            "all-reduce it (`torch.distributed.all_reduce(flag, op=ReduceOp.MAX)`) before branching. Keep collectives out of `if rank == ...` and `except`. "
            "The hung job cannot go on: end it, and resume from the last good checkpoint."
        ),
        changes="One small collective where the decision is made; nothing in the numbers of a run that did not hang.",
        does_not_fix="What made this rank's data or state differ in the first place, if it should have been equal.",
        expect="The resumed run passes this step, and all ranks make the same call at every sequence number.",
        verify="`holter status` shows every rank past this step, and this incident is not opened again.",
        otherwise=(
            "If the rank's stack shows that it never reached the branch, it was held up before: look at its process state and at what it waited for. "
            "If it has left the loop, compare the lengths of the ranks' loaders (`holter explain uneven_batches`)."
        ),
    ),
)  # fmt: skip

SCRIPT_ERROR = CauseEntry(
    cause="script_error",
    happened="The training script itself raised an exception, or ended itself with an error.",
    mechanism=(
        "An exception that nobody catches ends the rank, and `sys.exit` with a code other than 0 does the same. The other ranks then lose their connections, "
        "or are ended by the launcher with SIGTERM: what they say points elsewhere, and follows from this."
    ),
    would_refute="Another rank ended before the named one, and neither by SIGTERM nor over a lost connection.",
    refuting_fact="has_earlier_death",
    is_refuted_by=True,
    is_death=True,
    keeps_severity=True,
    rows=(
        Row("dead_rank", 0.93, "observation", seen=("is_own_error",)),
    ),
    fix=Fix(
        do="Mend the line of the script that the evidence names first, or what it is given: the exception's own sentence says what was wrong with it.",
        changes="What the script does at that line.",
        does_not_fix="The messages of the other ranks: they follow from this one, and need no mending.",
        expect="The run passes this step on all ranks.",
        verify="Run it to one step beyond this one.",
        otherwise="If the line is sound, print shapes, dtypes, devices and names of what it is given just before it, on the named rank and on another one.",
    ),
)  # fmt: skip

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
    is_death=True,
    rows=(
        Row("collective_mismatch", 0.45, "inference", seen=("is_dead",), absent=("is_seen_on_both_sides",), missing=_NO_OTHER_SIDE),
        Row("dead_rank", 0.95, "observation", seen=("is_signal",), unless=("is_terminated",)),
        Row("dead_rank", 0.90, "observation", seen=("is_terminated",)),
        Row("dead_rank", 0.93, "observation", seen=("is_exception",), unless=("is_connection_lost", *_BETTER_KNOWN)),
        Row("dead_rank", 0.93, "observation", seen=("is_status_known",), absent=("is_signal", "is_exception"), unless=_BETTER_KNOWN),
        Row("dead_rank", 0.85, "observation", seen=("is_order_clear",), absent=("is_status_known",)),
        Row("dead_rank", 0.60, "inference", absent=("is_status_known",), unless=("is_order_clear",), missing="exit codes: all ranks ended at once without last words, so the job may have been stopped from outside"),
        Row("dead_rank", 0.55, "inference", unless=("is_timed_out", *_BETTER_KNOWN), missing="the end of the peer that closed the connection: no rank was seen to die before this one complained"),
    ),
    fix=Fix(
        do=(
            "Read the named rank's own log around its last line, and no other rank's. SIGKILL: ask the kernel (`dmesg -T | grep -i kill`) "
            "and the scheduler who sent it; most often memory ran out. SIGSEGV, SIGBUS, SIGABRT: native code, look for a core dump; "
            "if it says that Python was shutting down, the training is done: call `torch.distributed.destroy_process_group()` as the script's last line, so that the backend's threads are gone by then. "
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
)  # fmt: skip

COLLECTIVE_ORDER_MISMATCH = CauseEntry(
    cause="collective_order_mismatch",
    happened="Ranks call different operations at the same place in a group.",
    mechanism=(
        "Collectives have no names: the n-th call of one rank in a group meets the n-th call of the others. A branch on the rank, on its data or on "
        "the clock that adds, drops or swaps one call shifts everything after it. Then an all_reduce meets a broadcast: the ranks wait for ever, "
        "abort, or exchange each other's buffers and go on with wrong numbers."
    ),
    would_refute="The ranks' recorders show the same operation at that number of that group.",
    refuting_fact="is_order",
    is_refuted_by=False,
    damage=Damage("with the step", "suspect", "what calls that do not match returned may be in the weights"),
    is_hang=True,
    rows=(
        Row("collective_mismatch", 0.95, "observation", seen=("is_order", "is_seen_on_both_sides", "is_culprit_clear")),
        Row("collective_mismatch", 0.93, "observation", seen=("is_order", "is_seen_on_both_sides")),
        Row("collective_mismatch", 0.40, "inference", seen=("is_perhaps_order",), missing=_NO_LATER_CALL),
        Row("collective_mismatch", 0.60, "inference", seen=("is_order",), missing=_NO_OTHER_SIDE),
        Row("collective_mismatch", 0.50, "inference", absent=("is_kind_known",), missing=_NO_CALLS),
        Row("collective_mismatch", 0.10, "inference", missing=_NO_CALLS),
        Row("stalled_rank", 0.40, "inference", seen=("is_perhaps_order",), unless=_HELD[:3], missing=_NO_NEXT_CALL),
    ),
    fix=Fix(
        do=(
            "Find the two calls in the evidence in the script, and the condition by which the named rank takes another branch: "
            "`grep -nE 'all_reduce|all_gather|broadcast|barrier|gather_for_metrics|if .*(rank|is_main_process)' train.py`. Move every collective out of branches "
            "that not all ranks take, call them in the same order everywhere, and give independent streams of calls groups of their own "
            "(`dist.new_group`). Then resume from the last checkpoint before the step named here."
        ),
        changes="Which calls a rank makes, not what they compute: sound steps stay as they were.",
        does_not_fix="Weights of steps in which mismatched calls did go through: they hold another call's data, so go back to before them.",
        expect="All ranks pass the named number of the named group with the same operation.",
        verify=(
            "Run the job again with `TORCH_FR_BUFFER_SIZE=20000`: `holter report` of it stays empty, and its step time no longer ends in a wait at this place."
        ),
        otherwise=(
            "If the script has no such branch, look at what it calls: evaluation, logging and checkpoint code that runs on rank 0 only, a library's "
            "retry after an exception, hooks that DDP or FSDP fire in the order in which gradients become ready (a model whose graph differs between ranks)."
        ),
    ),
)  # fmt: skip

COLLECTIVE_SHAPE_MISMATCH = CauseEntry(
    cause="collective_shape_mismatch",
    happened="Ranks call the same operation with tensors of different sizes.",
    mechanism=(
        "An operation such as all_reduce needs the same number of elements on every rank and does not check it. gloo aborts one process, whose peers then "
        "report a closed connection; NCCL hangs, or reads and writes past a buffer's end. Sizes differ where they come from data (a short last batch, "
        "sequence lengths, the number of unmasked tokens) or from a model that is not the same on all ranks."
    ),
    would_refute="The ranks' recorders show the same sizes at that number of that group.",
    refuting_fact="is_shape",
    is_refuted_by=False,
    damage=Damage("with the step", "suspect", "what calls that do not match returned may be in the weights"),
    rows=(
        Row("collective_mismatch", 0.95, "observation", seen=("is_shape", "is_seen_on_both_sides", "is_culprit_clear")),
        Row("collective_mismatch", 0.93, "observation", seen=("is_shape", "is_seen_on_both_sides")),
        Row("collective_mismatch", 0.60, "inference", seen=("is_shape",), missing=_NO_OTHER_SIDE),
        Row("collective_mismatch", 0.45, "inference", absent=("is_kind_known",), missing=_NO_CALLS),
    ),
    fix=Fix(
        do=(
            "Print the shape right before the call named here, on every rank: `print(dist.get_rank(), tensor.shape, flush=True)`. Make it equal: pad to the largest "
            "(`accelerator.pad_across_processes`, or `dist.all_reduce` of the size with `ReduceOp.MAX` first), drop the short batch (`drop_last=True`), or reduce sums and "
            "counts instead of the samples themselves. Where sizes are meant to differ use an operation that takes them: `dist.all_to_all` with split sizes, "
            "`dist.all_gather_object`. Then resume from the last checkpoint."
        ),
        changes="The tensor that is handed to this call, on the ranks where it was of another size.",
        does_not_fix="Data that differs between ranks for a reason of its own: a loader that gives one rank less still does.",
        expect="The job passes the step named here, and later ones with short batches as well.",
        verify="Both sizes of the evidence are one size in the next run's print-out; `holter report` of it stays empty.",
        otherwise=(
            "If the call comes from DDP or FSDP and not from the script, the models differ: compare `sum(p.numel() for p in model.parameters() if p.requires_grad)` and "
            "`[n for n, p in model.named_parameters() if p.requires_grad]` on all ranks."
        ),
    ),
)  # fmt: skip

COLLECTIVE_DTYPE_MISMATCH = CauseEntry(
    cause="collective_dtype_mismatch",
    happened="Ranks call the same operation with tensors of different dtypes.",
    mechanism=(
        "A collective moves bytes. If one rank hands in float32 and another int32 or bfloat16, widths that agree raise no error at all: one side's bits are read as the "
        "other's type, and the sum is garbage on every rank. Widths that differ abort or hang. It comes from a value that is a Python int on one rank and a "
        "float on another (`torch.tensor(0)` against `torch.tensor(0.5)`), from autocast on some ranks only, or from a model loaded in another precision."
    ),
    would_refute="The ranks' recorders show the same dtypes at that number of that group.",
    refuting_fact="is_dtype",
    is_refuted_by=False,
    damage=Damage("with the step", "suspect", "what calls that do not match returned may be in the weights"),
    rows=(
        Row("collective_mismatch", 0.95, "observation", seen=("is_dtype", "is_seen_on_both_sides", "is_culprit_clear")),
        Row("collective_mismatch", 0.93, "observation", seen=("is_dtype", "is_seen_on_both_sides")),
        Row("collective_mismatch", 0.60, "inference", seen=("is_dtype",), missing=_NO_OTHER_SIDE),
        Row("collective_mismatch", 0.40, "inference", absent=("is_kind_known",), missing=_NO_CALLS),
    ),
    fix=Fix(
        do=(
            "Stop the run: what this call returned is wrong on all ranks. Print the dtype right before the call named here, on every rank "
            "(`print(dist.get_rank(), tensor.dtype, flush=True)`), and write it out where the tensor is made: `torch.tensor(value, dtype=torch.float32)`, "
            "`loss.detach().float()`. Then resume from a checkpoint of before the step named here."
        ),
        changes="The values that this call returns, on every rank.",
        does_not_fix="What was computed from them: a metric is merely wrong in the log; a gradient, a loss or a count that divides has spoilt the weights.",
        expect="The result of the call is what a sum or mean of the ranks' own values is.",
        verify="Both dtypes of the evidence are one in the next run's print-out; compare the call's result with the ranks' values added by hand, once.",
        otherwise=(
            "If the call comes from DDP or FSDP, parameters or gradients differ in dtype between ranks: compare `{p.dtype for p in model.parameters()}` on all ranks, "
            "and whether all of them run under the same autocast."
        ),
    ),
)  # fmt: skip

FAMILY = Family(
    detectors=(
        DetectorEntry(CollectiveMismatch(), Stage.REDUCTION),
        DetectorEntry(StalledRank(), Stage.STANDSTILL, incident_per="event"),
        DetectorEntry(DeadRank(), Stage.STANDSTILL, incident_per="run", sees_ends=True),
    ),
    causes=(
        RANK_SUSPENDED, HOST_UNREACHABLE, INTERPRETER_LOCKED, STALLED_DATA_LOADER, STALLED_CHECKPOINT, RANK_STUCK_IN_PYTHON,
        RANK_MISSING_FROM_COLLECTIVE, SCRIPT_ERROR, RANK_DEAD, COLLECTIVE_ORDER_MISMATCH, COLLECTIVE_SHAPE_MISMATCH, COLLECTIVE_DTYPE_MISMATCH,
    ),
    brings_about=(
        # Calls that do not match return garbage, on all ranks or on some; or ranks wait for each other until one gives up.
        Consequence("collective_mismatch", ("replica_divergence", "buffer_divergence"), ("curves",)),
        Consequence("collective_mismatch", ("stalled_rank",), unless_follower_is=NOT_BY_A_SCRIPT, whenever=True),
        Consequence("collective_mismatch", ("dead_rank",), unless_follower_has=NOT_BY_A_NUMBER, whenever=True),
        # Timeouts and people end a job that hangs, whichever of its ranks falls first; running out of memory is a cause of its own.
        Consequence("stalled_rank", ("dead_rank",), unless_leader_has=("has_died",), unless_follower_has=("is_out_of_memory",), whenever=True),
        # Survivors wait for the dead rank.
        Consequence("dead_rank", ("stalled_rank",), unless_leader_has=("is_timed_out",), unless_follower_is=NOT_BY_A_SCRIPT, whenever=True),
        # Without one rank, nothing that the others do is sound.
        Consequence("dead_rank", ("nonfinite_values", "replica_divergence", "buffer_divergence", "batch_lengths"), ("weights", "curves")),
        # Peers of a rank that hangs or dies come late to their later collectives; being late breaks nothing itself.
        Consequence("stalled_rank", ("slow_rank",)),
        Consequence("dead_rank", ("slow_rank",)),
    ),
)  # fmt: skip
