"""Replica divergence: tensors that must be equal on all ranks are not.

What it detects
    Replicas whose parameters (before or after the optimizer's step) or reduced gradients differ between ranks, compared by
    fingerprint, bit for bit: since which step, in which tensors, on which ranks. It also says whether they were equal at first, whether
    the reduced gradients agree, and whose weights changed between two steps although no optimizer ran.

Why it matters
    Replicas that part train different models while the loss curve looks ordinary. Only rank 0's weights are usually saved, so the
    others' work is lost and nobody is told.

False positives
    Only replicas known as such (from the wrapper) are compared. Local SGD and other methods that let replicas part on purpose between
    two averagings are reported. After a NaN the bit patterns of NaN may differ between ranks: that is listed under the NaN, not apart.

What to do
    Read which came first. Different from the start: initialisation. Gradients differ at every step: the reduction is bypassed. One
    rank's weights changed by themselves: suspect its memory. With two ranks there is no majority; unless a rank's own history or an
    implausible norm breaks the tie, both are named.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from holter.detectors.parting import Difference, Parting, find_difference, find_parting
from holter.detectors.window import ClassHistory, Window
from holter.detectors.wording import ranks_text
from holter.records import Evidence, Finding, TableRequest

CLASSES = ("parameters_before", "gradients", "parameters_after")
"""In the order in which a step reads them."""
PARAMETERS = ("parameters_before", "parameters_after")
WORDS = {
    "parameters_before": "parameters before the optimizer's step",
    "gradients": "reduced gradients",
    "parameters_after": "parameters after the optimizer's step",
}
MAX_TENSORS_SHOWN = 5


@dataclass(frozen=True)
class ReplicaDivergence:
    """Judges when replicas first parted, in what, and who left."""

    name: ClassVar[str] = "replica_divergence"

    patience_s: float = 2.0
    """How long to wait for ranks that have not reported the step, because they may make the majority."""
    ranks_per_group: int = 2
    """Of how many ranks with equal roots the table of fingerprints is asked."""
    max_ranks_asked: int = 8
    """Of how many ranks in all."""
    implausible_ratio: float = 100.0
    """A norm so many times its peers' is the implausible side."""

    nearly_all: float = 0.9
    """From this share of a class's tensors on, all are taken to differ: a few gradients may be equal by chance."""

    def __post_init__(self) -> None:
        if self.patience_s < 0:
            raise ValueError(f"replica_divergence.patience_s must not be negative, got {self.patience_s}")
        if self.max_ranks_asked < 2:  # noqa: PLR2004 - a comparison needs two
            raise ValueError(f"replica_divergence.max_ranks_asked must be at least 2, got {self.max_ranks_asked}")

    def judge(self, window: Window) -> Iterator[Finding]:
        """At most one finding: the first parting; it asks for tables until they are there or cannot be had."""
        partings = [parting for name in CLASSES if (parting := find_parting(window, name))]
        first = min(partings, key=lambda parting: parting.step, default=None)
        if first is None or _is_beginning_forgotten(window, first) or not _must_agree(window):
            return
        if self._is_waiting(window, first):
            return
        weights = min(
            (parting for parting in partings if parting.tensor_class in PARAMETERS),
            key=lambda parting: parting.step,
            default=None,
        )
        gradients = next((parting for parting in partings if parting.tensor_class == "gradients"), None)
        needs = tuple(
            request for parting in (weights, gradients) if parting and (request := self._request(window, parting))
        )
        if needs:
            yield _finding(
                first,
                summary=f"{_cap(WORDS[first.tensor_class])} differ between ranks at step {first.step}.",
                needs=needs,
            )
            return
        yield _explained(window, first, weights, gradients, self)

    def _is_waiting(self, window: Window, parting: Parting) -> bool:
        view = window.step(parting.step)
        return bool(view and view.missing and window.now_ns - view.first_seen_ns < self.patience_s * 1e9)

    def _request(self, window: Window, parting: Parting) -> TableRequest | None:
        rounds = (group[turn] for turn in range(self.ranks_per_group) for group in parting.groups if turn < len(group))
        asked = [rank for rank, _ in zip(rounds, range(self.max_ranks_asked), strict=False)]
        keys = {rank: (parting.tensor_class, parting.step, rank) for rank in asked}
        open_ranks = tuple(
            sorted(rank for rank, key in keys.items() if key not in window.tables and key not in window.unavailable)
        )
        return TableRequest(parting.tensor_class, parting.step, open_ranks) if open_ranks else None


