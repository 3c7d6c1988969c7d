"""Balance term: a mixture of experts computes a balancing loss that no backward pass reaches.

What it detects
    A scalar that a mixture of experts keeps under a name such as `aux_loss` or `balance_loss`, which hangs on the graph, and to
    which the backward pass of the same step brought no gradient, at eight looks in a row and never in between.

Why it matters
    The term was written to keep experts in use. Detached, or never added to the loss, it is shown on a chart and balances nothing.

False positives
    A term that is detached where it is kept (for a chart alone) is not looked at. One that is added with a weight of zero gets a
    gradient, of zero, and is silent. A model that keeps such a term and is balanced in another way would be reported: detach it
    there.

What to do
    Add the term itself to the loss, not a detached copy or its number (`holter explain auxiliary_loss_inactive`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.experts.looks import enough_at, looks_of
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.window import Window
from holter.records import Evidence, Finding


@dataclass(frozen=True)
class BalanceTerm:
    """Judges whether backward passes reach a balancing term."""

    name: ClassVar[str] = "balance_term"

    min_looks: int = threshold(8, at_least=3)
    """Number of looks in a row, over all ranks that looked."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding per mixture of experts."""
        for module, looks in sorted(looks_of(window).items()):
            told = [(look.step, one) for look in looks for one in look.by_rank.values() if one.term]
            steps = sorted({step for step, _ in told})
            if len(steps) < self.min_looks or any(one.is_term_learning for _, one in told):
                continue
            term = told[-1][1].term
            yield Finding(
                detector=self.name,
                severity="warning",
                first_step=steps[0],
                detected_step=enough_at(steps, self.min_looks),
                ranks=tuple(sorted(window.attached)),
                modules=(module,),
                summary=f"The balancing term `{term}` of {module or 'the model'} carries no gradient since step {steps[0]}.",
                facts={"is_without_gradient": True, "has_gradient": False},
                evidence=(
                    Evidence(
                        kind="routing",
                        summary=f"`{module}.{term}` hangs on the graph, and at {len(steps)} steps ({steps[0]} to {steps[-1]}) the backward pass brought it no gradient",
                        values={"module": module, "term": term, "num_looks": len(steps)},
                    ),
                ),
            )
