"""Replica divergence: tensors that must be equal on all ranks are not.

What it detects
    Replicas whose parameters (before or after the optimizer's step), gradients (as reduced, and as the optimizer is given them), or
    optimizer's settings and state differ between ranks, compared by fingerprint, bit for bit: since which step, in which tensors, on
    which ranks. It also says whether they were equal at first, whether gradients part at the reduction or after it, in all tensors or a
    few, once or ever since, and whose weights changed between two steps although no optimizer ran.

Why it matters
    Replicas that part train different models while the loss curve looks ordinary. Only rank 0's weights are usually saved, so the
    others' work is lost and nobody is told.

False positives
    Only replicas known as such (from the wrapper, or from a reduction that the script calls) are compared; settings only where all that
    trains is replicated. Local SGD and other methods that let replicas part on purpose between two averagings are reported. Ranks whose
    models differ in structure are left to `structure_mismatch`. After a NaN the bit patterns of NaN may differ between ranks: that is
    listed under the NaN, not separately.

What to do
    Read which came first. Different from the start: initialisation. Gradients differ at every step: the reduction is bypassed, for all
    tensors or for those named. Gradients part after the reduction: clipping. Gradients agree and settings do not: the optimizer. One
    rank's weights changed by themselves: suspect its memory. With two ranks there is no majority; unless a rank's own history or an
    implausible norm breaks the tie, both are named.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from holter.faults.replicas.replica_case import (
    PARAMETERS,
    SETTINGS,
    Case,
    agreed_steps,
    are_settings_common,
    extra_step,
    is_beginning_forgotten,
    must_agree,
    steps_apart,
    unused_names,
)
from holter.faults.replicas.witnesses import (
    altered,
    culprit_evidence,
    is_added_to,
    is_pass_after_reduction,
    parting_evidence,
    who_left,
)
from holter.faults.shared.axes import AxisView, first_view
from holter.faults.shared.mismatched_calls import MIN_STEPS, are_counted, uncounted
from holter.faults.shared.parting import (
    WORDS,
    Difference,
    Parting,
    agreed_since,
    find_parting,
    history_evidence,
    tables_at,
    tensor_evidence,
)
from holter.faults.shared.structure import compare_structures
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import cap, modules_of, named, ranks_text
from holter.faults.window import Window
from holter.records import Evidence, Finding

GRADIENTS = ("gradients_reduced", "gradients")


@dataclass(frozen=True)
class ReplicaDivergence:
    """Judges when replicas first differed, in what, and which rank left the others."""

    name: ClassVar[str] = "replica_divergence"

    patience_s: float = threshold(2.0, at_least=0)
    """Seconds to wait for ranks that have not reported the step or their calls of it, because they may make the majority."""
    state_patience_s: float = threshold(10.0, at_least=0)
    """Seconds to wait for the next comparison of the optimizers' moments, if nothing else tells how the weights came to differ."""
    ranks_per_group: int = 2
    """Number of ranks with equal roots that are asked for their table of fingerprints."""
    max_ranks_asked: int = threshold(8, at_least=2)  # A comparison needs two.
    """Number of ranks that are asked in all."""
    implausible_ratio: float = 100.0
    """A norm this many times its peers' is the implausible side."""
    nearly_all: float = 0.9
    """Share of a class's tensors from which on all count as differing: a few gradients may be equal by chance."""
    rounding_distance: float = 1e-4
    """Replicas that are closer than this, relatively, may have come to differ by rounding alone."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: the first parting, of all ranks or along an axis.

        It requests tables until they are there or cannot be had.
        """
        yield from first_view(window, self._judge_view)

    def _judge_view(self, view: AxisView) -> Iterator[Finding]:
        window = view.window
        partings = {name: parting for name in WORDS if (parting := find_parting(window, name))}
        if not partings or not (view.axis or must_agree(window) or SETTINGS[0] in partings):
            return
        if not are_settings_common(window):
            partings = {name: parting for name, parting in partings.items() if name not in SETTINGS}
        apart = steps_apart(window, partings.get("gradients_reduced"))
        if not apart.steps:
            apart = extra_step(window, min(partings.values(), key=lambda parting: parting.step, default=None))
        followers = {name: parting for name, parting in partings.items() if name in GRADIENTS}
        window, partings = _without_followers(window, partings)
        followers = {name: parting for name, parting in followers.items() if name not in partings}
        first = min(partings.values(), key=lambda parting: parting.step, default=None)
        if first is None or is_beginning_forgotten(window, first, partings) or compare_structures(window):
            return
        if self._is_waiting(window, first):
            return
        case = Case(
            window,
            first,
            partings,
            nearly_all=self.nearly_all,
            implausible_ratio=self.implausible_ratio,
            max_ranks_asked=self.max_ranks_asked,
            ranks_per_group=self.ranks_per_group,
            apart=apart,
            followers=followers,
        )
        needs = tuple(case.requests())
        if needs:
            yield Finding(
                detector=self.name,
                severity="critical",
                first_step=first.step,
                detected_step=first.step,
                ranks=first.ranks,
                summary=f"{cap(WORDS[first.tensor_class])} differ between ranks at step {first.step}.",
                facts={"first_class": first.tensor_class, "compared_ranks": list(first.ranks)},
                needs=needs,
            )
            return
        if not _may_be_left_out(window, first, self.patience_s) and not self._is_state_awaited(case):
            yield _explained(case, self.rounding_distance)

    def _is_waiting(self, window: Window, parting: Parting) -> bool:
        view = window.step(parting.step)
        return bool(view and view.missing and window.now_ns - view.first_seen_ns < self.patience_s * 1e9)

    def _is_state_awaited(self, case: Case) -> bool:
        """Whether to wait for the moments.

        If weights came to differ between two comparisons, the moments tell a bad update from bad memory.
        """
        window, weights, state = case.window, case.weights, case.window.tensors.classes.get("optimizer_state")
        view = window.step(weights.step) if weights else None
        if weights is None or view is None or state is None or case.reduced or case.given or case.settings:
            return False
        last = case.agreed_before(weights)
        is_between = last is not None and last < weights.step - 1 and not case.broke.ranks
        has_looked = max(state.last_equal_step or 0, state.first_unequal_step or 0) >= weights.step
        age_s = (window.now_ns - view.first_seen_ns) / 1e9
        return is_between and not has_looked and age_s < self.state_patience_s and not window.processes.exits


