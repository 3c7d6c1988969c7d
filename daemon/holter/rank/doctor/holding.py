"""What is done about a bad step: a snapshot is put back, and a NaN does not reach the weights."""

import torch

from holter.rank.doctor.outcome import Outcome, Say, judged
from holter.rank.doctor.subjects import BusyStream, TrainingLoop, failures, small_loop, worn

EVERY = 2
NUM_STEPS = 5
BUSY_S = 0.5


def restores(say: Say) -> Outcome:
    """Weights and moments go back to a step of before, although the stream is busy and then writes to them."""
    loop = small_loop()
    loop.step()
    kept: dict[int, list[torch.Tensor]] = {}
    with worn(snapshot_every=EVERY) as monitor:
        for number in range(NUM_STEPS):
            kept[number] = _state(loop)
            loop.step()
        torch.cuda.synchronize()
        snapshots = monitor.context.undo.snapshots
        assert snapshots is not None
        step = max(number for number in kept if number % EVERY == 0)
        say("with work queued")
        BusyStream(BUSY_S)
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.add_(1.0)
        snapshots.restore(step)
        torch.cuda.synchronize()
        problems = failures(monitor)
    found = _state(loop)
    num_other = sum(not torch.equal(a, b) for a, b in zip(kept[step], found, strict=True))
    if num_other:
        problems.insert(0, f"{num_other} of {len(found)} tensors are not those of step {step} after the restore: queued work was applied after it")
    says = f"{len(found)} tensors of step {step} restored bit for bit behind {BUSY_S} s of queued work"
    return judged(problems, says, {"tensors": len(found), "differ": num_other})


def _state(loop: TrainingLoop) -> list[torch.Tensor]:
    moments = [value for state in loop.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return [tensor.detach().cpu().clone() for tensor in (*loop.model.parameters(), *moments)]
