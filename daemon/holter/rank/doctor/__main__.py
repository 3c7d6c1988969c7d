"""`python -m holter.rank.doctor NAME…` runs these checks in turn, and prints a line of JSON for each event.

It stops after a check that failed: a device error persists in its process, so the checks after it are run in another one.
"""

import importlib
import os
import sys
import traceback
import warnings
from typing import IO, Any

import msgspec

from holter import clock
from holter.rank.doctor.outcome import CheckOutcome, Finished, failed, skipped
from holter.rank.doctor.plan import PlannedCheck, find

NUM_FRAMES = 12


def main(names: list[str]) -> None:
    """Print which devices there are, then run the checks."""
    # What libraries print goes to standard error, so that standard output has only our lines.
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    from holter.rank.doctor import environment  # noqa: PLC0415 - brings torch

    devices = environment.devices()
    tell(out, {"devices": devices.names, "why_none": devices.why_none, "torch": devices.torch})
    if not devices.names:
        return
    for name in names:
        tell(out, {"began": name})
        finished = run(find(name), len(devices.names), lambda text: tell(out, {"progress": text}))
        tell(out, finished)
        if finished.outcome == "failed":
            break
    # Exit without waiting for threads of a hung device or of a library.
    out.flush()
    os._exit(0)


def run(check: PlannedCheck, num_devices: int, say: Any) -> Finished:
    """Run one check; anything that it raises counts as its failure."""
    began_s = clock.monotonic_s()
    if num_devices < check.num_devices:
        outcome = skipped(f"needs {check.num_devices} GPUs, this machine has {num_devices}")
    else:
        outcome = _call(check, say)
    return Finished(
        check=check.name,
        outcome=outcome.outcome,
        says=outcome.says,
        seconds=clock.monotonic_s() - began_s,
        numbers=outcome.numbers,
        details=outcome.details,
    )


def _call(check: PlannedCheck, say: Any) -> CheckOutcome:
    module, _, function = check.where.partition(":")
    try:
        outcome: CheckOutcome = getattr(importlib.import_module(f"holter.rank.doctor.{module}"), function)(say)
    except Exception as error:  # noqa: BLE001 - the report is made of failures
        lines = traceback.format_exc(limit=-NUM_FRAMES).splitlines()
        first = next(iter(str(error).strip().splitlines()), "")
        return failed(f"{type(error).__name__}: {first}", details=lines)
    return outcome


def tell(out: IO[str], what: object) -> None:
    """Print one line of JSON."""
    out.write(msgspec.json.encode(what).decode() + "\n")
    out.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