def _without_followers(window: Window, partings: dict[str, Parting]) -> tuple[Window, dict[str, Parting]]:
    """Leave out gradients that differ only because the weights they are computed from do.

    That is so if no reduction makes them equal along an axis.
    """
    later = {name for name in GRADIENTS if name in partings and _is_follower(window, partings, partings[name])}
    if not later:
        return window, partings
    classes = dict(window.tensors.classes)
    for name in later:
        before = classes[name]
        if before.num_equal:
            classes[name] = replace(before, first_unequal_step=None, num_unequal=0)
        else:
            del classes[name]
    return (
        replace(window, tensors=replace(window.tensors, classes=classes)),
        {name: parting for name, parting in partings.items() if name not in later},
    )


def _is_follower(window: Window, partings: dict[str, Parting], gradients: Parting) -> bool:
    """Whether settings or weights differed before these gradients did.

    At an earlier step, or between two steps, before the backward pass read them.
    """
    settings = partings.get("hyperparameters")
    if settings and gradients.step > settings.step:
        return True
    known = [partings[name] for name in PARAMETERS if name in partings]
    weights = min(known, key=lambda parting: parting.step, default=None)
    if weights is None or weights.step > gradients.step:
        return False
    if weights.step < gradients.step:
        return bool(_agreed_at(window, gradients.tensor_class, weights))
    after = window.tensors.classes.get("parameters_after")
    return (
        weights.tensor_class == "parameters_before" and after is not None and after.last_equal_step == weights.step - 1
    )


def _may_be_left_out(window: Window, parting: Parting, patience_s: float) -> bool:
    """Whether a rank may have left out the reduction, if gradients differ from one step to the next.

    Its count of calls will tell. Recorders are copied every second or two. If a rank did leave it out, `collective_mismatch`
    explains it better, and gets time to read them.
    """
    view = window.step(parting.step)
    is_sudden = (
        "gradients" in parting.tensor_class and window.tensors.classes[parting.tensor_class].num_equal >= MIN_STEPS
    )
    if view is None or not is_sudden or window.processes.exits:
        return False
    age_s = (window.now_ns - view.first_seen_ns) / 1e9
    if uncounted(window) is not None:
        return age_s < 3 * patience_s
    return age_s < 2 * patience_s and not are_counted(window.calls.counts, parting.ranks, parting.step)


