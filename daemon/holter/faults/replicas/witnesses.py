"""Which rank left the others where replicas parted: witnesses are asked in turn, and the first that knows counts.

A majority is one of them. What goes before it knows better: a rank that treats its gradients otherwise than its peers, a setting that
left its schedule, weights that changed between two steps. What follows it breaks the tie where there is no majority.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from holter.faults.replicas.replica_case import Case
from holter.faults.shared.parting import Parting, changed_alone, column, majority_evidence, tables_at, tensor_evidence
from holter.faults.shared.wording import listed, ranks_text
from holter.faults.window import Window
from holter.records import Evidence, Table

SAME = 1e-3
"""Two factors this close, relatively, are the same: norms are sent as float32."""
FAR = 20.0
"""A tensor that moved this many times as far as a peer's was not moved by training."""
TELLING = 0.02
"""A sum this large relative to the norm is no rounding; one that follows its norm's factor less closely than this was
not scaled."""
STRAYED = 2.0
"""A step this many times as far from the step before as a peer's has strayed."""
NOISE = 1e-5
"""Share of a sum below which a difference is rounding."""
ROUND = 1e-5
"""A factor this close to a multiple of a twentieth was written by hand; no clip arrives at one."""
MAX_SETTINGS_SHOWN = 8
MIN_USUAL = 8
"""Number of comparisons at which all ranks must have scaled alike before a different factor means anything."""

AskWitness = Callable[[Case], tuple[int, ...]]
"""Returns the ranks that left, by one kind of evidence; empty if that does not tell."""


def who_left(case: Case) -> tuple[tuple[int, ...], str]:
    """Return the ranks that left, and why; all compared ranks and no reason if no witness knows."""
    for witness, why in WITNESSES:
        if ranks := witness(case):
            return ranks, why
    return case.first.ranks, ""


@dataclass(frozen=True)
class Factors:
    """The factors by which one rank multiplied its reduced gradients before the optimizer got them."""

    inside: tuple[float, float]
    """Smallest and largest factor of the tensors that differ between ranks."""
    outside: tuple[float, float] | None
    """The same for tensors that agree; None if there are none."""

    @property
    def is_uneven(self) -> bool:
        """Whether it treats the two kinds differently but each kind alike; a clip by value spreads its factors anyway."""
        if self.outside is None or not _is_same(*self.inside):
            return False
        return not (_is_same(self.inside[0], self.outside[0]) and _is_same(self.inside[1], self.outside[1]))

    @property
    def is_spread(self) -> bool:
        """Whether the tensors that differ between ranks were each changed by another factor."""
        low, high = self.inside
        return high - low > TELLING * high

    @property
    def is_untouched(self) -> bool:
        """Whether it left the differing tensors as the reduction made them."""
        return _is_same(self.inside[0], 1.0) and _is_same(self.inside[1], 1.0)

    @property
    def is_odd(self) -> bool:
        """Whether no clip can have made this factor, because it enlarges or is a round number."""
        low, high = self.inside
        return high > 1 + SAME or (not self.is_untouched and abs(low * 20 - round(low * 20)) < 20 * ROUND)


def factors(case: Case) -> dict[int, Factors]:
    """Return the factors by rank, where norms are known from before and after."""
    parting, found = case.given, {}
    if parting is None:
        return {}
    reduced = tables_at(case.window, "gradients_reduced", parting.step, parting.ranks)
    given = tables_at(case.window, parting.tensor_class, parting.step, parting.ranks)
    differing = set(case.in_given.tensors)
    for rank in sorted(set(reduced) & set(given)):
        before, after = column(reduced[rank], reduced[rank].norms), column(given[rank], given[rank].norms)
        ratios = {
            name: after[name] / norm
            for name, norm in before.items()
            if name in after and 0 < norm < math.inf and math.isfinite(after[name])
        }
        inside = [ratio for name, ratio in ratios.items() if name in differing]
        outside = [ratio for name, ratio in ratios.items() if name not in differing]
        if inside:
            found[rank] = Factors((min(inside), max(inside)), (min(outside), max(outside)) if outside else None)
    return found


