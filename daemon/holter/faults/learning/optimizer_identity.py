"""Optimizer identity: what the optimizers hold is not what the model trains.

What it detects
    An optimizer whose parameters are, by identity, (nearly) all strangers to every model that is watched and have no gradient,
    while the model's own trainable parameters are held by nobody; one that holds a few such strangers and lacks as many of the
    model's, as a head that was replaced leaves behind; and optimizers that hold nothing but frozen parameters.

Why it matters
    The job steps, schedules and saves as usual, and not one weight of the model moves. A loss that is noisy by nature hides it for
    days.

False positives
    Tensors that are optimised without a module (a latent, a prompt, master copies in fp32) have gradients and raise nothing. Some
    trainable parameters outside the optimizer while others are in it are common on purpose, and raise nothing. A reference model
    that nobody trains raises nothing as long as the trained one is held.

What to do
    Stop the run: nothing of it is worth keeping. Build the optimizer after everything that replaces parameters (sharding, moving,
    adapters, tying), from the parameters that require gradients (`holter explain stale_optimizer_parameters`, `nothing_trainable`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import names_text, ranks_text
from holter.faults.window import Window
from holter.records import Census, Evidence, Finding, TensorEntry

MAX_TENSORS = 64
"""Number of tensors that a finding names; the rest are counted."""
OWN_COPIES = ("DeepSpeed",)
"""Wrappers whose inner optimizer holds copies of its own by design."""


@dataclass(frozen=True)
class OptimizerIdentity:
    """Judges from the census which optimizer holds which parameters."""

    name: ClassVar[str] = "optimizer_identity"

    min_steps: int = 2
    """Number of steps that must have been taken: a model is not known before it is called."""
    nearly_all: float = threshold(0.9, above=0.5, at_most=1)  # Less than half is not nearly all.
    """Share of an optimizer's parameters from which on all count as unknown to the model."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: a stale optimizer, before one that holds only what is frozen."""
        if not window.steps or window.steps[-1].step + 1 < self.min_steps:
            return
        ranks_of: dict[int, list[int]] = {}
        for rank, census in window.models.census.items():
            ranks_of.setdefault(id(census), []).append(rank)
        kinds = [(window.models.census[ranks[0]], sorted(ranks)) for ranks in ranks_of.values()]
        stale = [(ranks, names) for census, ranks in kinds if (names := self._unheld(census))]
        frozen = [(ranks, names) for census, ranks in kinds if (names := _all_frozen(census))]
        if found := stale or frozen:
            ranks = tuple(sorted(rank for some, _ in found for rank in some))
            yield _finding(window, ranks, found[0][1], is_stale=bool(stale))

    def _unheld(self, census: Census) -> list[str]:
        """Return trainable parameters that no optimizer holds, while one holds only unknown parameters that get no gradient."""
        wrappers = (census.wrapper, *(component.wrapper for component in census.components))
        if any(word in wrapper for word in OWN_COPIES for wrapper in wrappers):
            return []
        counts = zip(census.num_held, census.num_foreign, census.num_foreign_with_gradient, strict=False)
        strange = [num for num, foreign, grads in counts if num and foreign >= self.nearly_all * num and not grads]
        by_component: dict[int, list[TensorEntry]] = {}
        for entry in _trainable(census):
            by_component.setdefault(entry.component, []).append(entry)
        unheld = [entries for entries in by_component.values() if not any(entry.optimizer >= 0 for entry in entries)]
        if len(unheld) < len(by_component):
            # Other models are held: the unknown parameters belong only to a model that has as many.
            unheld = [entries for entries in unheld if len(entries) in strange]
        names = [entry.name for entries in unheld for entry in entries] if strange else []
        return names or _replaced(census, by_component)


def _replaced(census: Census, by_component: dict[int, list[TensorEntry]]) -> list[str]:
    """Return the few parameters of a held model that no optimizer holds.

    Only if its one optimizer holds as many unknown ones without gradient.
    """
    if len(census.num_foreign) != 1 or len(by_component) != 1 or any(census.num_foreign_with_gradient):
        return []
    (entries,) = by_component.values()
    unheld = [entry.name for entry in entries if entry.optimizer < 0]
    return unheld if len(unheld) == census.num_foreign[0] else []


def _trainable(census: Census) -> list[TensorEntry]:
    return [entry for entry in census.entries if entry.requires_grad and not entry.is_buffer]


def _all_frozen(census: Census) -> list[str]:
    """Return what the optimizers hold, if all of it is frozen."""
    held = [entry for entry in census.entries if entry.optimizer >= 0 and not entry.is_buffer]
    is_frozen = not any(entry.requires_grad for entry in held) and not any(census.num_foreign)
    return [entry.name for entry in held] if is_frozen else []


def _finding(window: Window, ranks: tuple[int, ...], names: list[str], *, is_stale: bool) -> Finding:
    step, census = window.steps[0].step, window.models.census[ranks[0]]
    optimizers = names_text(census.optimizers) or "the optimizer"
    num_trainable = len(_trainable(census))
    if is_stale and len(names) < num_trainable and any(entry.optimizer >= 0 for entry in _trainable(census)):
        summary = (
            f"{optimizers} does not hold {len(names)} of the model's {num_trainable} trainable parameters, and as many that "
            f"belong to no model and get no gradient: no step changes {names_text(names)}."
        )
    elif is_stale:
        summary = (
            f"{optimizers} holds none of the model's {len(names)} trainable parameters: those that it holds belong to "
            "no model and get no gradient, so no step changes the model."
        )
    else:
        summary = f"Every parameter that {optimizers} holds ({len(names)}) is frozen: no step changes anything."
    return Finding(
        detector=OptimizerIdentity.name,
        severity="critical",
        first_step=step,
        detected_step=min(step + 1, window.steps[-1].step),
        ranks=ranks,
        tensors=tuple(names[:MAX_TENSORS]),
        summary=summary,
        facts={
            "are_parameters_foreign": is_stale,
            "has_foreign_gradient": any(census.num_foreign_with_gradient) if census.num_foreign else None,
            "is_trainable_held": any(entry.optimizer >= 0 for entry in _trainable(census)),
            "are_all_held_frozen": not is_stale,
        },
        evidence=tuple(_evidence(census, names, ranks, is_stale=is_stale)),
    )


def _evidence(census: Census, names: list[str], ranks: tuple[int, ...], *, is_stale: bool) -> Iterator[Evidence]:
    for index, (num, num_foreign) in enumerate(zip(census.num_held, census.num_foreign, strict=False)):
        name = census.optimizers[index] if index < len(census.optimizers) else f"optimizer {index}"
        gradients = census.num_foreign_with_gradient[index] if index < len(census.num_foreign_with_gradient) else 0
        yield Evidence(
            kind="identity",
            summary=f"{ranks_text(ranks)}: {name} holds {num} parameters, {num_foreign} of them in no model that was called, {gradients} of those with a gradient",
            values={"optimizer": name, "num_held": num, "num_foreign": num_foreign, "num_with_gradient": gradients},
        )
    what = "trainable and held by no optimizer" if is_stale else "held by an optimizer and frozen"
    yield Evidence(
        kind="census",
        summary=f"{len(names)} parameters are {what}: {names_text(names)}",
        values={"num_tensors": len(names)},
    )
    wrappers = sorted({component.wrapper for component in census.components if component.wrapper} | {census.wrapper})
    yield Evidence(
        kind="census", summary=f"the model is called through {names_text(wrappers)}", values={"wrappers": wrappers}
    )