def _is_beginning_forgotten(window: Window, first: Parting) -> bool:
    """Then it was judged before, and better: what began later would be taken for the beginning."""
    onsets = (history.first_unequal_step for name in CLASSES if (history := window.classes.get(name)))
    return any(step is not None and step < first.step for step in onsets)


def _must_agree(window: Window) -> bool:
    return not window.census or any(census.is_replicated for census in window.census.values())


def _explained(
    window: Window, first: Parting, weights: Parting | None, gradients: Parting | None, limits: ReplicaDivergence
) -> Finding:
    in_weights = find_difference(
        window, weights, nearly_all=limits.nearly_all, implausible_ratio=limits.implausible_ratio
    )
    in_gradients = find_difference(
        window, gradients, nearly_all=limits.nearly_all, implausible_ratio=limits.implausible_ratio
    )
    broke_step, broke, is_broken_on_all = _history_break(window, weights)
    minority = first.minority
    ranks = broke or minority or in_weights.odd_ranks or first.ranks
    leading = in_gradients if first.tensor_class == "gradients" else in_weights
    facts = {
        "first_class": first.tensor_class,
        "compared_ranks": list(first.ranks),
        "parameter_tensors": list(in_weights.tensors),
        "gradient_tensors": list(in_gradients.tensors),
        "own_history_broke_on_some": None if is_broken_on_all is None else bool(broke),
        "own_history_broke_on_all": is_broken_on_all,
        "has_majority": bool(minority),
        "has_implausible_side": bool(in_weights.odd_ranks) if in_weights.has_norms else None,
        "is_culprit_known": bool(broke or minority or in_weights.odd_ranks),
        "parameters_differ_in_all_tensors": in_weights.is_all,
        "gradients_differ_in_all_tensors": in_gradients.is_all,
        **_when(window.classes, weights),
    }
    evidence = [
        *_history_evidence(window.classes),
        *_tensor_evidence(weights, in_weights),
        *_tensor_evidence(gradients, in_gradients),
        *_culprit_evidence(first, broke_step, broke, in_weights, is_broken_on_all=is_broken_on_all),
    ]
    step = broke_step if broke_step is not None else first.step
    return _finding(
        first,
        step=step,
        ranks=ranks,
        tensors=leading.tensors,
        summary=_summary(first, step, leading, ranks),
        facts=facts,
        evidence=tuple(evidence),
    )


def _finding(  # noqa: PLR0913 - a record's fields
    first: Parting,
    *,
    summary: str,
    step: int | None = None,
    ranks: tuple[int, ...] = (),
    tensors: tuple[str, ...] = (),
    facts: Mapping[str, Any] | None = None,
    evidence: tuple[Evidence, ...] = (),
    needs: tuple[TableRequest, ...] = (),
) -> Finding:
    return Finding(
        detector=ReplicaDivergence.name,
        severity="critical",
        first_step=first.step if step is None else step,
        detected_step=first.step,
        ranks=ranks or first.ranks,
        tensors=tensors,
        modules=_modules(tensors),
        summary=summary,
        facts=dict(facts or {"first_class": first.tensor_class, "compared_ranks": list(first.ranks)}),
        evidence=evidence,
        needs=needs,
    )


def _modules(tensors: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(module for name in tensors if (module := name.rpartition(".")[0])))


def _when(classes: Mapping[str, ClassHistory], weights: Parting | None) -> dict[str, bool | None]:
    """Facts about time: equal at first, gradients at every step, parted within a step or between two."""
    before, after = classes.get("parameters_before"), classes.get("parameters_after")
    gradients = classes.get("gradients")
    is_within: bool | None = None
    if weights and weights.tensor_class == "parameters_after" and before and before.last_equal_step is not None:
        is_within = before.last_equal_step >= weights.step or None
    if weights and weights.tensor_class == "parameters_before" and after and after.last_equal_step == weights.step - 1:
        is_within = False
    return {
        "parameters_differ": bool(weights) if before or after else None,
        "parameters_differ_at_first": not before.is_equal_at_first if before else None,
        "parameters_parted_within_a_step": is_within,
        "gradients_differ": gradients.num_unequal > 0 if gradients else None,
        "gradients_differ_always": gradients.num_equal == 0 if gradients else None,
        "gradients_differ_repeatedly": gradients.num_unequal > 1 if gradients else None,
    }


