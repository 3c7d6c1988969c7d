"""Decides whether a fix worked: compares two runs over the same steps, taking their noise into account.

    fixed       the fault of BEFORE did not come back, for long enough: 100 steps beyond where it appeared, or ten times as long as it took to appear
    not_fixed   the fault came back, perhaps later, elsewhere or under another name; or its curve is as it was
    worse       a fault as grave appeared that BEFORE did not have, or the fault's curve is worse than before by more than the noise
    undecided   AFTER is too short, or could not have shown the fault; and how many more steps would decide

Pure: two frozen records in, one verdict out.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Literal

import msgspec

from holter.diagnosis.explain import WORST_FIRST
from holter.faults import CAUSES
from holter.offline.proof.changes import SettingChange, setting_changes, unknown_kinds
from holter.offline.proof.record import EVALUATION, IN_LOGS, LOSS, NORM, SERIES_OF, PastFault, Points, RunRecord

QUIET_STEPS = 100
"""Number of steps without it, beyond where it appeared, that are enough; or ten times as long as it took to appear."""
TIMES_AS_LONG = 10
MIN_QUIET_STEPS = 10
"""Least number of steps: a fault that was there at once may still be absent for a step or two."""
MIN_QUIET_LOGS = 3
"""Number of values that must exist beyond the fault's first step: a single one is chance."""
MAX_BLOCKS = 24
"""Number of stretches in which two curves are compared."""
BEYOND_NOISE = 3.0
"""Standard errors by which two medians must lie apart."""
MIN_RELATIVE_NOISE = 0.02
"""Relative distance that two runs of one script with different seeds have anyway."""
HIGH_PARTS = 8
"""Number of stretches of a loss whose levels are compared."""
MOST, FEW = 0.8, 0.2
"""Shares of the stretches: a curve is lower if it is so in most of them; two are the same if they differ in few."""
GAUSSIAN = 1.4826
MIN_MEASURED = 8
"""Number of values of a curve that is judged by itself."""
FAR_ABOVE = {LOSS: 2.0, EVALUATION: 1.15}
"""Times its beginning (loss) or its best (evaluation) above which a curve's end means a fault, even if none was named."""

VerdictWord = Literal["fixed", "not_fixed", "worse", "undecided"]
EXIT_CODES: dict[VerdictWord, int] = {"fixed": 0, "not_fixed": 1, "worse": 1, "undecided": 3}

_BLOW_UP = (
    "nonfinite_input", "nonfinite_forward", "nonfinite_backward", "nonfinite_loss_function", "hidden_nonfinite_loss", "activation_overflow",
    "exploding_gradients", "learning_rate_too_high", "loss_divergence",
)  # fmt: skip
_STILL = (
    "loss_plateau", "zero_gradients", "graph_detached", "nothing_trainable", "lost_update", "stale_optimizer_parameters", "vanishing_gradients",
    "every_step_skipped", "rounded_away_updates", "gradient_underflow",
)  # fmt: skip
_APART = (
    "unsynced_initialisation", "gradient_sync_bypassed", "unreduced_parameters", "uneven_clipping", "optimizer_state_mismatch", "corrupted_collective",
    "silent_data_corruption", "nondeterministic_drift", "buffer_divergence",
)  # fmt: skip
SAME_SYMPTOM = {
    cause: kind for kind, group in (("blow up", _BLOW_UP), ("stand still", _STILL), ("part", _APART)) for cause in group
}
"""Cause -> symptom. If a fix is followed by another cause with the same symptom, that is the old fault under a new name."""


class CurveComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of one curve of both runs, over the same steps."""

    series: str
    first_step: int
    last_step: int
    before: float
    """Median of BEFORE."""
    after: float
    noise: float
    """Standard deviation around the curve, the larger of the two runs'."""
    is_noise_relative: bool
    """Whether the noise is a share of the value, not an absolute number."""
    result: Literal["lower", "higher", "same", "mixed"]
    """How AFTER lies compared with BEFORE, if they differ by more than the noise."""

    def text(self) -> str:
        """Describe the comparison for people."""
        said = {
            "lower": "lower",
            "higher": "higher",
            "same": "no difference beyond the noise",
            "mixed": "sometimes lower, sometimes not",
        }
        shown = f"{self.noise:.0%}" if self.is_noise_relative else f"{self.noise:.2g}"
        return f"{self.series} at steps {self.first_step} to {self.last_step}: {self.before:.4g} before, {self.after:.4g} after, noise {shown}: {said[self.result]}"


class FixVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the fix worked, and why; its JSON form is public."""

    schema: int = 1
    verdict: VerdictWord
    reason: str
    before: str
    after: str
    fault: PastFault | None
    """The fault that was to be fixed."""
    came_back: PastFault | None = None
    new_faults: tuple[PastFault, ...] = ()
    """Faults of AFTER that BEFORE did not have."""
    gone_faults: tuple[PastFault, ...] = ()
    """Other faults of BEFORE that AFTER does not have."""
    num_quiet_steps: int = 0
    """Number of steps that AFTER ran without the fault beyond the step at which it had appeared."""
    num_more_steps: int = 0
    """Number of further steps that would decide; 0 if nothing is to be awaited."""
    comparisons: tuple[CurveComparison, ...] = ()
    changes: tuple[SettingChange, ...] = ()
    unknown: tuple[str, ...] = ()
    """Kinds of changes that cannot be seen here, because they were not recorded."""
    remarks: tuple[str, ...] = ()


def verify(before: RunRecord, after: RunRecord, fault: PastFault | None = None) -> FixVerdict:
    """Judge whether `fault`, by default the gravest of BEFORE, is fixed in AFTER."""
    before, after = _with_measured(before), _with_measured(after)
    fault = fault or next(iter(before.faults), None)
    compared = tuple(_comparisons(before, after, fault))
    judged = _judge(before, after, fault, compared)
    changes = setting_changes(before, after)
    return msgspec.structs.replace(
        judged,
        comparisons=compared,
        changes=changes,
        unknown=tuple(unknown_kinds(before, after)),
        remarks=(*judged.remarks, *_remarks(before, after, changes)),
    )


def _judge(
    before: RunRecord, after: RunRecord, fault: PastFault | None, compared: Sequence[CurveComparison]
) -> FixVerdict:
    news = tuple(one for one in after.faults if not _is_known(one, before.faults))
    gone = tuple(one for one in before.faults if one != fault and not _is_known(one, after.faults))
    base = FixVerdict(
        verdict="undecided",
        reason="",
        before=before.name,
        after=after.name,
        fault=fault,
        new_faults=news,
        gone_faults=gone,
    )
    if after.num_steps == 0 and not after.faults:
        return msgspec.structs.replace(base, reason=f"{after.name} has no steps: there is nothing to compare")
    if fault is None:
        return _without_fault(base, before, compared)
    back = _came_back(fault, after)
    if back is not None:
        return _returned(base, before, after, fault, back, compared)
    grave = [one for one in news if _is_as_grave(one, fault) and _is_within(one, before)]
    if grave:
        return msgspec.structs.replace(
            base, verdict="worse", reason=f"{fault.cause} did not come back, but {_where(grave[0])} is new and as grave"
        )
    own = _own_curve(fault, compared)
    if own is not None and own.result == "higher" and _is_high_bad(fault):
        return msgspec.structs.replace(
            base, verdict="worse", reason=f"where {fault.cause} showed, the curve is worse: {own.text()}"
        )
    return _quiet(base, before, after, fault, own)


def _without_fault(base: FixVerdict, before: RunRecord, compared: Sequence[CurveComparison]) -> FixVerdict:
    grave = [one for one in base.new_faults if one.severity == "critical" and _is_within(one, before)]
    if grave:
        reason = f"no fault was found in {before.name}, and {_where(grave[0])} is new in {base.after}"
        return msgspec.structs.replace(base, verdict="worse", reason=reason)
    shown = next((f"; {one.text()}" for one in compared if one.result in {"lower", "higher"}), "")
    reason = f"no fault was found in {before.name}, so there is none that could be fixed{shown}"
    return msgspec.structs.replace(base, reason=reason)


def _came_back(fault: PastFault, after: RunRecord) -> PastFault | None:
    """Return the fault with the same cause in AFTER, or one with the same symptom; None if there is none."""
    exact = [one for one in after.faults if one.cause == fault.cause]
    alike = [one for one in after.faults if _kind(one.cause) == _kind(fault.cause)]
    found = next(iter([*exact, *alike]), None)
    if found is not None or _kind(fault.cause) != "blow up" or not fault.cause.startswith(("nonfinite", "hidden")):
        return found
    bad = [step for step, value in after.series.get(LOSS, ()) if not math.isfinite(value)]
    if not bad:
        return None
    said = f"The loss is not a number at step {bad[0]}."
    return msgspec.structs.replace(
        fault, id="", symptom=said, first_step=bad[0], detected_step=bad[0], ranks=(), place=""
    )


def _returned(  # noqa: PLR0913, PLR0917 - two runs, two faults
    base: FixVerdict,
    before: RunRecord,
    after: RunRecord,
    fault: PastFault,
    back: PastFault,
    compared: Sequence[CurveComparison],
) -> FixVerdict:
    took, again = fault.first_step - before.first_step, back.first_step - after.first_step
    how = "came back"
    if back.cause != fault.cause:
        how = f"came back as {back.cause}"
    elif fault.place and back.place and back.place != fault.place:
        how = f"came back elsewhere, in {back.place}"
    elif fault.ranks and back.ranks and not set(fault.ranks) & set(back.ranks):
        how = f"came back on rank {', '.join(map(str, back.ranks[:4]))}"
    if back.first_step >= 0 and fault.first_step >= 0:
        when = f"after {again} {after.unit}s" if again != took else "at the same place"
        how += f" {when}, as it did after {took}" if again != took else f" {when}, after {took} {after.unit}s"
    own = _own_curve(fault, compared)
    is_graver = WORST_FIRST.index(back.severity) < WORST_FIRST.index(fault.severity)
    if is_graver or (own is not None and own.result == "higher" and _is_high_bad(fault)):
        why = f"it is {back.severity} now" if is_graver else own.text() if own else ""
        return msgspec.structs.replace(base, verdict="worse", reason=f"{fault.cause} {how}, and {why}", came_back=back)
    return msgspec.structs.replace(base, verdict="not_fixed", reason=f"{fault.cause} {how}", came_back=back)


def _quiet(
    base: FixVerdict, before: RunRecord, after: RunRecord, fault: PastFault, own: CurveComparison | None
) -> FixVerdict:
    """Judge a run in which the fault did not come back: whether the run was long enough, and would have shown the fault."""
    since = max(fault.first_step, after.first_step)
    quiet = max(0, after.last_step - since + (fault.first_step < after.first_step))
    base = msgspec.structs.replace(base, num_quiet_steps=quiet)
    if (why := _cannot_show(fault, before, after)) is not None:
        return msgspec.structs.replace(base, reason=why)
    if own is not None and own.result == "same" and _shows_in_curve(fault) and fault.severity != "info":
        reason = f"nobody names {fault.cause} in {after.name}, but its curve is what it was: {own.text()}"
        return msgspec.structs.replace(base, verdict="not_fixed", reason=reason)
    if _kind(fault.cause) == "blow up" and (why := _ends_high(after)) is not None:
        reason = f"nobody names {fault.cause} in {after.name}, but {why}"
        return msgspec.structs.replace(base, verdict="not_fixed", reason=reason)
    needed, rule = _needed(fault, before, after)
    num_logs = sum(step > since for step, _ in after.series.get(SERIES_OF.get(fault.cause, LOSS), ()))
    if after.watched_by == "log" and 0 < num_logs < MIN_QUIET_LOGS:
        needed = max(needed, quiet + 1)
    if quiet >= needed:
        reason = f"{fault.cause} did not come back in {quiet} {after.unit}s beyond where it appeared; {needed} are enough ({rule})"
        return msgspec.structs.replace(base, verdict="fixed", reason=reason)
    more = needed - quiet if after.last_step >= fault.first_step else needed + fault.first_step - after.last_step
    reached = (
        ""
        if after.last_step >= fault.first_step
        else f" {after.name} ended before it: at {after.unit} {after.last_step}."
    )
    ended = next(
        (f" {after.name} ended with {_where(one)}." for one in base.new_faults if one.severity == "critical"), ""
    )
    reason = (
        f"{fault.cause} has not come back so far, which proves nothing yet: it appeared at {after.unit} {fault.first_step}.{reached}{ended} "
        f"{more} more {after.unit}s would decide ({rule})"
    )
    return msgspec.structs.replace(base, reason=reason, num_more_steps=more)


def _ends_high(after: RunRecord) -> str | None:
    """Return a sentence if the run's loss ends far above its best, otherwise None.

    A loss that blew up and stays on a plateau is no less lost.
    """
    known = [value for _, value in after.series.get(LOSS, ()) if math.isfinite(value)]
    part = len(known) // HIGH_PARTS
    if part < MIN_QUIET_LOGS:
        return None
    levels = [median(known[begin : begin + part]) for begin in range(0, part * HIGH_PARTS, part)]
    best, end = min(levels[:-1]), levels[-1]
    noise = _noise(tuple(enumerate(known)))
    if best <= 0 or end < 2 * best or end - best < 3 * noise:
        return None
    return f"its loss ends at {end:.4g}, after {best:.4g} at its best"


def _needed(fault: PastFault, before: RunRecord, after: RunRecord) -> tuple[int, str]:
    """Return how many quiet steps are enough, and by which rule."""
    if after.unit == "epoch":
        lag = max(0, fault.detected_step - fault.first_step)
        return max(MIN_QUIET_LOGS, min(lag + 1, 10)), "as many epochs as it took to be seen, three at least"
    took = max(1, fault.first_step - before.first_step + 1) if fault.first_step >= 0 else QUIET_STEPS
    is_beyond = after.first_step > fault.first_step
    longest, shortest = QUIET_STEPS + took * is_beyond, (TIMES_AS_LONG - 1 + is_beyond) * took
    if shortest < longest:
        return max(MIN_QUIET_STEPS, shortest), "ten times as long as it took to appear"
    return longest, f"{QUIET_STEPS} steps without it"


def _cannot_show(fault: PastFault, before: RunRecord, after: RunRecord) -> str | None:
    """Return why silence in AFTER would prove nothing; None if it would prove something."""
    if after.unit != before.unit:
        return f"{before.name} counts {before.unit}s and {after.name} {after.unit}s: they cannot be laid side by side"
    if after.watched_by == "log" and before.watched_by == "holter" and fault.cause not in IN_LOGS:
        return f"a log does not show {fault.cause}: run {after.name} under holter"
    name = SERIES_OF.get(fault.cause, LOSS)
    if after.watched_by == "log" and name in before.series and name not in after.series and _shows_in_curve(fault):
        return f"{after.name} has no {name.replace('_', ' ')}, in which {fault.cause} showed: log it"
    lost = [one for one in after.blind if one not in before.blind]
    if lost and after.watched_by == "holter":
        return f"holter was partly blind in {after.name}, so silence says nothing: {lost[0]}"
    return None


def _comparisons(before: RunRecord, after: RunRecord, fault: PastFault | None) -> Iterator[CurveComparison]:
    """Compare the curves from where the fault began, if both runs reach that far; otherwise over all steps that both have."""
    if before.unit != after.unit:
        return
    since = fault.first_step if fault is not None and fault.first_step >= 0 else -1
    for name in (LOSS, EVALUATION, NORM):
        old, new = before.series.get(name, ()), after.series.get(name, ())
        found = compare(name, old, new, since) or compare(name, old, new, -1)
        if found is not None:
            yield found


def compare(name: str, before: Points, after: Points, since: int) -> CurveComparison | None:
    """Compare two curves over the steps that both have, from `since` on; None if either has fewer than three values there."""
    if not before or not after:
        return None
    first = max(before[0][0], after[0][0], since)
    last = min(before[-1][0], after[-1][0])
    old, new = _between(before, first, last), _between(after, first, last)
    if min(len(old), len(new)) < MIN_QUIET_LOGS:
        return None
    # A loss may span decades, so what counts is how many times higher it is.
    is_log = all(value > 0 for _, value in (*old, *new))
    noise = max(_noise(_on_scale(points, is_log=is_log)) for points in (before, after))
    differ = [
        _sign(mine, theirs, noise, is_log=is_log)
        for mine, theirs in _stretches(_on_scale(old, is_log=is_log), _on_scale(new, is_log=is_log))
    ]
    if not differ:
        return None
    lower, higher = (sum(one == sign for one in differ) / len(differ) for sign in (-1, 1))
    result: Literal["lower", "higher", "same", "mixed"] = "mixed"
    if lower >= MOST or higher >= MOST:
        result = "lower" if lower >= MOST else "higher"
    elif lower + higher <= FEW:
        result = "same"
    return CurveComparison(
        series=name,
        first_step=first,
        last_step=last,
        before=_middle(old),
        after=_middle(new),
        noise=noise,
        is_noise_relative=is_log,
        result=result,
    )


def _stretches(old: Points, new: Points) -> Iterator[tuple[list[float], list[float]]]:
    """Yield the values of both, for each stretch in which both have values."""
    num = max(1, min(MAX_BLOCKS, len(old), len(new)))
    first, last = min(old[0][0], new[0][0]), max(old[-1][0], new[-1][0])
    width = (last - first + 1) / num
    for place in range(num):
        begin, end = first + place * width, first + (place + 1) * width
        mine = [value for step, value in old if begin <= step < end]
        theirs = [value for step, value in new if begin <= step < end]
        if mine and theirs:
            yield mine, theirs


def _sign(old: Sequence[float], new: Sequence[float], noise: float, *, is_log: bool) -> int:
    """Return -1 if AFTER is lower, 1 if it is higher, 0 if there is no more than noise between them."""
    a, b = _level(old), _level(new)
    if not (math.isfinite(a) and math.isfinite(b)):
        return 0 if math.isfinite(a) == math.isfinite(b) else 1 if math.isfinite(a) else -1
    error = 1.2533 * noise * math.sqrt(1 / len(old) + 1 / len(new))
    bound = max(BEYOND_NOISE * error, MIN_RELATIVE_NOISE * (1 if is_log else max(abs(a), abs(b))))
    return 0 if abs(b - a) <= bound else 1 if b > a else -1


def _level(values: Sequence[float]) -> float:
    """Return the median; infinite if a value is not finite."""
    return median(values) if all(map(math.isfinite, values)) else math.inf


def _middle(points: Points) -> float:
    return median([value for _, value in points if math.isfinite(value)] or [math.nan])


def _noise(points: Points) -> float:
    """Return the noise by second differences, which a trend does not affect."""
    values = [value for _, value in points if math.isfinite(value)]
    if len(values) < MIN_QUIET_LOGS:
        return 0.0
    bends = [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return GAUSSIAN * median(bends) / math.sqrt(6)


def _on_scale(points: Points, *, is_log: bool) -> Points:
    """Return the points as they are, or with logarithms."""
    if not is_log:
        return points
    return tuple((step, math.log(value) if 0 < value < math.inf else math.inf) for step, value in points)


def _between(points: Points, first: int, last: int) -> Points:
    return tuple(point for point in points if first <= point[0] <= last)


def _own_curve(fault: PastFault, compared: Sequence[CurveComparison]) -> CurveComparison | None:
    """Return the curve in which the fault shows, if it was compared from the fault's first step on."""
    name = SERIES_OF.get(fault.cause, LOSS)
    return next((one for one in compared if one.series == name and one.first_step >= fault.first_step), None)


