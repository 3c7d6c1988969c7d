"""Missing gradients: parameters that are to be trained get no gradient, or one that is exactly zero, for many steps.

What it detects
    Trainable parameters that an optimizer holds and whose gradient is None, or exactly zero, for sixteen steps (eight, where it is
    proven that none can come), although their modules are called, or that had a gradient, have none any more, and belong to a module of
    which another parameter, or the output, still has one: because the modules ran without gradients being recorded, because their
    output leads nowhere, because an operation behind them gives back nothing but zeros of the gradient that it gets, or because a layer
    gives zero for all its inputs. And those of modules that no pass has called in thirty-two steps.

Why it matters
    That part of the model stays as it was initialised while the rest learns around it. The loss falls, only not as far as it should.

False positives
    Modules that no step calls are reported as information only: pretrained models bring poolers and heads along that a task does not
    call, experts wait for a token, and branches are left unused on purpose. Zero gradients while the learning rate is zero do not
    count; LoRA's A beside a B of zeros, and gates that begin at zero, are over after one step. A branch that is called and whose result
    the loss ignores, or weighs with zero, looks like a detached one: unless most of the model is concerned, that is information too.

What to do
    Look at the call of the modules named: `no_grad`, `detach`, reentrant checkpointing on an input that needs no gradient, a ReLU whose
    inputs are all negative (`holter explain graph_detached`, `dead_activations`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from holter.faults.shared.streaks import find_streak
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import names_text, ranks_text
from holter.faults.window import Note, Window
from holter.records import Evidence, Finding, Inspection, Vitals, Witness

LEAST_LIVE = 8
"""Number of steps with a gradient after which a gradient of exactly zero has stopped, rather than never begun."""


@dataclass(frozen=True)
class _Case:
    """Idle parameters, and what an inspection showed of their modules."""

    tensors: tuple[str, ...]
    modules: tuple[str, ...]
    """The parameters' modules that were called; for a dead layer, that layer first."""
    witnesses: tuple[Witness, ...]
    before: tuple[str, ...] = ()
    """Modules that were called before a cut, and get no gradient because of it."""
    is_dead: bool = False
    is_proven: bool = False
    """Whether gradients were not recorded there, or the output has no path for them."""
    is_most: bool = False
    is_uncalled: bool = False
    is_stopped: bool = False
    """Whether it had a gradient before, and its module's other parameters or output still have one."""
    lost_in: str = ""
    """The last module to which a gradient still comes; none passes beyond it."""


@dataclass(frozen=True)
class MissingGradients:
    """Judges parameters that stay without gradient while their modules are called."""

    name: ClassVar[str] = "missing_gradients"

    idle_steps: int = threshold(16, at_least=2)  # LoRA's A has no gradient at the first step.
    """Number of steps in a row for which a parameter had no gradient."""
    proven_steps: int = 8
    """The same, if an inspection proves that none can come."""
    num_vitals: int = 2
    """Number of reports in a row that must show it."""
    min_live_steps: int = 8
    """Number of the idle steps that must have had a learning rate above zero."""
    uncalled_steps: int = 32
    """Number of idle steps, if the module was not even called."""
    most: float = 0.5
    """Share of the trainable parameters from which on a called branch without gradient is no side branch."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: what is proven, before what is only likely."""
        streak = find_streak(window, Vitals, _has_idle, at_least=self.num_vitals)
        if streak is None:
            return
        said = [(note, vitals) for note, vitals in window.notes_of(Vitals) if note.rank in streak.ranks]
        latest = next((one for one in reversed(said) if _has_idle(one[1], self.proven_steps)), None)
        inspection = _inspection(window, streak.ranks)
        if latest is None or inspection is None or not self._is_learning(window, *latest):
            return
        case = self._case(latest[1], inspection) or _stopped(window, *latest, inspection)
        if case and (case.is_proven or latest[1].idle_steps >= self.idle_steps):
            yield _finding(streak.ranks, latest, inspection, case)

    def _is_learning(self, window: Window, note: Note, vitals: Vitals) -> bool:
        first = note.step - vitals.idle_steps
        rates = [spread.high for step, spread in window.values("learning_rate") if first < step <= note.step]
        return not rates or sum(rate > 0 for rate in rates) >= min(self.min_live_steps, len(rates))

    def _case(self, vitals: Vitals, inspection: Inspection) -> _Case | None:
        called = {witness.module: witness for witness in inspection.witnesses if witness.num_calls}
        idle = _owned((*vitals.no_gradient.names, *vitals.zero_gradient.names), called)
        cut = {module: names for module, names in idle.items() if _is_cut(called[module])}
        if cut:
            return _with_feeding(_case_of(cut, called, is_proven=True), idle, called)
        zeros = _owned(vitals.zero_gradient.names, called)
        dead = [witness for witness in called.values() if witness.output_zeros == 1.0 or witness.input_zeros == 1.0]
        if case := _dead_case(zeros, dead, called):
            return case
        lost_in = next((called[module].lost_in for module in zeros if called[module].lost_in), "")
        if lost_in:
            behind = {module: names for module, names in zeros.items() if called[module].has_gradient is False}
            return replace(_case_of(behind, called, is_proven=True), lost_in=lost_in)
        # An exact zero without a dead layer is often a loss term with weight zero.
        astray = _owned(vitals.no_gradient.names, called)
        if not astray:
            return self._uncalled(vitals, inspection)
        share_called = sum(map(len, astray.values())) / len(vitals.no_gradient.names)
        num_idle = share_called * vitals.no_gradient.count
        return _case_of(astray, called, is_most=num_idle >= self.most * max(vitals.num_trainable, 1))

    def _uncalled(self, vitals: Vitals, inspection: Inspection) -> _Case | None:
        """Return the parameters of modules that no pass calls."""
        uncalled = set(inspection.uncalled.names)
        names = [name for name in vitals.no_gradient.names if name.rpartition(".")[0] in uncalled]
        if not names or vitals.idle_steps < self.uncalled_steps:
            return None
        modules = tuple(dict.fromkeys(name.rpartition(".")[0] for name in names))
        return _Case(tensors=tuple(names), modules=modules, witnesses=(), is_uncalled=True)


