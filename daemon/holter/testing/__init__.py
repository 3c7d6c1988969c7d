"""Faults to rehearse with: put one into a job on purpose, and see what the pager says.

    import holter.testing

    if step == 30 and rank == 1:
        holter.testing.spin()

| call | what the rank then does | what is to be diagnosed |
|---|---|---|
| `suspend(pid)` | is stopped by a signal, until `resume(pid)` | rank_suspended |
| `kill(pid)`, `abort()`, `leave(code)` | ends: SIGKILL, SIGABRT, `os._exit` | rank_dead |
| `spin()`, `sleep_for_ever()`, `wait_for_lock()` | loops, sleeps, waits in its own code | rank_stuck_in_python |
| `hold_interpreter_lock(seconds)` | is in native code that lets no other Python run | interpreter_locked |
| `skip_collective("all_reduce")` | leaves its next call out | rank_missing_from_collective |
| `stall_loader(loader)` | waits for a batch for ever | stalled_data_loader |
| `stall_save()` | waits in `torch.save` for ever | stalled_checkpoint |
| `slow_forward(model, s)`, `slow_backward(model, s)` | computes more slowly | slow_compute |
| `slow_data(loader, s)` | gets its batches late | slow_input |

Faults that nobody sees, because the job goes on:

| call | what happens | what is to be diagnosed |
|---|---|---|
| `flip_bit(weight)` | one bit of one element changes | silent_data_corruption |
| `perturb(tensors, scale)` | noise is added to weights, gradients, buffers | unsynced_initialisation before the first step; corrupted_collective for gradients once; frozen_component_mismatch, frozen_component_changed |
| `scale_gradients(parameters, factor)` | gradients are multiplied | uneven_clipping on one rank; gradient_scale_mismatch on all |
| `round_trip(tensors, dtype)` | values pass through a narrower dtype | precision_round_trip |
| `lose_updates(optimizer, tensors)` | steps change nothing of these | lost_update |
| `detach_output(module)` | no gradient goes back into the module | graph_detached |
| `spoil_output(module)`, `spoil_gradient(module)` | makes a NaN or Inf, forward or backward | nonfinite_forward, nonfinite_backward |
| `leave_autocast(module)` | computes in float32 in an autocast region | autocast_not_applied |

Those that change something of the job give an `Injection`: `undo()` it, or use it in a `with` statement. Everything here acts on the
process that calls it (or on the pid given), at once, for real. Importing it does nothing, and imports no torch.
"""

from holter.testing.faults import (
    Injection,
    abort,
    hold_interpreter_lock,
    kill,
    leave,
    resume,
    skip_collective,
    sleep_for_ever,
    slow_backward,
    slow_data,
    slow_forward,
    spin,
    stall_loader,
    stall_save,
    suspend,
    wait_for_lock,
)
from holter.testing.silent import (
    detach_output,
    flip_bit,
    leave_autocast,
    lose_updates,
    perturb,
    round_trip,
    scale_gradients,
    spoil_gradient,
    spoil_output,
)

__all__ = [
    "Injection",
    "abort",
    "detach_output",
    "flip_bit",
    "hold_interpreter_lock",
    "kill",
    "leave",
    "leave_autocast",
    "lose_updates",
    "perturb",
    "resume",
    "round_trip",
    "scale_gradients",
    "skip_collective",
    "sleep_for_ever",
    "slow_backward",
    "slow_data",
    "slow_forward",
    "spin",
    "spoil_gradient",
    "spoil_output",
    "stall_loader",
    "stall_save",
    "suspend",
    "wait_for_lock",
]
