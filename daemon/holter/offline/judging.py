"""Judges what was read: series become a window for the live detectors, artifacts are judged besides, and findings with one cause make one diagnosis."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from holter.clock import compact, rfc3339
from holter.diagnosis.correlate import brings_about, moment
from holter.diagnosis.explain import WORST_FIRST, explain
from holter.diagnosis.plots import heat_map, plots, shares
from holter.faults import ALL, DETECTORS, Detector, Window
from holter.faults.logged.learning_signal import LearningSignal
from holter.faults.logged.reward_spread import RewardSpread
from holter.faults.model.architecture import Architecture
from holter.faults.window import ModelView, Note, Spread, StepNumbers
from holter.offline import causes, curves, messages, naming, schedules, still
from holter.offline.code import Hint, hints, shapes
from holter.offline.found import Config, Found, LoggedRun, Shapes
from holter.offline.points import Curves, Points
from holter.offline.reading import repetition
from holter.records import (
    Cause,
    Census,
    Component,
    Diagnosis,
    Directive,
    Evidence,
    Finding,
    ModuleVitals,
    Rare,
    ScriptWarning,
    TensorEntry,
    Vitals,
)

MAX_STEPS = 4000
"""Number of steps in a window; of more, an even choice is taken."""
SHARE_WITH_SYMPTOM = 0.6
"""Share of parameters in embeddings that is too much if the model writes one word over and over."""
FEW_ROLLOUTS = 3
NOTHING = Directive(directive="observe", reason="judged from what a run left behind: holter was not there to act")
LIVE = frozenset({"curves", "logged"})
USED = frozenset({"learning_rate", "variance_of_nothing", "architecture"})
"""Live detectors that are judged on windows made of artifacts; the others need what no log holds."""
BY_CURVE = frozenset({"loss_trend", "nonfinite_loss"})
"""Detectors that are replaced by the judgement of the curve: a logged loss that rises may be a curriculum, or a resumed or another run."""
HINTS = {
    "learning_rate_too_high": ("schedule", "optimizer", "clip"), "exploding_gradients": ("clip", "optimizer", "loss_term"), "loss_divergence": ("schedule", "optimizer", "loss_term", "clip"),
    "variance_without_samples": ("variance",), "graph_detached": ("detach", "no_grad"), "zero_gradients": ("detach", "no_grad", "loss_term"), "loss_plateau": ("detach", "no_grad", "optimizer"),
    "nonfinite_forward": ("loss_term", "clip"), "nonfinite_backward": ("loss_term", "clip"), "overfitting": ("optimizer",), "repeated_epoch_order": ("set_epoch",), "stale_optimizer_parameters": ("optimizer_before_sharding",),
}  # fmt: skip
SETTINGS = {
    "learning_rate_too_high": ("lr", "learning_rate", "scheduler", "schedule", "warmup", "gamma", "milestones", "optim", "clip", "max_grad_norm", "max_lr", "restart"),
    "loss_divergence": ("lr", "learning_rate", "scheduler", "schedule", "warmup", "gamma", "milestones", "clip", "max_grad_norm", "fp16", "bf16", "precision"),
    "exploding_gradients": ("clip", "max_grad_norm", "lr", "learning_rate", "fp16", "bf16", "precision"),
    "nonfinite_forward": ("fp16", "bf16", "precision", "eps", "lr"), "nonfinite_backward": ("fp16", "bf16", "precision", "eps", "lr"), "hidden_nonfinite_loss": ("fp16", "logging_nan_inf_filter", "bf16", "lr"),
    "overfitting": ("dropout", "weight_decay", "epochs", "num_train_epochs"), "loss_plateau": ("lr", "learning_rate", "freeze", "frozen"), "out_of_memory": ("batch", "seq", "length", "accumulation", "checkpointing"),
}  # fmt: skip


@dataclass(frozen=True)
class _Judged:
    finding: Finding
    window: Window
    causes: tuple[Cause, ...]
    file: str
    drawn: tuple[Evidence, ...] = ()
    """Plots besides those of the window."""
    computed: tuple[Evidence, ...] = ()
    """What the settings have to do with the finding."""


def judge(found: Found, *, run_id: str, now_ns: int, detectors: Iterable[Detector] = ALL) -> list[Diagnosis]:
    """Return the diagnoses of everything but dumps, the gravest first."""
    judged = [one for run in found.runs for one in _of_run(run, found, tuple(detectors))]
    judged += list(_of_errors(found))
    judged += list(_of_model(found, tuple(detectors)))
    judged += list(_of_samples(found))
    code_hints = [hint for code in found.code for hint in hints(code)]
    made = []
    for number, (lead, followers) in enumerate(_grouped(judged), start=1):
        ranked = _with_context(lead, found, code_hints)
        made.append(
            explain(
                lead.finding,
                [one.finding for one in followers],
                incident_id=f"{compact(now_ns)}-{number}",
                run_id=run_id,
                opened_at=rfc3339(now_ns),
                detected_after_s=0.0,
                directive=NOTHING,
                plots=(*lead.drawn, *_heat(lead), *_plots(lead)),
                causes=ranked,
            )  # fmt: skip  # noqa: RUF028
        )
    return sorted(made, key=lambda one: (WORST_FIRST.index(one.severity), one.first_step))


def _plots(lead: _Judged) -> Iterator[Evidence]:
    """Return the live detectors' plots, without the norms of weights, which no log has."""
    return (one for one in plots(lead.window, lead.finding) if one.values["title"] != "weight norm by module")