def _explained(case: Case, rounding_distance: float) -> Finding:
    window, first = case.window, case.first
    in_weights, in_reduced, in_given, broke = case.in_weights, case.in_reduced, case.in_given, case.broke
    ranks, why = who_left(case)
    gradients = in_given if case.given else in_reduced
    leading = gradients if case.given or "gradients" in first.tensor_class else in_weights
    facts = {
        "first_class": first.tensor_class,
        "compared_ranks": list(first.ranks),
        "parameter_tensors": list(in_weights.tensors),
        "gradient_tensors": list(gradients.tensors),
        "own_history_broke_on_some": None if broke.is_on_all is None else bool(broke.ranks),
        "own_history_broke_on_all": broke.is_on_all,
        "were_all_set_at_once": broke.is_new,
        "has_majority": bool(first.minority),
        "has_implausible_side": bool(in_weights.odd_ranks) if in_weights.has_norms else None,
        "is_culprit_known": bool(why),
        "parameters_differ_in_all_tensors": in_weights.is_all,
        "gradients_differ_in_all_tensors": in_reduced.is_all,
        "is_one_side_rounded": bool(in_weights.rounded_ranks) if in_weights.num_tensors else None,
        "is_distance_tiny": _is_tiny(case, in_weights, gradients, rounding_distance),
        **_unused(case, in_reduced),
        "is_randomness_apart": _is_randomness_apart(window, first),
        **_when_weights(case),
        **_when_gradients(case),
        **_settings(case),
    }
    step = broke.step if broke.step is not None else first.step
    evidence = (
        *history_evidence(window.tensors.classes),
        *tensor_evidence(case.weights, in_weights),
        *tensor_evidence(case.reduced, in_reduced),
        *tensor_evidence(case.given, in_given),
        *_follower_evidence(case),
        *parting_evidence(case),
        *_unused_evidence(case, in_reduced),
        *culprit_evidence(case),
    )
    return Finding(
        detector=ReplicaDivergence.name,
        severity="critical",
        first_step=step,
        detected_step=first.step,
        ranks=ranks,
        tensors=leading.tensors,
        modules=modules_of(leading.tensors),
        summary=_summary(first, step, leading if leading.num_tensors else Difference(), ranks),
        facts=facts,
        evidence=evidence,
        agreed_steps=agreed_steps(window, first),
    )


def _is_randomness_apart(window: Window, first: Parting) -> bool | None:
    """Whether ranks that compute parts of one result had drawn different random numbers for it by then.

    None if nobody looked.
    """
    known = window.tensors.classes.get("randomness")
    if known is None:
        return None
    # In the very first step, a model may become known too late to see what it was called with.
    return known.first_unequal_step is not None and known.first_unequal_step <= max(first.step, known.first_step)


def _is_tiny(case: Case, in_weights: Difference, in_gradients: Difference, limit: float) -> bool | None:
    """Whether everything that differs is so close that rounding can explain it; None if the distance is not known."""
    known = [
        difference.distance
        for parting, difference in ((case.weights, in_weights), (case.given or case.reduced, in_gradients))
        if parting
    ]
    distances = [distance for distance in known if distance is not None]
    if not known or len(distances) < len(known):
        return None
    return max(distances) < limit


def _unused(case: Case, in_reduced: Difference) -> dict[str, bool | None]:
    """Return facts about why some gradients are in no reduction."""
    differing = set(in_reduced.tensors)
    unfrozen = {c.name for c in case.window.models.changes if c.what == "requires_grad" and c.after == "True"}
    return {
        "has_unused_parameter": bool(unused_names(case)) if case.reduced else None,
        "were_frozen_before": differing <= unfrozen if differing and case.window.models.changes else None,
    }


def _follower_evidence(case: Case) -> Iterator[Evidence]:
    for name, parting in case.followers.items():
        yield Evidence(
            kind="fingerprint",
            summary=f"{WORDS[name]} differ since step {parting.step}, after what they are made of: nothing reduces them between these ranks",
            values={"class": name, "step": parting.step},
        )


def _unused_evidence(case: Case, in_reduced: Difference) -> Iterator[Evidence]:
    names = unused_names(case) if in_reduced.num_tensors else ()
    if names:
        yield Evidence(
            kind="census",
            summary=f"{named(names)} {'is' if len(names) == 1 else 'are'} trained, replicated and got no gradient, and the wrapper was not told to "
            "find unused parameters: it waits for them and reduces nothing that shares their bucket",
            values={"unused": list(names[:20])},
        )