def _has_idle(vitals: Vitals, steps: int = 2) -> bool:
    return vitals.idle_steps >= steps and bool(vitals.no_gradient.count or vitals.zero_gradient.count)


def _stopped(window: Window, note: Note, vitals: Vitals, inspection: Inspection) -> _Case | None:
    """Return tensors whose gradient became exactly zero during the run, while their module's others, or its output, have one.

    A loss term with weight zero, or a layer that is given zeros, takes the gradients of all; a hook or a mask takes some.
    """
    census = window.models.census.get(note.rank)
    if census is None or note.step - vitals.idle_steps < LEAST_LIVE:
        return None
    called = {witness.module: witness for witness in inspection.witnesses if witness.num_calls}
    idle = {*vitals.no_gradient.names, *vitals.zero_gradient.names}
    live = {
        entry.name.rpartition(".")[0]
        for entry in census.entries
        if entry.requires_grad and not entry.is_buffer and entry.optimizer >= 0 and entry.name not in idle
    }
    if vitals.no_gradient.count + vitals.zero_gradient.count > len(idle):
        # Not all idle tensors are named, so one that looks live may be idle.
        return None
    zeros = _owned(vitals.zero_gradient.names, called)
    found = {
        module: names
        for module, names in zeros.items()
        if (module in live or called[module].has_gradient) and called[module].input_zeros != 1.0 and module
    }
    return replace(_case_of(found, called), is_stopped=True) if found else None


def _owned(names: tuple[str, ...] | list[str], called: Mapping[str, Witness]) -> dict[str, list[str]]:
    """Return, by module, those of these parameters whose modules were themselves called."""
    found: dict[str, list[str]] = {}
    for name in names:
        if (module := name.rpartition(".")[0]) in called:
            found.setdefault(module, []).append(name)
    return found


def _is_cut(witness: Witness) -> bool:
    return not witness.was_gradient_on or not witness.has_gradient_path


def _case_of(
    idle: Mapping[str, list[str]], called: Mapping[str, Witness], *, is_proven: bool = False, is_most: bool = False
) -> _Case:
    return _Case(
        tensors=tuple(name for names in idle.values() for name in names),
        modules=tuple(idle),
        witnesses=tuple(called[module] for module in idle),
        is_proven=is_proven,
        is_most=is_most,
    )


def _with_feeding(case: _Case, idle: Mapping[str, list[str]], called: Mapping[str, Witness]) -> _Case:
    """Add what was called before the last cut and is idle too: no gradient reaches it either."""
    order = list(called)
    last = max(order.index(module) for module in case.modules)
    before = tuple(module for module in order[:last] if module in idle and module not in case.modules)
    return replace(case, tensors=(*case.tensors, *(name for module in before for name in idle[module])), before=before)


def _dead_case(zeros: Mapping[str, list[str]], dead: list[Witness], called: Mapping[str, Witness]) -> _Case | None:
    """Return the layer that gives zeros, and what feeds it.

    If an activation without a module gives them, it is the layer that is given the zeros.
    """
    if not zeros or not dead:
        return None
    layer = next((witness for witness in dead if witness.output_zeros == 1.0), dead[0])
    own = [module for module, witness in called.items() if witness.has_parameters or witness is layer]
    place = own.index(layer.module)
    given_zeros = {witness.module for witness in dead if witness.input_zeros == 1.0}
    # Zeros elsewhere in the model explain nothing here.
    if not {*own[max(0, place - 1) : place + 2], *given_zeros} & set(zeros):
        return None
    # A layer that is given zeros has a gradient in its bias; one that feeds the dead layer has none at all.
    feeding = [module for module in zeros if module != layer.module and module not in given_zeros]
    return _Case(
        tensors=tuple(name for names in zeros.values() for name in names),
        modules=(layer.module, *feeding[-1:]),
        witnesses=(layer,),
        is_dead=True,
        is_proven=layer.output_zeros == 1.0,
    )