def _heat(lead: _Judged) -> Iterator[Evidence]:
    """Yield the gradients by layer, if the log has them."""
    rows: dict[str, list[tuple[int, float | None]]] = {}
    for note, vitals in lead.window.notes_of(Vitals):
        for one in vitals.modules:
            value = one.gradient_norm if math.isfinite(one.gradient_norm) else None
            rows.setdefault(one.module, []).append((note.step, value))
    made = heat_map("gradient norm by layer", rows, lead.finding.first_step)
    if made is not None:
        yield made


def curves_of(run: LoggedRun) -> Curves:
    """Return the series of a run that are judged together."""
    names = run.names()
    of: dict[str, list[str]] = {}
    for name in names:
        of.setdefault(naming.role(name), []).append(name)

    def longest(role: str) -> Points:
        return max((run.points(name) for name in of.get(role, [])), key=len, default=[])

    evaluations = {name: run.points(name) for name in of.get("evaluation", [])}
    if not evaluations and (whole := _sum_of_terms(run, naming.held_out_term)):
        evaluations = {"held-out loss": whole}
    is_adversarial = any(naming.is_adversarial(name) for name in names)
    # A weighted sum hides a term that has underflowed.
    underflowed = next((one for name in names if naming.term_of_loss(name) and still.is_underflowed(one := run.points(name))), [])  # fmt: skip
    loss = underflowed or longest("loss") or ([] if is_adversarial else _sum_of_terms(run, naming.term_of_loss))
    return Curves(
        loss=loss + _lost_terms(run, loss), norm=longest("gradient_norm"), rate=longest("learning_rate"), evaluations=evaluations,
        scale=longest("loss_scale"), skipped=longest("skipped"), stages=_stages(run), memory=longest("memory"), is_reward=any(map(naming.is_reward, names)) and not naming.is_preference(names), is_adversarial=is_adversarial,
        lost=tuple(name for name in names if naming.of_policy(name) in {"kl", "entropy"} and _is_lost(run.points(name))),
    )  # fmt: skip


def _lost_terms(run: LoggedRun, loss: Points) -> Points:
    """Return NaN points at the steps after the last logged loss at which a term of the loss is not finite.

    The sum would not be finite there either.
    """
    last = loss[-1][0] if loss else -1
    terms = (run.points(name) for name in run.names() if loss and naming.term_of_loss(name))
    lost = {step for points in terms for step, value in points if step > last and not math.isfinite(value)}
    return [(step, math.nan) for step in sorted(lost)]


def _stages(run: LoggedRun) -> tuple[int, ...]:
    """Return the steps at which a new stage of the run's plan began, if the log counts stages."""
    known = (run.points(name) for name in run.names() if naming.is_stage(name))
    return tuple(sorted({step for points in known for (_, a), (step, b) in pairwise(points) if a != b}))


