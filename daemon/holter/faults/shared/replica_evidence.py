"""What is said of replicas that parted: when, in which tensors, and whether a majority agrees."""

from collections.abc import Iterator, Mapping

from holter.faults.shared.parting import Difference, Parting
from holter.faults.shared.wording import ranks_text
from holter.faults.window import ClassHistory
from holter.records import Evidence

WORDS = {
    "parameters_before": "parameters before the optimizer's step",
    "gradients_reduced": "reduced gradients",
    "gradients": "gradients as the optimizer is given them",
    "hyperparameters": "the optimizers' settings",
    "parameters_after": "parameters after the optimizer's step",
    "optimizer_state": "the optimizers' state",
}
"""Classes of tensors in the order in which a step reads them."""
ALWAYS_TOLD = ("parameters_before", "gradients", "parameters_after")
"""Classes whose absence is worth a line."""
MAX_TENSORS_SHOWN = 5


def named(names: tuple[str, ...]) -> str:
    """The first few, and how many more."""
    more = len(names) - MAX_TENSORS_SHOWN
    return ", ".join(names[:MAX_TENSORS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def cap(text: str) -> str:
    """With a capital letter, as a sentence begins."""
    return text[0].upper() + text[1:]


def history_evidence(classes: Mapping[str, ClassHistory]) -> Iterator[Evidence]:
    """A line a class: since when its comparisons differ, and how many."""
    for name, words in WORDS.items():
        history = classes.get(name)
        if history is None:
            if name in ALWAYS_TOLD:
                yield Evidence(
                    kind="missing", summary=f"{words} were never compared between ranks", values={"class": name}
                )
            continue
        yield Evidence(
            kind="fingerprint",
            summary=f"{words} {_when(history)}",
            values={
                "class": name,
                "last_equal_step": history.last_equal_step,
                "first_unequal_step": history.first_unequal_step,
                "num_equal": history.num_equal,
                "num_unequal": history.num_unequal,
            },
        )


def _when(history: ClassHistory) -> str:
    compared = history.num_equal + history.num_unequal
    if history.first_unequal_step is None:
        return f"agreed at all {compared} steps compared, {history.first_step} to {history.last_equal_step}"
    if history.last_equal_step is None:
        return (
            f"differed at the first comparison, step {history.first_unequal_step}, and at {history.num_unequal} of "
            f"{compared} compared steps in all"
        )
    return (
        f"agreed from step {history.first_step} to step {history.last_equal_step}, first differed at step "
        f"{history.first_unequal_step}, and at {history.num_unequal} of {compared} compared steps in all"
    )


def tensor_evidence(parting: Parting | None, difference: Difference) -> Iterator[Evidence]:
    """Which tensors of a class differ, and how far apart they are."""
    if parting is None:
        return
    what = f"{WORDS.get(parting.tensor_class, parting.tensor_class)}, step {parting.step}"
    values = {"class": parting.tensor_class, "step": parting.step, "groups": [list(group) for group in parting.groups]}
    if not difference.num_tensors:
        summary = f"{what}: the ranks' tables could not be had, so the tensors that differ are not known"
        yield Evidence(kind="missing", summary=summary, values=values)
        return
    summary = (
        f"{what}: {len(difference.tensors)} of {difference.num_tensors} tensors differ ({named(difference.tensors)})"
    )
    if difference.distance is not None:
        summary += f", by about {difference.distance:.2g} of their norm at most"
        values["distance"] = difference.distance
    counts = {"num_differing": len(difference.tensors), "num_tensors": difference.num_tensors}
    yield Evidence(kind="fingerprint", summary=summary, values=values | counts)


def majority_evidence(first: Parting) -> Evidence:
    """Whether more than half of the ranks agree."""
    if not first.minority:
        return Evidence(
            kind="majority",
            summary=f"there is no majority among {ranks_text(first.ranks)}",
            values={"groups": [list(group) for group in first.groups]},
        )
    return Evidence(
        kind="majority",
        summary=f"{len(first.groups[0])} of {len(first.ranks)} ranks agree; {ranks_text(first.minority)} differ from them",
        values={"minority": list(first.minority), "num_ranks": len(first.ranks)},
    )
