"""Records as a run would leave them, for tests that need one and care for little of it."""

from dataclasses import fields, replace
from typing import Any

from holter.faults.window import Window
from holter.halting.halt_record import HaltRecord
from holter.records import Cause, Diagnosis, Directive, Fix

FIX = Fix(do="", changes="", does_not_fix="", expect="", verify="", otherwise="")
HALT = HaltRecord(
    cause="nonfinite_input",
    ranks=[1],
    step=30,
    checkpoint="checkpoints/30/state",
    verdict="healthy",
    at="2026-11-16T10:00:00Z",
    framework="accelerate",
)


def diagnosis(cause: str = "nonfinite_input", first_step: int = 30, **fields: Any) -> Diagnosis:
    found = Cause(
        cause=cause,
        confidence=0.9,
        basis="observation",
        ranks=(1,),
        tensors=(),
        modules=(),
        mechanism="",
        evidence=(),
        would_refute="",
        fix=FIX,
    )
    usual = {
        "id": "i-1",
        "run_id": "r",
        "severity": "critical",
        "symptom": "NaN",
        "first_step": first_step,
        "detected_step": first_step,
        "detected_after_s": 0.1,
        "opened_at": "",
        "causes": (found,),
        "action": Directive(directive="halt", reason="critical: halt"),
    }
    return Diagnosis(**{**usual, **fields})


def made_window(
    now_ns: int = 0, world_size: int = 2, attached: frozenset[int] = frozenset({0, 1}), **known: Any
) -> Window:
    """A window of two ranks unless told otherwise; a part of a part is given by its own name: `exits=…`, `census=…`."""
    return changed_window(Window(now_ns, world_size, attached), **known)


def changed_window(window: Window, **known: Any) -> Window:
    """This window with other contents, each given by its own name, whichever part it lies in."""
    for name in ("tensors", "models", "processes", "calls"):
        part = getattr(window, name)
        own = {one.name: known.pop(one.name) for one in fields(part) if one.name in known}
        window = replace(window, **{name: replace(part, **own)})
    return replace(window, **known)