def _history_break(window: Window, weights: Parting | None) -> tuple[int | None, tuple[int, ...], bool | None]:
    """The step before which only some ranks' weights changed by themselves, who, and whether it was all (None: nobody looked)."""
    if weights is None:
        return None, (), None
    before = window.classes.get("parameters_before")
    since = -1 if before is None or before.last_equal_step is None else before.last_equal_step
    looked = [
        view for view in window.steps if since < view.step <= weights.step and (view.broke_history or view.kept_history)
    ]
    if not looked:
        return None, (), None
    for view in looked:
        if view.broke_history and view.kept_history:
            return view.step, tuple(sorted(view.broke_history)), False
    return None, (), any(view.broke_history for view in looked)


def _summary(first: Parting, step: int, difference: Difference, ranks: tuple[int, ...]) -> str:
    what = _cap(WORDS[first.tensor_class])
    count = f" in {len(difference.tensors)} of {difference.num_tensors} tensors" if difference.num_tensors else ""
    who = "" if set(ranks) == set(first.ranks) else f"; {ranks_text(ranks)} parted from the rest"
    return f"{what} differ between {ranks_text(first.ranks)} since step {step}{count}{who}."


def _history_evidence(classes: Mapping[str, ClassHistory]) -> Iterator[Evidence]:
    for name in CLASSES:
        history = classes.get(name)
        if history is None:
            yield Evidence(
                kind="missing", summary=f"{WORDS[name]} were never compared between ranks", values={"class": name}
            )
            continue
        compared = history.num_equal + history.num_unequal
        if history.first_unequal_step is None:
            text = f"agreed at all {compared} steps compared, {history.first_step} to {history.last_equal_step}"
        elif history.last_equal_step is None:
            text = f"differed at the first comparison, step {history.first_unequal_step}, and at {history.num_unequal} of {compared} compared steps in all"
        else:
            text = (
                f"agreed from step {history.first_step} to step {history.last_equal_step}, first differed at step "
                f"{history.first_unequal_step}, and at {history.num_unequal} of {compared} compared steps in all"
            )
        yield Evidence(
            kind="fingerprint",
            summary=f"{WORDS[name]} {text}",
            values={
                "class": name,
                "last_equal_step": history.last_equal_step,
                "first_unequal_step": history.first_unequal_step,
                "num_equal": history.num_equal,
                "num_unequal": history.num_unequal,
            },
        )


def _tensor_evidence(parting: Parting | None, difference: Difference) -> Iterator[Evidence]:
    if parting is None:
        return
    what = f"{WORDS[parting.tensor_class]}, step {parting.step}"
    values = {"class": parting.tensor_class, "step": parting.step, "groups": [list(group) for group in parting.groups]}
    if not difference.num_tensors:
        summary = f"{what}: the ranks' tables could not be had, so the tensors that differ are not known"
        yield Evidence(kind="missing", summary=summary, values=values)
        return
    more = len(difference.tensors) - MAX_TENSORS_SHOWN
    names = ", ".join(difference.tensors[:MAX_TENSORS_SHOWN]) + (f" and {more} more" if more > 0 else "")
    yield Evidence(
        kind="fingerprint",
        summary=f"{what}: {len(difference.tensors)} of {difference.num_tensors} tensors differ ({names})",
        values=values | {"num_differing": len(difference.tensors), "num_tensors": difference.num_tensors},
    )


def _culprit_evidence(
    first: Parting,
    broke_step: int | None,
    broke: tuple[int, ...],
    in_weights: Difference,
    *,
    is_broken_on_all: bool | None,
) -> Iterator[Evidence]:
    if broke:
        yield Evidence(
            kind="history",
            summary=f"the weights of {ranks_text(broke)} changed between the end of the step before and the start of step {broke_step}, "
            "with no optimizer step between; the others' did not",
            values={"ranks": list(broke), "step": broke_step},
        )
    elif is_broken_on_all:
        yield Evidence(
            kind="history",
            summary="every rank's weights changed between two steps: the script itself changes them, on all ranks",
        )
    if first.minority:
        yield Evidence(
            kind="majority",
            summary=f"{len(first.groups[0])} of {len(first.ranks)} ranks agree; {ranks_text(first.minority)} differ from them",
            values={"minority": list(first.minority), "num_ranks": len(first.ranks)},
        )
    else:
        yield Evidence(
            kind="majority",
            summary=f"there is no majority among {ranks_text(first.ranks)}",
            values={"groups": [list(group) for group in first.groups]},
        )
    if in_weights.odd_ranks:
        yield Evidence(
            kind="implausible",
            summary=f"{in_weights.odd_text}: {ranks_text(in_weights.odd_ranks)} cannot be right",
            values={"ranks": list(in_weights.odd_ranks)},
        )


def _cap(text: str) -> str:
    return text[0].upper() + text[1:]