def _inspection(window: Window, ranks: tuple[int, ...]) -> Inspection | None:
    """Return the newest inspection made because parameters were idle, of a rank that shows it if there is one."""
    asked = [(note, found) for note, found in window.notes_of(Inspection) if found.reason == "idle"]
    own = [found for note, found in asked if note.rank in ranks]
    return own[-1] if own else asked[-1][1] if asked else None


def _finding(ranks: tuple[int, ...], latest: tuple[Note, Vitals], inspection: Inspection, case: _Case) -> Finding:
    note, vitals = latest
    first_step = max(0, note.step - vitals.idle_steps + 1)
    is_witnessed = not case.is_dead and not case.is_uncalled
    what = "a gradient of exactly zero" if case.is_dead or case.is_stopped or case.lost_in else "no gradient"
    where = names_text(case.modules) + (f" and, before it, {names_text(case.before)}" if case.before else "")
    summary = f"{len(case.tensors)} trainable parameters ({where}) have had {what} since step {first_step}"
    if case.is_dead:
        summary = f"{case.modules[0]} gives zero for all inputs: {len(case.tensors)} parameters have had {what} since step {first_step}"
    return Finding(
        detector=MissingGradients.name,
        severity="warning" if case.is_proven or case.is_dead or case.is_most or case.is_stopped else "info",
        first_step=first_step,
        detected_step=note.step,
        ranks=ranks,
        tensors=case.tensors,
        modules=case.modules,
        summary=f"{summary}{', because no pass calls their modules' if case.is_uncalled else ', although their modules are called'}.",
        facts={
            "is_gradient_off": any(not w.was_gradient_on for w in case.witnesses) if is_witnessed else None,
            "has_gradient_path": all(w.has_gradient_path for w in case.witnesses) if is_witnessed else None,
            "is_most_of_the_model": case.is_most or None,
            "has_zero_layer": case.is_dead,
            "is_zero_layer_seen": case.is_proven if case.is_dead else None,
            "is_called": not case.is_uncalled,
            "is_stopped": case.is_stopped,
            "is_lost_on_the_way": bool(case.lost_in),
        },
        evidence=(*_gradient_evidence(ranks, latest), *_witness_evidence(inspection, case)),
    )


def _gradient_evidence(ranks: tuple[int, ...], latest: tuple[Note, Vitals]) -> Iterator[Evidence]:
    note, vitals = latest
    for words, named in (
        ("no gradient at all", vitals.no_gradient),
        ("gradients of exactly zero", vitals.zero_gradient),
    ):
        if named.count:
            yield Evidence(
                kind="gradient",
                summary=f"{ranks_text(ranks)}: {named.count} of {vitals.num_trainable} trainable parameters had {words} for {vitals.idle_steps} steps up to step {note.step}: {names_text(named.names, named.count)}",
                values={"count": named.count, "num_trainable": vitals.num_trainable, "idle_steps": vitals.idle_steps},
            )


def _witness_evidence(inspection: Inspection, case: _Case) -> Iterator[Evidence]:
    for witness in case.witnesses[:4]:
        if case.is_dead:
            text = f"was given {witness.input_zeros:.0%} zeros and gave {witness.output_zeros:.0%}"
        elif case.lost_in:
            text = f"got nothing but zeros back, although a gradient that is not zero came back to {case.lost_in}, which its result goes into"
        elif not witness.was_gradient_on:
            text = "ran while gradients were not recorded"
        elif not witness.has_gradient_path:
            text = "gave an output that requires no gradient"
        else:
            text = "gave an output that requires a gradient, and none came back"
            if case.is_stopped:
                whose = "that output has one" if witness.has_gradient else "another of its parameters has one"
                text = f"gave an output that requires a gradient; {whose} still"
        yield Evidence(
            kind="inspection",
            summary=f"{witness.module} ({witness.module_class}) was called {witness.num_calls} times in the pass that was inspected and {text}",
            values={"module": witness.module, "num_calls": witness.num_calls},
        )
    yield Evidence(
        kind="inspection",
        summary=f"that pass called {inspection.num_modules - inspection.uncalled.count} of {inspection.num_modules} modules; {f'not {names_text(case.modules)}' if case.is_uncalled else 'those that it did not call are not counted'}",
        values={"num_modules": inspection.num_modules, "num_uncalled": inspection.uncalled.count},
    )