def _is_lost(points: Points) -> bool:
    """Whether a series has at least two values and its last two are not finite."""
    return len(points) > 1 and not any(math.isfinite(value) for _, value in points[-2:])


def _sum_of_terms(run: LoggedRun, term_of: Callable[[str], str]) -> Points:
    """Return the sum of the terms, which is the loss of a log that has only its terms (`box_loss`, `cls_loss`)."""
    terms = [dict(run.points(name)) for name in run.names() if term_of(name)]
    shared = set.intersection(*map(set, terms)) if terms else set()
    return [(step, sum(term[step] for term in terms)) for step in sorted(shared)]


def window_of(run: LoggedRun, found: Found) -> Window:
    """Return the window that the live detectors take."""
    made = curves_of(run)
    columns: dict[str, Points] = {
        "gradient_norm": made.norm,
        "learning_rate": made.rate,
        "loss_scale": made.scale,
    }
    columns["log.loss" if made.is_reward or made.is_adversarial else "loss"] = made.loss
    vitals: dict[int, list[ModuleVitals]] = {}
    for name in run.names():
        layer = naming.module_of_gradient(name)
        term = naming.term_of_loss(name)
        if layer:
            for step, value in run.points(name)[-MAX_STEPS:]:
                vitals.setdefault(step, []).append(_vital(layer, value))
        elif term:
            columns[f"log.loss_terms.{term}"] = run.points(name)
        elif naming.role(name) not in {"loss", "gradient_norm", "learning_rate", "loss_scale"}:
            meant = naming.of_policy(name) if made.is_reward else ""
            columns.setdefault(f"log.{meant or name}", run.points(name))
    rows: dict[int, dict[str, Spread]] = {}
    for name, points in columns.items():
        for step, value in points:
            rows.setdefault(step, {})[name] = _spread(value)
    steps = sorted(rows)
    steps = steps[:: max(1, math.ceil(len(steps) / MAX_STEPS))]
    series = tuple(StepNumbers(step, step, rows[step]) for step in steps)
    notes = [
        _note(step, Vitals(view="local", modules=modules, num_trainable=len(modules)))
        for step, modules in sorted(vitals.items())
    ]
    notes += [
        _note(
            error.step,
            ScriptWarning(text=error.text, where=error.values.get("where", f"{error.file}:{error.line}")),
            -1 if error.rank is None else error.rank,
        )
        for error in found.errors
        if error.kind == "variance_warning"
    ]
    return Window(now_ns=0, world_size=1, attached=frozenset({0}), series=series, notes=tuple(notes))


def _vital(layer: str, norm: float) -> ModuleVitals:
    nan = math.nan
    return ModuleVitals(layer, "float32", 1, nan, norm, nan, nan, nan, nan, nan, 1.0)


def _note(step: int, body: Rare, rank: int = 0) -> Note:
    return Note(rank=rank, step=step, at_ns=0, body=body)


def _spread(value: float) -> Spread:
    return Spread(value, value, value, 0, 0, 1, int(not math.isfinite(value)))


def _of_run(run: LoggedRun, found: Found, detectors: Sequence[Detector]) -> Iterator[_Judged]:
    made, window = _with_rates(curves_of(run), run, found), window_of(run, found)
    own = list(curves.judge(made))
    for finding in (*own, *_by_layer(window)):
        computed = tuple(schedules.against(made, finding, found, run))
        yield dataclasses.replace(_judged(finding, window, run), computed=computed)
    is_explained = any(
        finding.facts.get("is_rising")
        or finding.facts.get("is_nan")
        or finding.facts.get("is_still")
        or finding.facts.get("is_hidden")
        for finding in own
    )
    names = (
        {"gradient_explosion", "overfitting", "learning_rate"}
        if is_explained or made.is_reward or made.is_adversarial
        else set()
    ) | BY_CURVE
    for detector in detectors:
        entry = DETECTORS.get(detector.name)
        if detector.name in names or entry is None or (entry.group not in LIVE and detector.name not in USED):
            continue
        for finding in _of_rollouts(detector, window) or _safely(detector, window):
            is_told = finding.detector == "overfitting" and any(one.facts.get("is_overfitting") for one in own)
            if not is_told:
                yield _judged(finding, window, run)


