"""One parting of replicas with everything known about it: which classes differ since when, and which tables tell more."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from holter.faults.shared.parting import WORDS, Difference, Parting, column, find_difference, request, tables_at
from holter.faults.shared.structure import distinct_censuses
from holter.faults.window import ClassHistory, Window
from holter.records import TableRequest, Vitals

PARAMETERS = ("parameters_before", "parameters_after")
SETTINGS = ("hyperparameters", "optimizer_state")
MIN_APART = 2
"""Number of steps at which gradients must equal those of the others' next step."""
MAX_APART = 6
"""Number of steps after the parting at which that is looked for."""
MIN_KEPT = 3
"""Number of steps at which weights must have stayed the same between steps, before a change between steps means anything."""


@dataclass(frozen=True)
class HistoryBreak:
    """The ranks whose weights changed between two steps, with no optimizer step between."""

    step: int | None = None
    ranks: tuple[int, ...] = ()
    """The ranks whose weights changed; some, not all."""
    unseen: tuple[int, ...] = ()
    """Ranks that were not read at that step: they count as unchanged because no rank had changed at any earlier step."""
    is_on_all: bool | None = None
    """Whether it is on all ranks; None if nobody looked, or not at enough ranks."""
    is_new: bool = False
    """Whether it is on all ranks and never happened before: no habit of the script."""


@dataclass(frozen=True)
class StepsApart:
    """Ranks whose count of steps is one off.

    What a reduction gave them at a step, the others got at the next one, or at the one before.
    """

    behind: tuple[int, ...] = ()
    ahead: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    """Steps of the ranks behind at which their gradients were those of the others' next step; or the step made without a backward pass."""
    is_without_pass: bool = False


@dataclass(frozen=True)
class Case:
    """One parting, with everything known about it."""

    window: Window
    first: Parting
    partings: Mapping[str, Parting]
    nearly_all: float
    implausible_ratio: float
    max_ranks_asked: int
    ranks_per_group: int
    apart: StepsApart = StepsApart()
    """The ranks that are a step apart, by gradients that are equal bit for bit."""
    followers: Mapping[str, Parting] = field(default_factory=dict)
    """Gradients that differ because the weights or settings already did: they are not where it began."""

    @property
    def weights(self) -> Parting | None:
        """The first parting of the parameters."""
        found = (self.partings[name] for name in PARAMETERS if name in self.partings)
        return min(found, key=lambda parting: parting.step, default=None)

    @property
    def reduction(self) -> str:
        """The class that shows what the reduction left.

        It is the optimizer's own gradients if nothing earlier was read, or nothing was reduced.
        """
        given = self.partings.get("gradients")
        view = self.window.step(given.step) if given and "gradients_reduced" not in self.partings else None
        is_seen = "gradients_reduced" in self.window.tensors.classes and (
            view is None or "gradients_reduced" in view.roots
        )
        return "gradients_reduced" if is_seen else "gradients"

    @property
    def reduced(self) -> Parting | None:
        """The parting of gradients at the reduction."""
        return self.partings.get(self.reduction)

    @property
    def given(self) -> Parting | None:
        """The parting of gradients after a reduction that left them equal."""
        given = self.partings.get("gradients")
        is_seen = self.reduction == "gradients_reduced" and self.reduced is None
        return given if given and is_seen else None

    @property
    def settings(self) -> Parting | None:
        """The first parting of the optimizers' settings or state, if neither gradients nor earlier weights explain it."""
        if self.reduced or self.given:
            return None
        if "hyperparameters" in self.partings:
            return self.partings["hyperparameters"]
        state, before = self.partings.get("optimizer_state"), self.partings.get("parameters_before")
        # Weight decay that is added to the gradient carries differing weights into the state.
        return state if state and not (before and before.step <= state.step) else None

    @property
    def state(self) -> Parting | None:
        """The parting of the moments, seen after the weights differed, for a reason that gradients do not show."""
        return None if self.reduced or self.given or self.settings else self.partings.get("optimizer_state")

    @cached_property
    def in_state(self) -> Difference:
        """Which moments differ at that parting."""
        return self.difference(self.state)

    @cached_property
    def in_weights(self) -> Difference:
        """Which parameters differ where they first do."""
        return self.difference(self.weights)

    @cached_property
    def in_reduced(self) -> Difference:
        """Which gradients differ at the reduction."""
        return self.difference(self.reduced)

    @cached_property
    def in_given(self) -> Difference:
        """Which gradients differ after the reduction."""
        return self.difference(self.given)

    @cached_property
    def in_settings(self) -> Difference:
        """Which settings, or which of the optimizers' state, differ."""
        return self.difference(self.settings)

    @cached_property
    def broke(self) -> HistoryBreak:
        """The ranks whose weights changed between two steps."""
        return _history_break(self.window, self.weights)

    def difference(self, parting: Parting | None) -> Difference:
        """Return which tensors differ at a parting."""
        return find_difference(
            self.window, parting, nearly_all=self.nearly_all, implausible_ratio=self.implausible_ratio
        )

    def requests(self) -> Iterator[TableRequest]:
        """Yield the tables that are still to be asked for."""
        wanted = [(parting.tensor_class, parting.step, parting) for parting in (self.weights, self.reduced) if parting]
        if self.given:
            wanted += [(name, self.given.step, self.given) for name in ("gradients", "gradients_reduced")]
        if self.state:
            wanted.append((self.state.tensor_class, self.state.step, self.state))
        if self.settings:
            wanted.append((self.settings.tensor_class, self.settings.step, self.settings))
            wanted += [(self.settings.tensor_class, past, self.settings) for past in self.past_of_settings]
        found = [asked for part in wanted if (asked := self._request(*part))]
        yield from found
        if not found and self.weights:
            past = (self._request(self.weights.tensor_class, step, self.weights) for step in self.past_of_weights)
            yield from (asked for asked in past if asked)

    def _request(self, tensor_class: str, step: int, parting: Parting) -> TableRequest | None:
        return request(self.window, tensor_class, step, parting.asked(self.max_ranks_asked, self.ranks_per_group))

    @property
    def past_of_weights(self) -> tuple[int, ...]:
        """Steps whose tables may tell whose weights went where no training leads, the last one first.

        Two of them also show the step that all ranks took before.
        """
        if not self.weights or self.reduced or self.given or self.settings or self.first.minority:
            return ()
        now = tables_at(self.window, self.weights.tensor_class, self.weights.step, self.weights.ranks)
        last = self.agreed_before(self.weights)
        if not now or not all(table.sums for table in now.values()) or self.broke.ranks or last is None:
            return ()
        return (last, last - 1) if last == self.weights.step - 1 and last else (last,)

    @property
    def past_of_settings(self) -> tuple[int, ...]:
        """Steps at which the settings still agreed, the last one first; two of them show where a schedule was going."""
        last = self.agreed_before(self.settings) if self.settings else None
        if last is None or self.settings is None:
            return ()
        is_alone = self.settings.minority or self.settings.tensor_class != "hyperparameters" or last == 0
        return (last,) if is_alone else (last, last - 1)

    def agreed_before(self, parting: Parting) -> int | None:
        """Return the step at which ranks last agreed on this class."""
        return self.window.tensors.classes[parting.tensor_class].last_equal_step