def _shows_in_curve(fault: PastFault) -> bool:
    return fault.cause in SERIES_OF or _kind(fault.cause) in {"blow up", "stand still"}


def _is_high_bad(fault: PastFault) -> bool:
    """Whether a higher curve is a worse one, which it is not if gradients or updates are missing."""
    return _shows_in_curve(fault) and _kind(fault.cause) != "stand still"


def _with_measured(record: RunRecord) -> RunRecord:
    """Add faults that the curves show by themselves if none was named, so that both runs are measured by one rule."""
    if record.faults:
        return record
    made = [_measured(record, name, cause) for name, cause in ((LOSS, "loss_divergence"), (EVALUATION, "overfitting"))]
    return msgspec.structs.replace(record, faults=tuple(one for one in made if one is not None))


def _measured(record: RunRecord, name: str, cause: str) -> PastFault | None:
    """Return a fault if a curve's last quarter is far above its best stretch, and for the loss also above its beginning."""
    points = tuple(point for point in record.series.get(name, ()) if math.isfinite(point[1]))
    if len(points) < MIN_MEASURED or min(value for _, value in points) <= 0:
        return None
    levels = [(points[at][0], median(value for _, value in points[at : at + 3])) for at in range(len(points) - 2)]
    best_step, best = min(levels, key=lambda one: one[1])
    end, floor = median(value for _, value in points[-len(points) // 4 :]), levels[0][1] if name == LOSS else best
    if math.log(end / floor) < max(math.log(FAR_ABOVE[name]), 4 * _noise(_on_scale(points, is_log=True))):
        return None
    bound = floor + (end - floor) / 2
    onset = next((step for step, value in points if step >= best_step and value > bound), best_step)
    said = f"The {name} ends at {end:.4g}, {end / floor:.3g} times its {'beginning' if name == LOSS else 'best'}, since step {onset}."
    return PastFault(
        id="",
        cause=cause,
        severity="critical" if name == LOSS else "warning",
        symptom=said,
        first_step=onset,
        detected_step=points[-1][0],
    )


def _kind(cause: str) -> str:
    """Return the kind of a cause: causes of one kind look alike; a hang and a death are kinds of their own."""
    entry = CAUSES.get(cause)
    if entry is not None and entry.is_hang:
        return "hang"
    if entry is not None and entry.is_death:
        return "end"
    return SAME_SYMPTOM.get(cause, cause)


def _is_known(fault: PastFault, others: Sequence[PastFault]) -> bool:
    return any(_kind(one.cause) == _kind(fault.cause) for one in others)


def _is_as_grave(fault: PastFault, old: PastFault) -> bool:
    return WORST_FIRST.index(fault.severity) <= WORST_FIRST.index(old.severity)


def _is_within(fault: PastFault, before: RunRecord) -> bool:
    """Whether the fault is at a step that BEFORE reached; BEFORE might have shown a later one too if it had run on."""
    return fault.first_step <= before.last_step


def _where(fault: PastFault) -> str:
    at = f" at step {fault.first_step}" if fault.first_step >= 0 else ""
    return f"{fault.cause}{at}"


def _remarks(before: RunRecord, after: RunRecord, changes: Sequence[SettingChange]) -> Iterator[str]:
    if len(changes) > 1:
        yield f"{len(changes)} things changed between the two: nobody knows which one helped. Change one at a time."
    elif not changes and before.settings and after.settings:
        yield "Nothing that was written down changed between the two: if something helped, it is not among it, or it was chance."
    later = [one for one in after.faults if not _is_known(one, before.faults) and not _is_within(one, before)]
    yield from (f"{_where(one)} is new, at a step that {before.name} never reached: {one.symptom}" for one in later)
