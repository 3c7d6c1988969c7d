"""Compute dtype: a rank, or the whole model, computes in another precision than its peers or its autocast region says.

What it detects
    Modules whose output has another dtype on some ranks than on others in the first training pass, or later, where a rank's own passes
    are no longer what its first one was; modules of one dtype whose values, outside of autocast, are those of a narrower one on some
    ranks alone; and a model that is called in an
    autocast region while no linear layer or convolution of it gives the region's dtype.

Why it matters
    Ranks of different precision average gradients of different models. A region that does not take effect costs the time and memory
    that it was to save.

False positives
    Single modules that are kept in fp32 on purpose raise nothing, as long as all ranks do it: normalisation, routers, heads.
    Modules that only some ranks have (pipeline stages) are not compared.

What to do
    Compare the ranks' settings of mixed precision, and the device that the region was opened for (`holter explain
    autocast_not_applied`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import listed, names_text, ranks_text
from holter.faults.window import Window
from holter.records import Evidence, Finding, Inspection

T = TypeVar("T")

CAST = ("Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
"""Classes that every autocast region casts."""
ROUNDED = " with the mantissas of a narrower dtype"
OF_INPUT = " (input)"
SETTLED_STEPS = 4
"""Number of steps after which every rank has reported a change at one step."""


@dataclass(frozen=True)
class ComputeDtype:
    """Judges the dtypes of modules' outputs."""

    name: ClassVar[str] = "compute_dtype"

    min_layers: int = threshold(2, at_least=1)
    """Number of layers needed; a single one may be kept wide on purpose."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: ranks that differ, before an autocast region without effect."""
        first: dict[int, Inspection] = {}
        steps: dict[int, int] = {}
        changed: dict[int, Inspection] = {}
        for note, inspection in window.notes_of(Inspection):
            if inspection.reason == "first" and note.rank not in first:
                first[note.rank], steps[note.rank] = inspection, note.step
            elif inspection.reason == "changed" and note.rank not in changed:
                changed[note.rank], steps[note.rank] = inspection, note.step
        if not first:
            return
        step = min(steps.values())
        if differing := _differing(first):
            yield _ranks_differ(first, differing, step)
        elif changed and (differing := _differing(first | changed)):
            since = max(steps[rank] for rank in changed)
            # All ranks look at the same step: a report of it has arrived when others have reported later ones.
            if max((entry.step for entry in window.series), default=0) >= since + SETTLED_STEPS:
                yield _ranks_differ(first | changed, differing, since, tuple(sorted(changed)))
        elif set(changed) == set(first) and (fallen := _fallen(first, changed)):
            yield _all_rounded(fallen, max(steps.values()), tuple(sorted(first)))
        elif idle := {rank: layers for rank, one in first.items() if (layers := self._not_cast(one))}:
            yield _region_idle(first, idle, step)

    def _not_cast(self, inspection: Inspection) -> list[str]:
        """Return all layers that the region should have cast, if it cast none."""
        if not inspection.autocast_dtype:
            return []
        layers = [w for w in inspection.witnesses if w.module_class in CAST and w.num_calls and w.output_dtype]
        is_any_cast = any(witness.output_dtype == inspection.autocast_dtype for witness in layers)
        return [] if is_any_cast or len(layers) < self.min_layers else [witness.module for witness in layers]


def _differing(first: dict[int, Inspection]) -> dict[str, dict[str, list[int]]]:
    """Return module -> dtype -> ranks, for modules whose outputs have different dtypes on different ranks."""
    seen: dict[str, dict[str, list[int]]] = {}
    for rank, inspection in sorted(first.items()):
        for witness in inspection.witnesses:
            if witness.num_calls and witness.output_dtype:
                seen.setdefault(witness.module, {}).setdefault(witness.output_dtype, []).append(rank)
    found = {module: by_dtype for module, by_dtype in seen.items() if len(by_dtype) > 1}
    return found or _rounded(first)


def _rounded(first: dict[int, Inspection]) -> dict[str, dict[str, list[int]]]:
    """Return the same for outputs of one dtype whose values are those of a narrower one on some ranks.

    Only places that all ranks reported count, and outputs come before inputs.
    """
    seen: dict[str, dict[str, list[int]]] = {}
    for rank, inspection in sorted(first.items()):
        for place, (dtype, is_rounded) in _places(inspection).items():
            seen.setdefault(place, {}).setdefault(f"{dtype}{ROUNDED if is_rounded else ''}", []).append(rank)
    whole = {place: kinds for place, kinds in seen.items() if sum(map(len, kinds.values())) == len(first)}
    return _nearest({place: kinds for place, kinds in whole.items() if len(kinds) > 1}, first)


def _places(inspection: Inspection) -> dict[str, tuple[str, bool]]:
    """Return the dtype of each place whose mantissas were looked at, and whether they are short."""
    own = {one.module: (one.output_dtype, one.is_rounded) for one in inspection.witnesses if one.is_rounded is not None}
    return own | {place: ("float32", is_rounded) for place, is_rounded in inspection.rounded.items()}