def _when_weights(case: Case) -> dict[str, bool | None]:
    """Return facts about time: equal at first, differing within a step or between two."""
    classes, weights = case.window.tensors.classes, case.weights
    before, after = classes.get("parameters_before"), classes.get("parameters_after")
    is_within: bool | None = None
    if weights and weights.tensor_class == "parameters_after" and before and before.last_equal_step is not None:
        is_within = before.last_equal_step >= weights.step or None
    if weights and weights.tensor_class == "parameters_before" and after and after.last_equal_step == weights.step - 1:
        is_within = False
    at_first = not before.is_equal_at_first if before else None
    if before is None and after and after.is_equal_at_first:
        at_first = False
    return {
        "parameters_differ": bool(weights) if before or after else None,
        "parameters_differ_at_first": at_first,
        "were_set_apart": None if at_first is None else at_first or case.broke.is_new,
        "parameters_parted_within_a_step": is_within,
        "gradients_agreed_there": _agreed_at(case.window, "gradients", weights) if weights and is_within else None,
    }


def _agreed_at(window: Window, tensor_class: str, parting: Parting) -> bool | None:
    """Whether all ranks that differ were compared in another class at that very step, and agreed.

    None if they were not compared.
    """
    view = window.step(parting.step)
    roots = view.roots.get(tensor_class, {}) if view else {}
    compared = {rank for ranks in roots.values() for rank in ranks}
    return len(roots) == 1 if compared.issuperset(parting.ranks) else None


GRADIENT_FACTS = (
    "gradients_differ", "gradients_differ_always", "gradients_differ_repeatedly", "gradients_differ_ever_since",
    "gradients_differ_once", "is_reduction_seen", "is_result_lost_once", "given_gradients_differ", "is_added_to",
)  # fmt: skip


def _when_gradients(case: Case) -> dict[str, bool | None]:
    """Return facts about gradients: differing at the reduction or after it, always, ever since, or once."""
    history = case.window.tensors.classes.get(case.reduction)
    given = case.window.tensors.classes.get("gradients")
    changed, known = altered(case)
    has_agreed_since: bool | None = None
    if history and history.first_unequal_step is not None:
        has_agreed_since = agreed_since(case.window, case.reduction, history.first_unequal_step)
    if case.apart.steps:
        # They agree as soon as steps are counted alike.
        return dict.fromkeys(GRADIENT_FACTS, False)
    return {
        "gradients_differ": history.num_unequal > 0 if history else None,
        "gradients_differ_always": history.num_equal == 0 if history else None,
        "gradients_differ_repeatedly": history.num_unequal > 1 if history else None,
        "gradients_differ_ever_since": history.num_unequal > 1 and has_agreed_since is False if history else None,
        "gradients_differ_once": history.num_unequal == 1 and has_agreed_since is True if history else None,
        "is_reduction_seen": case.reduction != "gradients" if history else None,
        "is_result_lost_once": 0 < len(changed) < len(known)
        and given is not None
        and given.num_unequal == 1
        and not is_pass_after_reduction(case),
        "given_gradients_differ": bool(case.given) if given and case.reduction != "gradients" else None,
        "is_added_to": is_added_to(case),
    }


def _is_one_moment(differing: tuple[str, ...], case: Case) -> bool:
    """Whether only one of several moments of a tensor differs: a differing gradient would have changed them all."""
    tables = tables_at(case.window, "optimizer_state", case.state.step, case.state.ranks) if case.state else {}
    names = {name for table in tables.values() for name in table.names}
    for tensor in case.in_weights.tensors:
        moments = {name for name in names if name.rpartition(".")[0] == tensor and not name.endswith(".step")}
        if len(moments) > 1 and len(moments & set(differing)) == 1:
            return True
    return False


def _settings(case: Case) -> dict[str, bool | None]:
    """Return facts about the optimizers."""
    classes = case.window.tensors.classes
    scales = [spread for _, spread in case.window.values("loss_scale") if spread.num > 1]
    state, parted = case.partings.get("optimizer_state"), bool(case.weights)
    is_of_state = case.settings is not None and case.settings.tensor_class == "optimizer_state"
    return {
        "is_one_moment_alone": _is_one_moment(case.in_state.tensors, case) if case.in_state.num_tensors else None,
        "state_parted_with_weights": (bool(state) if parted else None) if "optimizer_state" in classes else None,
        "hyperparameters_differ": "hyperparameters" in case.partings if "hyperparameters" in classes else None,
        "optimizer_state_differs": is_of_state if "optimizer_state" in classes else None,
        "loss_scales_differ": any(spread.low != spread.high for spread in scales) if scales else None,
    }


def _summary(first: Parting, step: int, difference: Difference, ranks: tuple[int, ...]) -> str:
    what = cap(WORDS[first.tensor_class])
    count = f" in {len(difference.tensors)} of {difference.num_tensors} tensors" if difference.num_tensors else ""
    who = "" if set(ranks) == set(first.ranks) else f"; {ranks_text(ranks)} parted from the rest"
    return f"{what} differ between {ranks_text(first.ranks)} since step {step}{count}{who}."