def _of_rollouts(detector: Detector, window: Window) -> list[Finding]:
    """Judge the rollouts of a log with few steps by all of these steps; if there are very few, findings are only information."""
    num = len(window.series)
    if not isinstance(detector, RewardSpread | LearningSignal) or not 0 < num < detector.min_logs:
        return []
    found = _safely(dataclasses.replace(detector, min_logs=num), window)
    return [msgspec.structs.replace(one, severity="info") if num < FEW_ROLLOUTS else one for one in found]


def _with_rates(made: Curves, run: LoggedRun, found: Found) -> Curves:
    """Add the rates that follow from the settings if the log has none.

    With several runs it is unknown to which of them the settings belong, so none are added.
    """
    num_runs = sum(any(naming.role(name) == "loss" for name in one.names()) for one in found.runs)
    if made.rate or num_runs > 1:
        return made
    rates = schedules.computed_rates(found, run, made.loss)
    return dataclasses.replace(made, rate=rates, is_rate_computed=bool(rates))


def _safely(detector: Detector, window: Window) -> list[Finding]:
    """Return a detector's findings; none if it raises, because a log may hold anything."""
    try:
        return [finding for finding in detector.judge(window) if not finding.needs]
    except (ValueError, ZeroDivisionError, OverflowError, IndexError, KeyError):
        return []


def _judged(finding: Finding, window: Window, run: LoggedRun) -> _Judged:
    finding = msgspec.structs.replace(
        finding,
        ranks=_concerned(run, finding),
        evidence=tuple(_placed(one, finding, run) for one in finding.evidence),
    )
    return _Judged(finding, window, causes.rank_causes(finding), run.file)