def altered(case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return ranks whose given gradients are no multiple of the reduced ones, or are gone; and all that are known.

    Known are ranks whose gradients were read both before and after. Scaling changes the norm and the sum of a tensor alike, and
    one tensor as much as another.
    """
    parting = case.given
    if parting is None:
        return (), ()
    reduced = tables_at(case.window, "gradients_reduced", parting.step, parting.ranks)
    given = tables_at(case.window, parting.tensor_class, parting.step, parting.ranks)
    known = tuple(sorted(set(reduced) & set(given)))
    of_rank = factors(case)
    found = [
        rank
        for rank in known
        if (rank in of_rank and of_rank[rank].is_spread)
        or (rank in of_rank and of_rank[rank].is_untouched and _has_changed(reduced[rank], given[rank], case))
        or _is_altered(reduced[rank], given[rank], case.in_given.tensors)
    ]
    return tuple(found), known


def _has_changed(reduced: Table, given: Table, case: Case) -> bool:
    """Whether differing tensors are not, bit for bit, what the reduction left although their norms are.

    Then elements were changed, not all of them scaled.
    """
    before, after = column(reduced, reduced.fingerprints), column(given, given.fingerprints)
    # In a first step, some become known too late to be read as the reduction left them.
    return any(before[name] != after[name] for name in case.in_given.tensors if name in before and name in after)


def _is_altered(reduced: Table, given: Table, names: Iterable[str]) -> bool:
    norms, sums = column(reduced, reduced.norms), column(reduced, reduced.sums)
    new_norms, new_sums = column(given, given.norms), column(given, given.sums)
    told = []
    for name in names:
        norm, total = norms.get(name, 0.0), abs(sums.get(name, 0.0))
        factor = new_norms.get(name, math.nan) / norm if norm > 0 else math.nan
        if factor == 0:
            told.append(True)
        elif math.isfinite(factor) and total > TELLING * norm and name in new_sums:
            told.append(abs(abs(new_sums[name]) / total - factor) > TELLING * factor)
    return 2 * sum(told) > len(told)


def is_pass_after_reduction(case: Case) -> bool:
    """Whether a rank reports that the last backward pass of the step reduced nothing."""
    said = dict(case.window.values("backward.after_reduction")).get(case.given.step) if case.given else None
    return said is not None and said.high > 0


def is_added_to(case: Case) -> bool | None:
    """Whether something of a rank's own was added to its gradients after the reduction, as by a later backward pass.

    Nothing that clips or scales makes a tensor's norm larger and changes its sum differently.
    """
    parting = case.given
    if parting is None:
        return None
    reduced = tables_at(case.window, "gradients_reduced", parting.step, parting.ranks)
    given = tables_at(case.window, parting.tensor_class, parting.step, parting.ranks)
    return is_pass_after_reduction(case) or any(
        own.inside[1] > 1 + TELLING and _is_altered(reduced[rank], given[rank], case.in_given.tensors)
        for rank, own in factors(case).items()
    )


def off_by_a_step(case: Case) -> tuple[tuple[int, ...], str]:
    """Return ranks that left out a step or took one too many, and a sentence saying so.

    All ranks if it is unknown which of these it was.
    """
    behind, ahead, steps = case.apart.behind, case.apart.ahead, case.apart.steps
    if not steps:
        return (), ""
    if case.apart.is_without_pass:
        return (
            ahead,
            f"{ranks_text(ahead)} made step {steps[0]} without a backward pass, which nobody had done before: an optimizer step that the others did not take",
        )
    equal = (
        f"what the reduction gave {ranks_text(behind)} at steps {listed(map(str, steps))} is, bit for bit, what "
        f"{ranks_text(ahead)} got one step later"
    )
    counts = dict(case.window.values("micro_steps"))
    passes = [counts[step] for step in {steps[0] - 1, steps[0], case.first.step} if step in counts]
    is_alone = any(one.low == 0 and one.low_rank in ahead for one in passes)
    is_double = any(one.high > one.low > 0 and one.high_rank in behind for one in passes)
    if len(ahead) < len(behind) or (len(ahead) == len(behind) and is_alone):
        return ahead, f"{equal}: {ranks_text(ahead)} took an optimizer step that the others did not"
    if len(behind) < len(ahead) or is_double:
        return behind, f"{equal}: {ranks_text(behind)} left out an optimizer step, and counts one less since"
    return case.first.ranks, f"{equal}: one side left out an optimizer step, or the other took one too many"


def _altered_alone(case: Case) -> tuple[int, ...]:
    found, known = altered(case)
    return case.given.group_of(found) if case.given and 0 < len(found) < len(known) else ()


def _some_of(case: Case, is_suspect: Callable[[Factors], bool]) -> tuple[int, ...]:
    """Return ranks with suspect factors between the reduction and the optimizer, and those that agree with them.

    Nobody if all factors are suspect.
    """
    of_rank = factors(case)
    suspects = [rank for rank, own in of_rank.items() if is_suspect(own)]
    return case.given.group_of(suspects) if case.given and 0 < len(suspects) < len(of_rank) else ()


def _usual_factor(case: Case) -> float | None:
    """Return the factor by which all ranks scaled their reduced gradients before they differed.

    None if it varied, or a clip may have made it.
    """
    step = case.given.step if case.given else 0
    reduced = {at: spread.mean for at, spread in case.window.values("norm.gradients_reduced") if at < step}
    given = {at: spread.mean for at, spread in case.window.values("norm.gradients") if at < step}
    usual = [given[at] / norm for at, norm in reduced.items() if norm > 0 and at in given]
    has_clip = any(at < step for at, _ in case.window.values("clip.norm"))
    return usual[-1] if len(usual) >= MIN_USUAL and not has_clip and _is_same(min(usual), max(usual)) else None


def _left_the_usual(case: Case) -> tuple[int, ...]:
    usual = _usual_factor(case)
    return () if usual is None else _some_of(case, lambda own: not all(_is_same(one, usual) for one in own.inside))


def _touched_before_the_clip(case: Case) -> tuple[int, ...]:
    """Return the rank whose clip met another norm than the reduction had left."""
    step = case.given.step if case.given else -1
    met, left = (dict(case.window.values(name)).get(step) for name in ("clip.norm", "norm.gradients_reduced"))
    if case.given is None or met is None or left is None or met.num < 2 or not _is_same(left.low, left.high):  # noqa: PLR2004
        return ()
    for rank, value, other in ((met.low_rank, met.low, met.high), (met.high_rank, met.high, met.low)):
        rest = (met.mean * met.num - value) / (met.num - 1)
        if _is_same(rest, left.mean) and _is_same(other, left.mean) and not _is_same(value, left.mean):
            return case.given.group_of([rank])
    return ()


def _off_the_clip(case: Case) -> tuple[int, ...]:
    """Return ranks whose factor is not what the clip they called makes of its norm and limit, if others' is."""
    step = case.given.step if case.given else -1
    norm, limit = (dict(case.window.values(name)).get(step) for name in ("clip.norm", "clip.limit"))
    if norm is None or limit is None or not (_is_same(norm.low, norm.high) and _is_same(limit.low, limit.high)):
        return ()
    made = min(1.0, limit.mean / (norm.mean + 1e-6))
    return _some_of(case, lambda own: not all(_is_same(factor, made) for factor in own.inside))


def _left_schedule(case: Case) -> tuple[int, ...]:
    """Return ranks whose setting did not continue as all did before, by adding or multiplying, if others' did."""
    parting, past = case.settings, case.past_of_settings
    if parting is None or len(past) != 2 or past[0] != parting.step - 1:  # noqa: PLR2004 - the two steps before this one
        return ()
    tables = [tables_at(case.window, parting.tensor_class, step, parting.ranks) for step in (parting.step, *past)]
    for name in case.in_settings.tensors:
        off = {}
        for rank in set.intersection(*(set(of_rank) for of_rank in tables)):
            values = [dict(zip(of[rank].names, of[rank].norms, strict=False)).get(name) for of in tables]
            if None not in values:
                off[rank] = _strayed(*(value for value in values if value is not None))
            elif values[0] is None and None not in values[1:]:
                # A missing count: the state was cleared.
                off[rank] = math.inf
        far = [rank for rank, way in off.items() if way > SAME]
        if far and len(far) < len(off):
            return parting.group_of(far)
    return ()


def _settings_changed_alone(case: Case) -> tuple[int, ...]:
    past = case.past_of_settings
    if case.settings is None or not past:
        return ()
    alone = changed_alone(case.window, case.settings, past[0], case.in_settings.tensors)
    strayed = _left_schedule(case)
    # If a schedule moves all settings, the one that stood still is not the sound one.
    return () if strayed and alone != strayed else alone


def _jump(case: Case) -> tuple[tuple[int, ...], str]:
    """Return ranks on which a tensor moved much farther since an earlier step than on the others, and a sentence saying so."""
    parting, past = case.weights, next(iter(case.past_of_weights), None)
    if parting is None or past is None:
        return (), ""
    now = tables_at(case.window, parting.tensor_class, parting.step, parting.ranks)
    then = tables_at(case.window, parting.tensor_class, past, parting.ranks)
    for name in case.in_weights.tensors:
        gone = {rank: _way(then[rank], now[rank], name) for rank in sorted(set(now) & set(then))}
        known = {rank: way for rank, way in gone.items() if math.isfinite(way)}
        least = min(known.values(), default=0.0)
        far = [rank for rank, way in known.items() if way > FAR * least and way > 0]
        if len(known) > 1 and far and len(far) < len(known):
            shown = ", ".join(f"{way:.3g} on rank {rank}" for rank, way in known.items())
            text = f"from step {past} to step {parting.step} the sum of {name} moved by {shown}"
            return parting.group_of(far), text
    return (), ""


def _stride(case: Case) -> tuple[tuple[int, ...], str]:
    """Return ranks whose step strays most from the step that all had taken before, and a sentence saying so.

    The steps are made of equal gradients. Moments change little from one step to the next, and so do the steps that they make of
    the gradients; a rank with damaged moments steps differently.
    """
    parting, past = case.weights, case.past_of_weights
    if parting is None or len(past) != 2:  # noqa: PLR2004 - the two steps before this one
        return (), ""
    now, last, before = (
        tables_at(case.window, parting.tensor_class, step, parting.ranks) for step in (parting.step, *past)
    )
    if not last or not before:
        return (), ""
    # All ranks agreed at those steps, so any rank's tables stand for all.
    last_sums, before_sums = (_sums(next(iter(tables.values()))) for tables in (last, before))
    names = [name for name in case.in_weights.tensors if name in last_sums and name in before_sums]
    # This step minus the one before it.
    strayed = {
        rank: math.hypot(
            *(_sums(table).get(name, math.nan) - 2 * last_sums[name] + before_sums[name] for name in names)
        )
        for rank, table in sorted(now.items())
    }
    noise = NOISE * math.hypot(*(last_sums[name] for name in names))
    known = all(map(math.isfinite, strayed.values())) and max(strayed.values(), default=0.0) > noise
    far = [rank for rank, way in strayed.items() if known and way > STRAYED * min(strayed.values())]
    if not far or len(far) == len(strayed):
        return (), ""
    shown = ", ".join(f"{way:.3g} on rank {rank}" for rank, way in strayed.items())
    text = f"how far step {parting.step} leaves the way of the step before it, by the tensors' sums: {shown}"
    return parting.group_of(far), text


def _sums(table: Table) -> dict[str, float]:
    return column(table, table.sums)


WITNESSES: tuple[tuple[AskWitness, str], ...] = (
    (lambda case: off_by_a_step(case)[0], "its count of steps is one off"),
    (_altered_alone, "what its optimizer is given is no multiple of what the reduction gave"),
    (
        lambda case: _some_of(case, lambda own: own.is_uneven),
        "it scales some of its reduced gradients otherwise than the rest",
    ),
    (lambda case: case.given.minority if case.given else (), "most ranks give their optimizers the same gradients"),
    (_left_the_usual, "it scales its gradients otherwise than all did before"),
    (_touched_before_the_clip, "its clip meets another norm than the reduction left"),
    (_off_the_clip, "its factor is not the one that the clip's norm and limit make"),
    (
        lambda case: _some_of(case, lambda own: own.is_odd),
        "it scales its gradients by a factor that no clip arrives at",
    ),
    (lambda case: _some_of(case, lambda own: own.is_untouched), "it leaves out the scaling that its peers do"),
    (lambda case: case.settings.minority if case.settings else (), "most ranks' optimizers have the same settings"),
    (_left_schedule, "its setting left the schedule that all followed"),
    (_settings_changed_alone, "its settings changed, its peers' did not"),
    (lambda case: _jump(case)[0], "its weights went where no training leads"),
    (lambda case: case.broke.ranks, "its weights changed between two steps"),
    (lambda case: case.first.minority, "most ranks agree"),
    (lambda case: case.in_weights.rounded_ranks, "its weights have lost their low bits"),
    (lambda case: case.in_weights.odd_ranks, "the norm of its weights is implausible"),
    (lambda case: _stride(case)[0], "its step is least like the one before it"),
)
"""The witnesses in the order in which they are asked, each with its reason."""


def parting_evidence(case: Case) -> Iterator[Evidence]:
    """Yield what was read besides the classes' own tables: factors of gradients, settings, a jump of the weights."""
    if (off := off_by_a_step(case))[0]:
        yield Evidence(kind="history", summary=off[1], values={"ranks": list(off[0]), "steps": list(case.apart.steps)})
    if case.given:
        yield from _clipping_evidence(factors(case), case.given.step)
    elif case.settings:
        yield from _settings_evidence(case, case.settings)
    elif (strayed := _jump(case) if _jump(case)[0] else _stride(case))[0]:
        yield Evidence(kind="history", summary=strayed[1], values={"ranks": list(strayed[0])})


def culprit_evidence(case: Case) -> Iterator[Evidence]:
    """Yield how it is known which rank left, or that it is not."""
    broke, difference = case.broke, case.in_weights
    if broke.ranks:
        others = "the others' did not"
        if broke.unseen:
            others = (
                f"{ranks_text(broke.unseen)} could not be read there, and at no step before had anybody's changed so"
            )
        yield Evidence(
            kind="history",
            summary=f"the weights of {ranks_text(broke.ranks)} changed between the end of the step before and the start of step "
            f"{broke.step}, with no optimizer step between; {others}",
            values={"ranks": list(broke.ranks), "step": broke.step},
        )
    elif broke.is_on_all:
        yield Evidence(
            kind="history",
            summary="every rank's weights changed between two steps: the script itself changes them, on all ranks"
            + ("; it had not done so before" if broke.is_new else ""),
        )
    yield majority_evidence(case.first)
    if difference.odd_ranks:
        yield Evidence(
            kind="implausible",
            summary=f"{difference.odd_text}: {ranks_text(difference.odd_ranks)} cannot be right",
            values={"ranks": list(difference.odd_ranks)},
        )
    if difference.rounded_ranks:
        yield Evidence(
            kind="precision",
            summary=f"on {ranks_text(difference.rounded_ranks)} the low mantissa bits of the tensors that differ are all zero, on the others "
            "they are not: only there the values have passed through a narrower dtype",
            values={"ranks": list(difference.rounded_ranks)},
        )


def _clipping_evidence(of_rank: dict[int, Factors], step: int) -> Iterator[Evidence]:
    """Show the ranks' factors side by side."""
    if not of_rank:
        return
    shown = []
    for rank, own in of_rank.items():
        rest = "" if own.outside is None else f", the others by {_range(*own.outside)}"
        shown.append(f"rank {rank} multiplied the tensors that differ by {_range(*own.inside)}{rest}")
    yield Evidence(
        kind="clipping",
        summary=f"step {step}, between the reduction and the optimizer: {'; '.join(shown)}",
        values={str(rank): list(own.inside) for rank, own in of_rank.items()},
    )


def _settings_evidence(case: Case, parting: Parting) -> Iterator[Evidence]:
    alone = _settings_changed_alone(case)
    lines: list[Evidence] = []
    if parting.tensor_class == "hyperparameters":
        lines = _setting_lines(case.window, parting, case.in_settings.tensors[:MAX_SETTINGS_SHOWN])
        if alone:
            summary = f"since they last agreed, the settings that differ have changed on {ranks_text(alone)} and not on the others"
            lines.append(Evidence(kind="history", summary=summary, values={"ranks": list(alone)}))
    yield from lines or tensor_evidence(parting, case.in_settings)


def _setting_lines(window: Window, parting: Parting, tensors: Iterable[str]) -> list[Evidence]:
    """Return each setting that differs, with its value on each side."""
    now = tables_at(window, parting.tensor_class, parting.step, parting.ranks)
    # Settings are always read: 0 is a value.
    values = {rank: dict(zip(table.names, table.norms, strict=True)) for rank, table in now.items() if table.norms}
    lines = []
    for name in tensors:
        of_rank = {rank: of[name] for rank, of in values.items() if name in of}
        shown = " and ".join(
            f"{value:.6g} on {ranks_text(parting.group_of([rank]))}"
            for rank, value in sorted(of_rank.items())
            if rank == min(other for other in of_rank if other in parting.group_of([rank]))
        )
        if shown:
            lines.append(
                Evidence(
                    kind="setting",
                    summary=f"{name} is {shown} at step {parting.step}",
                    values={str(rank): value for rank, value in of_rank.items()},
                )
            )
    return lines


def _strayed(now: float, last: float, before: float) -> float:
    """Return how far a value is from where its schedule was going, relatively; 0 if exactly there."""
    usual = abs(last - before)
    expected = [2 * last - before, *([last * last / before] if before else [])]
    # A schedule that bends a little from step to step is still a schedule.
    return max(0.0, min(abs(now - value) for value in expected) - usual / 4) / max(abs(last), abs(now), 1e-30)


def _way(then: Table, now: Table, name: str) -> float:
    """Return how far a tensor's sum moved; NaN if unknown."""
    return abs(column(now, now.sums).get(name, math.nan) - column(then, then.sums).get(name, math.nan))


def _is_same(one: float, other: float) -> bool:
    return abs(one - other) <= SAME * max(abs(one), abs(other))


def _range(low: float, high: float) -> str:
    return f"{low:.4g}" if _is_same(low, high) else f"{low:.4g} to {high:.4g}"