def _nearest(found: dict[str, T], inspections: dict[int, Inspection]) -> dict[str, T]:
    """Choose the places nearest to the origin, by module.

    If single modules give such values, what lies around and after them follows from that; else the models that give them count,
    or else those that are given them.
    """
    witnesses = {one.module for inspection in inspections.values() for one in inspection.witnesses}
    outputs = {place: kinds for place, kinds in found.items() if not place.endswith(OF_INPUT)}
    return (
        {place: kinds for place, kinds in outputs.items() if place in witnesses}
        or outputs
        or {place.removesuffix(OF_INPUT): kinds for place, kinds in found.items()}
    )


def _ranks_differ(
    first: dict[int, Inspection], differing: dict[str, dict[str, list[int]]], step: int, changed: tuple[int, ...] = ()
) -> Finding:
    by_dtype = next(iter(differing.values()))
    groups = sorted(by_dtype.values(), key=len, reverse=True)
    everyone = sorted(rank for group in groups for rank in group)
    has_majority = 2 * len(groups[0]) > len(everyone)
    narrow = tuple(rank for dtype, some in by_dtype.items() if dtype.endswith(ROUNDED) for rank in some)
    ranks = (
        tuple(sorted(rank for group in groups[1:] for rank in group))
        if has_majority
        else changed or narrow or tuple(everyone)
    )
    shown = listed(f"{dtype} on {ranks_text(some)}" for dtype, some in sorted(by_dtype.items()))
    regions = sorted({one.autocast_dtype or "none" for one in first.values()})
    modules = tuple(differing)
    return Finding(
        detector=ComputeDtype.name,
        severity="warning",
        first_step=step,
        detected_step=step,
        ranks=ranks,
        modules=modules,
        summary=f"Ranks compute in different precision: {modules[0]} gives {shown}.",
        facts={
            "do_ranks_differ": True,
            "is_one_side_rounded": bool(narrow),
            "do_regions_differ": len(regions) > 1,
            "has_majority": has_majority,
            "is_region_idle": None,
            "do_all_agree": False,
        },
        evidence=(
            Evidence(
                kind="inspection",
                summary=f"{len(modules)} modules differ in the dtype of their output between ranks: {names_text(modules)}",
                values={"by_dtype": {dtype: some[:64] for dtype, some in by_dtype.items()}},
            ),
            Evidence(
                kind="inspection",
                summary=f"autocast regions in which the ranks called the model: {listed(regions)}",
                values={"regions": regions},
            ),
        ),
    )


def _fallen(first: dict[int, Inspection], changed: dict[int, Inspection]) -> list[str]:
    """Return the modules whose values had long mantissas at first and short ones later, on all ranks.

    Inputs are left out, since they may well be coarse, and so are embeddings, which give what their weights are.
    """
    of_ranks = []
    for rank, inspection in first.items():
        now = _places(changed[rank])
        lookups = {one.module for one in inspection.witnesses if "Embedding" in one.module_class}
        was = {place for place, (_, is_rounded) in _places(inspection).items() if not is_rounded} - lookups
        of_ranks.append({place for place in was if now.get(place, ("", False))[1] and not place.endswith(OF_INPUT)})
    return list(_nearest(dict.fromkeys(sorted(set.intersection(*of_ranks))), first))


def _all_rounded(modules: list[str], step: int, ranks: tuple[int, ...]) -> Finding:
    return Finding(
        detector=ComputeDtype.name,
        severity="warning",
        first_step=step,
        detected_step=step,
        ranks=ranks,
        modules=tuple(modules),
        summary=f"What {names_text(modules)} {'gives' if len(modules) == 1 else 'give'} has passed through a narrower dtype at step {step}, and had not at first, on all ranks.",
        facts={
            "do_ranks_differ": False,
            "is_one_side_rounded": None,
            "is_rounded_everywhere": True,
            "do_regions_differ": None,
            "has_majority": None,
            "is_region_idle": None,
            "do_all_agree": True,
        },
        evidence=(
            Evidence(
                kind="inspection",
                summary=f"float32 values{ROUNDED} on all ranks, where they had all their bits at the first look: {names_text(modules)}",
                values={"modules": modules[:64], "step": step},
            ),
        ),
    )


def _region_idle(first: dict[int, Inspection], idle: dict[int, list[str]], step: int) -> Finding:
    rank, modules = next(iter(sorted(idle.items())))
    wanted = first[rank].autocast_dtype
    got = sorted({w.output_dtype for w in first[rank].witnesses if w.module in set(modules)})
    return Finding(
        detector=ComputeDtype.name,
        severity="warning",
        first_step=step,
        detected_step=step,
        ranks=tuple(sorted(idle)),
        modules=tuple(modules),
        summary=f"The model is called in an autocast region of {wanted}, and none of its {len(modules)} linear layers and convolutions computes in it.",
        facts={
            "do_ranks_differ": False,
            "is_one_side_rounded": None,
            "do_regions_differ": None,
            "has_majority": None,
            "is_region_idle": True,
            "do_all_agree": False,
        },
        evidence=(
            Evidence(
                kind="inspection",
                summary=f"{ranks_text(idle)}: the region says {wanted}, the outputs of {names_text(modules)} are {listed(got)}",
                values={"autocast_dtype": wanted, "output_dtypes": got, "num_layers": len(modules)},
            ),
        ),
    )