def steps_apart(window: Window, parting: Parting | None) -> StepsApart:
    """Return which ranks are a step behind, from what the reduction gave two groups of ranks.

    A gradient that stands still does not count: it is equal to the next one by itself.
    """
    views = [view for view in window.steps if parting and parting.step - 1 <= view.step <= parting.step + MAX_APART]
    roots = {view.step: view.roots.get(parting.tensor_class, {}) for view in views} if parting else {}
    groups = list(roots.get(parting.step, {}).values()) if parting else []
    if len(groups) != 2:  # noqa: PLR2004 - those behind and those ahead
        return StepsApart()
    for behind, ahead in (groups, groups[::-1]):
        own, others = (
            {step: root for step, of_root in roots.items() for root, ranks in of_root.items() if group[0] in ranks}
            for group in (behind, ahead)
        )
        steps = tuple(step for step, root in own.items() if root == others.get(step + 1) != others.get(step))
        if len(steps) >= MIN_APART:
            return StepsApart(behind, ahead, steps)
    return StepsApart()


def extra_step(window: Window, parting: Parting | None) -> StepsApart:
    """Return which rank made a step without a backward pass where ranks part, and so took one step too many.

    No rank had made such a step before.
    """
    passes = dict(window.values("micro_steps")) if parting else {}
    for step in (parting.step - 1, parting.step, parting.step + 1) if parting else ():
        one, before = passes.get(step), [each for at, each in passes.items() if at < step]
        is_usual = len(before) >= MIN_KEPT and all(each.low > 0 for each in before)
        # All but one rank made as many passes as the most.
        if one and is_usual and 0 == one.low < one.high and one.mean * one.num > one.high * (one.num - 1.5):
            others = tuple(rank for rank in parting.ranks if rank != one.low_rank) if parting else ()
            return StepsApart(others, (one.low_rank,), (step,), is_without_pass=True)
    return StepsApart()


