"""Hangs and dead ranks."""

from holter.faults.cause import CauseEntry
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
    fix=Fix(
        do=(
            "Compare the named rank's last collectives with a waiting rank's, both in the evidence: the first line that differs is the call that was "
            "left out or put in. Find the branch around it, and let all ranks decide alike: compute the condition on one rank and broadcast it, or "
            "all-reduce it (`torch.distributed.all_reduce(flag, op=ReduceOp.MAX)`) before branching. Keep collectives out of `if rank == ...` and `except`. "
            "The hung job cannot go on: end it, and resume from the last good checkpoint."
        ),
        changes="One small collective where the decision is made; nothing in the numbers of a run that did not hang.",
        does_not_fix="What made this rank's data or state differ in the first place, if it should have been equal.",
        expect="The resumed run passes this step, and all ranks call the same at every sequence number.",
        verify="`holter status` shows every rank past this step, and this incident is not opened again.",
        otherwise=(
            "If the rank's stack shows that it never reached the branch, it was held up before: look at its process state and at what it waited for. "
            "If it has left the loop, compare the lengths of the ranks' loaders (`holter explain uneven_batches`)."
        ),
    ),
)

RANK_STUCK_IN_PYTHON = CauseEntry(
    cause="rank_stuck_in_python",
    happened="A rank loops, sleeps or waits for a lock in its own code.",
    mechanism=(
        "The rank's main thread is in the script's own functions and does not come back: a loop whose condition never turns false, a sleep or a retry "
        "without an end, a lock, a queue or an event that nobody gives. It calls nothing of torch's, so no timeout of torch's ends it. Its peers wait in "
        "the next collective."
    ),
    would_refute="The named rank itself waits in a collective.",
    refuting_fact="is_elsewhere",
    is_refuted_by=True,
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
)

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
    fix=Fix(
        do=(
            "The native frame in the evidence names the function. In code of your own: release the lock around it (`Py_BEGIN_ALLOW_THREADS`, "
            "`py::call_guard<py::gil_scoped_release>()`, ctypes.CDLL instead of PyDLL). In a library: update it, or call it in another process. Take "
            "`py-spy dump --native --pid PID` once more: another frame means slow work, the same frame a wait. End the job with SIGKILL (Python's handlers "
            "cannot run) and resume from the last good checkpoint."
        ),
        changes="Other threads may run while the native code does: it must not touch Python objects meanwhile.",
        does_not_fix="Native code that takes as long without the lock: its peers will wait all the same.",
        expect="The interpreter answers while the native function runs, and the rank comes to its collectives.",
        verify="`py-spy dump --pid PID` during that call shows no thread with `+gil` in native code for seconds.",
        otherwise="If the frame is a lock (`pthread_mutex_lock`, `PyGILState_Ensure`), look at the other threads' stacks for who holds it.",
    ),
)

RANK_SUSPENDED = CauseEntry(
    cause="rank_suspended",
    happened="A rank's process is held: stopped by a signal, a debugger or the freezer, or in a system call that nothing ends.",
    mechanism=(
        "The kernel does not let the process run. SIGSTOP or SIGTSTP came from a shell, a scheduler or a script; a debugger is attached; a container was "
        "paused; or a storage, a device or its driver does not answer and the process sleeps uninterruptibly. Its peers wait in their next collective."
    ),
    would_refute="The kernel shows the process running or in ordinary sleep.",
    refuting_fact="is_process_normal",
    is_refuted_by=True,
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
)

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
    fix=Fix(
        do=(
            "Ask for the host from outside: `ping HOST`, `ssh HOST uptime`, its management console, the scheduler's view of the node. Alive: look at "
            "`ip -s link` and `dmesg -T` for a link that went down. Dead: take the node out, end the job, and resume from the last good checkpoint without it."
        ),
        changes="Which hosts the job runs on.",
        does_not_fix="A switch or cable that also serves the next host.",
        expect="All ranks of the resumed job report within a minute.",
        verify="`holter status` shows every rank connected and past this step.",
        otherwise="If only holter's line is dead and the ranks still exchange data, the job would not wait: look at the waiting ranks' collective for another culprit.",
    ),
)

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
)

STALLED_CHECKPOINT = CauseEntry(
    cause="stalled_checkpoint",
    happened="A rank does not come back from a save, and its peers wait for it.",
    mechanism=(
        "Writing takes no end: the file system or the object store does not answer, a quota or a lock holds the writer, or the save itself needs a collective "
        "that not all ranks enter (a sharded state dict that is saved under `if rank == 0`). The peers wait in the next collective."
    ),
    would_refute="Neither the rank's phase nor its stack shows a save.",
    refuting_fact="is_in_checkpoint",
    is_refuted_by=False,
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
)

CAUSES: tuple[CauseEntry, ...] = (
    RANK_MISSING_FROM_COLLECTIVE,
    RANK_STUCK_IN_PYTHON,
    INTERPRETER_LOCKED,
    RANK_SUSPENDED,
    HOST_UNREACHABLE,
    STALLED_DATA_LOADER,
    STALLED_CHECKPOINT,
    RANK_DEAD,
)