def _concerned(run: LoggedRun, finding: Finding) -> tuple[int, ...]:
    """Return the ranks that a finding concerns in a log with several ranks; empty if the log has one.

    These are the ranks whose own loss is not finite or far above the others', if only some are; otherwise all.
    """
    if len(run.by_rank) <= 1:
        return ()
    ranks = tuple(sorted(run.by_rank))
    last = {
        rank: points[-1][1]
        for rank, series in run.by_rank.items()
        for name, one in series.items()
        if naming.role(name) == "loss"
        and (points := [point for point in one.points() if point[0] >= finding.first_step])
    }
    lost = tuple(rank for rank in ranks if rank in last and not math.isfinite(last[rank]))
    if not lost and finding.facts.get("is_rising"):
        usual = sorted(last.values())[(len(last) - 1) // 2] if last else 0.0
        lost = tuple(rank for rank in ranks if rank in last and last[rank] > 3 * abs(usual) + 1e-9)
    return lost if lost and len(lost) < len(ranks) else ranks


def _placed(evidence: Evidence, finding: Finding, run: LoggedRun) -> Evidence:
    """Add file, line and step to a piece of evidence."""
    step = evidence.values.get("step", finding.first_step)
    step = step if isinstance(step, int) else finding.first_step
    names = sorted(run.names(), key=lambda name: naming.role(name) != "loss")
    line = next((line for name in names if (line := run.line_of(name, step))), 0)
    return msgspec.structs.replace(
        evidence,
        summary=f"{evidence.summary} ({_where(run.file, line)})",
        values={"file": run.file, "line": line, "step": step, "counted_by": run.counted_by} | evidence.values,
    )


def _where(file: str, line: int) -> str:
    return f"{file}, line {line}" if line else file


def _by_layer(window: Window) -> Iterator[Finding]:
    """Find layers in a short log whose gradients at the last checks are next to nothing or exploding.

    A layer's gradients are compared with those of the other layers.
    """
    checks = [
        (note.step, {one.module: one.gradient_norm for one in vitals.modules})
        for note, vitals in window.notes_of(Vitals)
    ]
    if len(checks) < 2 or len(checks[-1][1]) < 3:  # noqa: PLR2004 - no peers
        return
    step, last = checks[-1]
    known = {name: value for name, value in last.items() if math.isfinite(value) and value > 0}
    if len(known) < 3:  # noqa: PLR2004 - as above
        return
    middle = sorted(known.values())[len(known) // 2]
    top = max(known.values())
    tiny = sorted(
        (name for name, value in known.items() if value < min(1e-6, 1e-5 * top)), key=lambda name: known[name]
    )
    huge = sorted(
        (name for name, value in last.items() if _is_huge(value, middle, _usual(checks, name))),
        key=lambda name: -last[name] if math.isfinite(last[name]) else -math.inf,
    )
    for names, fact, what in ((huge, "is_exploding", "explode"), (tiny, "is_vanishing", "vanish")):
        if names:
            shown = ", ".join(f"{name} {last[name]:.3g}" for name in names[:5])
            yield Finding(
                detector="by_layer", severity="warning", first_step=_began(checks, names[0], fact), detected_step=step, ranks=(), modules=tuple(names),
                summary=f"Gradients {what} in {len(names)} of {len(last)} layers at step {step}: {shown}; the middle one has {middle:.3g}.", facts={fact: True, "series": ["gradient_norm", "loss"]},
                evidence=(Evidence(kind="modules", summary=f"gradient norms at step {step}: {shown}; the middle one {middle:.3g}, the largest {top:.3g}", values={"step": step, "norms": {name: last[name] if math.isfinite(last[name]) else None for name in names[:8]}}),),
            )  # fmt: skip


def _is_huge(value: float, middle: float, usual: float) -> bool:
    """Whether a gradient is not finite, or large and far above the median layer's or its own usual value."""
    if not math.isfinite(value):
        return True
    return value > 1e3 and (value > 1e4 * middle or value > 1e3 * usual > 0)  # noqa: PLR2004 - as the sentence says


def _usual(checks: Sequence[tuple[int, dict[str, float]]], name: str) -> float:
    """Return the median of a layer's gradient in the first quarter of the checks; 0 if none was finite."""
    known = [norms[name] for _, norms in checks if name in norms]
    early = sorted(value for value in known[: max(1, len(known) // 4)] if math.isfinite(value))
    return early[len(early) // 2] if early else 0.0


def _began(checks: Sequence[tuple[int, dict[str, float]]], name: str, fact: str) -> int:
    """Return the step since which a layer's gradient has been as at the end: next to nothing, or far above its usual value."""
    known = [(step, norms[name]) for step, norms in checks if name in norms]
    usual, first = _usual(checks, name), known[-1][0]
    for step, value in reversed(known):
        if not (value < 1e-6 if fact == "is_vanishing" else not math.isfinite(value) or value > 10 * usual):  # noqa: PLR2004 - as in `_by_layer`
            break
        first = step
    return first


EMPTY = Window(now_ns=0, world_size=1, attached=frozenset())


def _of_errors(found: Found) -> Iterator[_Judged]:
    said = {error.rank for error in found.errors if error.rank is not None} | {
        rank for run in found.runs for rank in run.by_rank
    }
    said |= found.named_ranks
    sizes = [
        int(value)
        for name, value, _ in found.settings()
        if name.rpartition(".")[2].upper() in {"WORLD_SIZE", "NUM_PROCESSES"} and value.isdigit()
    ]
    num_ranks = max([*(rank + 1 for rank in said), *(size for size in sizes if size < 100_000)], default=1)  # noqa: PLR2004 - no job is larger
    for finding in messages.judge(found.errors, num_ranks):
        yield _Judged(finding, EMPTY, causes.rank_causes(finding), "")
    warnings = [error for error in found.errors if error.kind == "variance_warning"]
    if warnings and not found.runs:
        window = window_of(LoggedRun(warnings[0].file, {}), found)
        detector = next((one for one in ALL if one.name == "variance_of_nothing"), None)
        for finding in _safely(detector, window) if detector else ():
            placed = tuple(
                msgspec.structs.replace(
                    one,
                    values={"file": warnings[0].file, "line": warnings[0].line, "step": warnings[0].step} | one.values,
                )
                for one in finding.evidence
            )
            made = msgspec.structs.replace(finding, ranks=(), evidence=placed)
            yield _Judged(made, EMPTY, causes.rank_causes(made), warnings[0].file)


def _of_model(found: Found, detectors: Sequence[Detector]) -> Iterator[_Judged]:
    settings = {name: value for name, value, _ in found.settings()}
    tables = [*found.tables, *(made for code in found.code if (made := shapes(code, settings)) is not None)]
    detector = next((one for one in detectors if one.name == "architecture"), None)
    if detector is not None and isinstance(detector, Architecture) and _writes_one_word(found):
        detector = dataclasses.replace(detector, share=SHARE_WITH_SYMPTOM)
    for table in map(_with_output_embeddings, tables[:4]):
        entries = [
            TensorEntry(name, shape, "float32", True, False, 0, module_class=kind)
            for name, shape, kind in table.entries
        ]
        census = Census(
            model=0, wrapper="", is_replicated=False, optimizers=[], components=[Component("", "", "", True)], backward_order=[], part=0, parts=1, entries=entries
        )  # fmt: skip
        window = Window(now_ns=0, world_size=1, attached=frozenset({0}), models=ModelView(census={0: census}))
        for finding in _safely(detector, window) if detector else ():
            # In a small network one layer holds nearly all parameters, which is no fault.
            if finding.facts.get("is_most_in_embeddings"):
                yield _lopsided(finding, table)
                return


def _with_output_embeddings(table: Shapes) -> Shapes:
    """Mark tables as large as the vocabulary, such as the last layer, as embeddings too."""
    vocabularies = {shape[0] for _, shape, kind in table.entries if "Embedding" in kind and len(shape) == 2}  # noqa: PLR2004 - a table
    return dataclasses.replace(
        table,
        entries=tuple(
            (name, shape, "Embedding" if len(shape) == 2 and max(shape) in vocabularies and max(shape) >= 1000 else kind)  # noqa: PLR2004 - fewer may be a width
            for name, shape, kind in table.entries
        ),
    )  # fmt: skip


def _writes_one_word(found: Found) -> bool:
    """Whether the model's outputs repeat one word, according to the reported symptoms or to samples."""
    said = " ".join(found.symptoms).lower()
    is_said = any(word in said for word in ("same token", "one token", "repeat", "same word", "same output"))
    return is_said or any(True for _ in _of_samples(found))


def _lopsided(finding: Finding, table: Shapes) -> _Judged:
    total = sum(math.prod(shape) for _, shape, _ in table.entries)
    parts: dict[str, int] = {}
    for name, shape, kind in table.entries:
        part = kind if kind == "Embedding" else name.split(".")[0]
        parts[part] = parts.get(part, 0) + math.prod(shape)
    largest = sorted(parts.items(), key=lambda item: -item[1])[:6]
    told = ", ".join(f"{name} {num / total:.0%}" for name, num in largest)
    evidence = Evidence(kind="census", summary=f"shares of {total:,} parameters: {told}; a balance to try: under a third in embeddings (tie input and output, a smaller vocabulary or width), the rest in layers",
                        values={"file": table.file, "shares": {name: num / total for name, num in largest}, "total": total})  # fmt: skip
    placed = tuple(msgspec.structs.replace(one, values={"file": table.file} | one.values) for one in finding.evidence)
    finding = msgspec.structs.replace(finding, ranks=(), evidence=(evidence, *placed))
    if table.basis == "inference":
        finding = msgspec.structs.replace(finding, detector="layers", facts={"is_lopsided": True})
    drawn = shares("shares of the parameters", {name: num / total for name, num in largest})
    return _Judged(finding, EMPTY, causes.rank_causes(finding), table.file, (drawn,))


def _of_samples(found: Found) -> Iterator[_Judged]:
    """Find samples most of which are one word over and over."""
    known = [sample for sample in found.samples if len(sample.text.split()) >= 4]  # noqa: PLR2004 - shorter answers repeat nothing
    repeated = [sample for sample in known if repetition(sample.text) > 0.6]  # noqa: PLR2004 - most of its words
    if len(repeated) < 3 or len(repeated) < 0.6 * len(known):  # noqa: PLR2004 - not by chance
        return
    first = repeated[0]
    finding = Finding(
        detector="samples", severity="warning", first_step=-1, detected_step=-1, ranks=(), summary=f"{len(repeated)} of {len(known)} samples repeat one word whatever was asked: `{first.text[:60]}`.",
        facts={"is_repeating": True},
        evidence=(Evidence(kind="samples", summary=f"{len(repeated)} of {len(known)} samples are one word for the most part, as in `{first.text[:80]}`", values={"file": first.file, "line": first.line, "num": len(repeated)}),),
    )  # fmt: skip
    yield _Judged(finding, EMPTY, causes.rank_causes(finding), first.file)


def _grouped(judged: Sequence[_Judged]) -> Iterator[tuple[_Judged, list[_Judged]]]:
    """Group findings that have one cause; yield the first finding of each group and those that follow from it."""
    left = [one for one in judged if one.causes]
    has_jump = any(one.finding.facts.get("has_jump") for one in left)
    order = sorted(
        left,
        key=lambda one: (
            _stage(one.finding, has_jump=has_jump),
            WORST_FIRST.index(one.finding.severity),
            one.finding.first_step,
            moment(one.finding),
        ),
    )
    while order:
        lead = order.pop(0)
        followers = [one for one in order if _follows(lead, one)]
        order = [one for one in order if one not in followers]
        yield lead, followers


def _stage(finding: Finding, *, has_jump: bool) -> int:
    """Return how early a finding comes in explaining others; the lowest number comes first."""
    if finding.detector == "by_layer" and (finding.facts.get("is_vanishing") or not has_jump):
        # A loss that stands still or rises follows from the layers' gradients; but a rate that jumped explains both.
        return 2 if finding.facts.get("is_vanishing") else 1
    return {"layers": 0, "architecture": 0, "variance_of_nothing": 1, "curve": 3}.get(
        finding.detector, 4 if finding.detector != "message" else 5
    )


def _follows(lead: _Judged, other: _Judged) -> bool:
    if lead.causes[0].cause == other.causes[0].cause or brings_about(lead.finding, other.finding):
        return True
    if lead.finding.detector == "variance_of_nothing" and other.finding.detector in {"message", "curve"}:
        return "nan" in other.finding.summary.lower() and other.finding.first_step >= lead.finding.first_step - 1
    if lead.finding.detector == other.finding.detector == "by_layer":
        # Some layers get next to nothing and others far too much: neither causes the other.
        return False
    if lead.finding.detector in {"layers", "architecture"}:
        return other.finding.detector in {"samples", "output_variety"} or other.finding.facts.get("is_still") is True
    is_own = lead.finding.detector in {"curve", "learning_rate", "by_layer", "gradient_explosion"}
    entry = DETECTORS.get(other.finding.detector)
    is_later = other.finding.first_step >= lead.finding.first_step
    if (
        is_own
        and (other.finding.detector in {"curve", "by_layer"} or (entry is not None and entry.group == "curves"))
        and lead.file == other.file
        and is_later
    ):
        return True
    return (
        is_own and lead.finding.facts.get("is_leaking") is True and other.finding.facts.get("is_out_of_memory") is True
    )


def _with_context(lead: _Judged, found: Found, code_hints: Sequence[Hint]) -> tuple[Cause, ...]:
    """Return the causes, the first with the settings and lines of code that it points to."""
    first, *rest = lead.causes
    words = SETTINGS.get(first.cause, ())
    more = [*lead.computed]
    told = " ".join(one.summary for one in lead.computed)
    more += [
        Evidence(
            kind="setting",
            summary=f"{_where(config.file, config.lines.get(name, 0))}: `{name} = {value}`",
            values={
                "file": config.file,
                "line": config.lines.get(name, 0),
                "name": name,
                "value": value,
                "basis": "inference",
            },
        )
        for name, value, config in _by_line(found)
        if f"{name} = {value}" not in told and any(word in name.rpartition(".")[2].lower() for word in words)
    ][:10]
    kinds = HINTS.get(first.cause, ())
    more += [
        Evidence(
            kind="code",
            summary=f"{_where(hint.file, hint.line)}: `{hint.text}`: {hint.why}",
            values={"file": hint.file, "line": hint.line, "basis": "inference"},
        )
        for hint in code_hints
        if hint.kind in kinds
    ][:8]
    return msgspec.structs.replace(first, evidence=(*first.evidence, *more)), *rest


def _by_line(found: Found) -> Iterator[tuple[str, str, Config]]:
    """Yield settings, one per line of a file."""
    seen: set[tuple[str, int]] = set()
    for name, value, config in found.settings():
        line = config.lines.get(name, 0)
        if not line or (config.file, line) not in seen:
            seen.add((config.file, line))
            yield name, value, config