def _history_break(window: Window, weights: Parting | None) -> HistoryBreak:
    """Find a change of weights between the last comparison at which they agreed and the first at which they did not.

    A busy rank leaves readings out, so a break may be seen on one rank while others were not looked at. A script that changes
    weights between steps does so again and again, on every rank.
    """
    if weights is None:
        return HistoryBreak()
    before = window.tensors.classes.get("parameters_before")
    since = -1 if before is None or before.last_equal_step is None else before.last_equal_step
    looked = [
        view for view in window.steps if since < view.step <= weights.step and (view.broke_history or view.kept_history)
    ]
    for view in looked:
        if view.broke_history and view.kept_history:
            return HistoryBreak(view.step, tuple(sorted(view.broke_history)), is_on_all=False)
    broken = [view for view in looked if view.broke_history]
    broke = {rank for view in broken for rank in view.broke_history}
    earlier = [view for view in window.steps if view.step <= since]
    num_kept = sum(bool(view.kept_history) for view in earlier)
    is_new = len(broken) == 1 and num_kept >= MIN_KEPT and not any(view.broke_history for view in earlier)
    if not broke or broke.issuperset(weights.ranks):
        return HistoryBreak(is_on_all=bool(broke) if looked else None, is_new=is_new)
    if not is_new:
        return HistoryBreak()
    unseen = tuple(rank for rank in weights.ranks if rank not in broke)
    return HistoryBreak(broken[0].step, tuple(sorted(broke)), unseen, is_on_all=False)


def weights_agreed(classes: Mapping[str, ClassHistory]) -> int | None:
    """Return the completed steps of the last state with equal weights on all ranks before they differed.

    -1 if there was none, None if weights were never compared.
    """
    known: dict[str, list[int]] = {}
    for name, history in classes.items():
        base, _, axis = name.partition("@")
        if base in PARAMETERS:
            last = -1 if history.last_equal_step is None else history.last_equal_step + (base == PARAMETERS[1])
            known.setdefault(axis, []).append(last)
    # On a mesh the state is good only as far as it is along every axis.
    return min((max(steps) for steps in known.values()), default=None)


def agreed_steps(window: Window, first: Parting) -> int:
    """Return the completed steps of the last state that was good as far as comparisons tell; -1 if there was none."""
    own = window.tensors.classes[first.tensor_class].last_equal_step
    own = -1 if own is None else own
    weights = weights_agreed(window.tensors.classes)
    # Moments are read more rarely than weights, and may be wrong long before weights differ.
    return own if weights is None else min(own, weights) if first.tensor_class == "optimizer_state" else weights


def is_beginning_forgotten(window: Window, first: Parting, partings: Mapping[str, Parting]) -> bool:
    """Whether the first difference is no longer in the window.

    It was judged at its time, and a later one would be mistaken for the beginning.
    """
    watched = [name for name in WORDS if name not in SETTINGS or name in partings]
    onsets = (history.first_unequal_step for name in watched if (history := window.tensors.classes.get(name)))
    return any(step is not None and step < first.step for step in onsets)


def must_agree(window: Window) -> bool:
    """Whether anything is known to be replicated; without a census, what is compared counts as replicated."""
    distinct = distinct_censuses(window)
    return not distinct or any(
        census.is_replicated or any(entry.is_replicated for entry in census.entries) for census in distinct
    )


def are_settings_common(window: Window) -> bool:
    """Whether all ranks hold everything that an optimizer trains, whole or in parts.

    Experts and stages of a pipeline may have settings of their own.
    """
    distinct = distinct_censuses(window)
    return all(
        entry.is_replicated or entry.placements or not entry.requires_grad or entry.optimizer < 0
        for census in distinct
        if census.components
        for entry in census.entries
    )


def unused_names(case: Case) -> tuple[str, ...]:
    """Return replicated trained parameters without gradient, if their wrapper was not told to look for such."""
    census = case.window.models.census.get(case.first.ranks[0])
    if census is None or case.reduced is None:
        return ()
    lookers = {place for place, component in enumerate(census.components) if component.is_find_unused}
    parting = case.reduced
    idle = {name for _, vitals in case.window.notes_of(Vitals) for name in vitals.no_gradient.names}
    tables = tables_at(case.window, parting.tensor_class, parting.step, parting.ranks).values()
    read = {name for table in tables for name in column(table, table.fingerprints)}
    idle |= {name for table in tables for name in table.names if name not in column(table, table.fingerprints)}
    # A table has the gradients of the optimizer that steps first; those of other optimizers were not read.
    optimizers = {e.optimizer for e in census.entries if e.name in read} or {e.optimizer for e in census.entries}
    expected = {
        e.name
        for e in census.entries
        if e.requires_grad
        and e.optimizer >= 0
        and e.optimizer in optimizers
        and e.is_replicated
        and not e.is_buffer
        and e.component not in lookers
    }
    return tuple(sorted((expected & idle) - set(case.in_reduced.tensors)))
