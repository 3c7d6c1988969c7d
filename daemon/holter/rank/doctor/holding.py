"""Checks what is done about a bad step: a snapshot is put back, and a NaN does not reach the weights."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from holter.rank.doctor import jobs
from holter.rank.doctor.outcome import CheckOutcome, Number, Say, judged
from holter.rank.doctor.subjects import BusyStream, TrainingLoop, failures, small_loop, worn

EVERY = 2
NUM_STEPS = 5
BUSY_S = 0.5
NAN_STEP = 5
JOB_S = 200.0
MANY_STEPS = 100_000
"""So many steps that the job does not end before the host knows what the device has seen."""
EXIT_CODE = 93
OPTIMIZERS = ("fused", "foreach")
"""With fused, the device leaves the step out by itself; with foreach, the step waits for the device's answer."""


def restores(say: Say) -> CheckOutcome:
    """Check that weights and moments go back to an earlier step although the stream is busy and then writes to them."""
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
        problems.insert(
            0,
            f"{num_other} of {len(found)} tensors are not those of step {step} after the restore: queued work was applied after it",
        )
    says = f"{len(found)} tensors of step {step} restored bit for bit behind {BUSY_S} s of queued work"
    return judged(problems, says, {"tensors": len(found), "differ": num_other})


def holds_nan(say: Say) -> CheckOutcome:
    """Run jobs with a NaN in a batch; each must end with a halt before that step, and with a checkpoint of finite weights."""
    say("two jobs of one rank, side by side")
    with jobs.directory() as at, ThreadPoolExecutor(len(OPTIMIZERS)) as pool:
        ended = list(pool.map(lambda optimizer: _nan_job(at / optimizer, optimizer), OPTIMIZERS))
        problems = [
            f"{optimizer}: {problem}"
            for optimizer, job in zip(OPTIMIZERS, ended, strict=True)
            for problem in find_poison(job)
        ]
    numbers: dict[str, Number] = {"nan_step": NAN_STEP}
    numbers |= {f"{name}_halted_at": job.halt.get("step") for name, job in zip(OPTIMIZERS, ended, strict=True)}
    says = f"a NaN at step {NAN_STEP}: held before the weights, halted with a healthy checkpoint of {NAN_STEP} steps (fused, foreach)"
    return judged(problems, says, numbers, [line for job in ended for line in job.said])


def _nan_job(at: Path, optimizer: str) -> jobs.EndedJob:
    arguments = ["--fault", "nan", "--at", str(NAN_STEP), "--optimizer", optimizer, "--steps", str(MANY_STEPS)]
    return jobs.run(at, arguments, num_ranks=1, deadline_s=JOB_S, action="halt")


def find_poison(job: jobs.EndedJob) -> list[str]:
    """Return what is wrong with a job that should have been held before the NaN reached its weights; empty if all is well."""
    halt = job.halt
    if not halt:
        how = f"ended with exit code {job.code}" if job.code is not None else f"did not end within {JOB_S:.0f} s"
        return [f"no halt: the job {how}"]
    found = []
    if halt["step"] != NAN_STEP:
        found.append(f"halted after {halt['step']} steps, and the NaN was in step {NAN_STEP}")
    if halt["verdict"] != "healthy":
        found.append(f"what was saved is {halt['verdict']}: {halt.get('why', '')}")
    if job.code is not None and job.code != EXIT_CODE:
        found.append(f"exit code {job.code} and not {EXIT_CODE}")
    return found


def _state(loop: TrainingLoop) -> list[torch.Tensor]:
    moments = [value for state in loop.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return [tensor.detach().cpu().clone() for tensor in (*loop.model.parameters(), *moments)]
