"""Checks with two ranks on two devices, under NCCL: what goes wrong between them is named, and the state is saved."""

import torch

from holter.rank.doctor import jobs
from holter.rank.doctor.outcome import CheckOutcome, Number, Say, judged, skipped

NUM_RANKS = 2
FAULTY_RANK = 1
AT = 5
MANY_STEPS = 100_000
JOB_S = 150.0


def names_skipped(say: Say) -> CheckOutcome:
    """Check that, if rank 1 leaves out one all_reduce, the diagnosis names the cause and the rank."""
    return _named(
        say, "skip", {"rank_missing_from_collective", "collective_order_mismatch"}, "an all_reduce that rank 1 left out"
    )


def names_killed(say: Say) -> CheckOutcome:
    """Check that, if rank 1 is killed, the diagnosis names the cause and the rank."""
    return _named(say, "kill", {"rank_dead"}, "the death of rank 1 by SIGKILL")


def _named(say: Say, fault: str, causes: set[str], what: str) -> CheckOutcome:
    say("a job of two ranks")
    arguments = ["--fault", fault, "--at", str(AT), "--steps", str(MANY_STEPS)]
    with jobs.directory() as at:
        job = jobs.run(
            at, arguments, num_ranks=NUM_RANKS, deadline_s=JOB_S, action="notify", is_enough=lambda seen: seen.diagnoses
        )
        return judge_named(job, causes, what)


def judge_named(job: jobs.EndedJob, causes: set[str], what: str) -> CheckOutcome:
    """Return ok if a diagnosis puts one of these causes first, for the right rank."""
    named = sorted(job.named())
    texts = [f"{cause} on rank {rank}" for cause, rank in named]
    numbers: dict[str, Number] = {"diagnoses": len(job.diagnoses), "named": ", ".join(texts)}
    if any(cause in causes and rank == FAULTY_RANK for cause, rank in named):
        return judged([], f"{what}: named as {', '.join(texts)}", numbers)
    other = f"named as {', '.join(texts)}" if texts else f"nothing was named within {JOB_S:.0f} s"
    return judged([f"{what}: {other}"], "", numbers, job.said)


def rescues(say: Say) -> CheckOutcome:
    """Check that the state is saved although rank 1 stops calling collectives, so that rank 0's stream hangs."""
    say("a job of two ranks, halted")
    with jobs.directory() as at:
        arguments = ["--fault", "stop", "--at", str(AT), "--steps", str(MANY_STEPS)]
        job = jobs.run(
            at, arguments, num_ranks=NUM_RANKS, deadline_s=JOB_S, action="halt", is_enough=lambda seen: seen.halt
        )
        return judge_rescue(job)


def judge_rescue(job: jobs.EndedJob) -> CheckOutcome:
    """Return ok if a healthy checkpoint was kept."""
    halt = job.halt
    numbers: dict[str, Number] = {"step": halt.get("step"), "verdict": halt.get("verdict")}
    if not halt:
        return judged([f"nothing was saved within {JOB_S:.0f} s of a hang"], "", numbers, job.said)
    problems = []
    if halt["verdict"] != "healthy":
        problems = [f"what was saved while a stream hung is {halt['verdict']}: {halt.get('why', '')}"]
    return judged(
        problems, f"a healthy checkpoint of {halt['step']} steps, saved while a stream hung", numbers, job.said
    )


def shards(say: Say) -> CheckOutcome:
    """Check that `fully_shard` ends with the same weights bit for bit with holter as without, and that there is no alarm."""
    problems: list[str] = []
    saved = []
    with jobs.directory() as at:
        for action in ("", "notify"):
            say("with holter" if action else "without holter")
            path = at / f"weights-{action}.pt"
            arguments = ["--sharded", "--save", str(path), "--optimizer", "foreach"]
            job = jobs.run(at / f"job-{action}", arguments, num_ranks=NUM_RANKS, deadline_s=JOB_S / 2, action=action)
            if job.code != 0 or not path.exists():
                if not action:
                    why = next(iter(reversed(job.said)), f"exit code {job.code}")
                    return skipped(f"fully_shard does not run here without holter: {why}")
                return judged([f"the job ended with {job.code} under holter"], "", said=job.said)
            saved.append(torch.load(path, weights_only=True))
            problems += [f"a healthy job has an alarm: {cause} on rank {rank}" for cause, rank in sorted(job.named())]
    num_other = sum(not torch.equal(a, b) for a, b in zip(*saved, strict=True))
    if num_other:
        problems.insert(0, f"{num_other} of {len(saved[0])} tensors end with other bits under holter")
    return judged(problems, f"fully_shard on two ranks: {len(saved[0])} tensors end with the same bits, no alarm")
