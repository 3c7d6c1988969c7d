"""What was said of a case against what must be said of it; and all cases together, by family."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.campaign.grammar import Expected

SEVERITIES = ("info", "warning", "critical")
MANY = 8
"""Of more tensors than this a report need not list all: half of them will do, as long as no other is named."""
EARLY_BY = 1
"""Ranks count completed steps: the step before is the same moment."""


@dataclass
class Result:
    """One case, as it went."""

    seed: str
    title: str
    family: str
    cause: str
    status: str
    """`ran`, `void` (the fault had no effect, or the script failed by itself), `left out`."""
    why: str = ""
    """Of a void."""
    is_from_start: bool = False
    is_found: bool = False
    is_cause_first: bool = False
    is_rank_right: bool | None = None
    """None: no rank is to blame."""
    is_place_right: bool | None = None
    is_step_right: bool | None = None
    steps_to_detection: int | None = None
    said: list[str] = field(default_factory=list)
    """Of each alarm: cause, ranks, place, step."""
    others: int = 0
    """Alarms beside the right one."""
    twin_alarms: list[str] = field(default_factory=list)
    has_twin: bool = False
    """Whether the twin was run to its end."""
    twin_failure: str = ""
    seconds: float = 0.0

    @property
    def mistakes(self) -> list[str]:
        """What is wrong, a word each."""
        if self.status != "ran" or self.family == "healthy":
            return []
        found = [] if self.is_found else ["not found"]
        if self.is_found:
            found += [] if self.is_cause_first else ["cause"]
            parts = {"rank": self.is_rank_right, "place": self.is_place_right, "step": self.is_step_right}
            found += [word for word, is_right in parts.items() if is_right is False]
        return found + (["twin"] if self.twin_alarms else [])

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        return asdict(self)


def brief(diagnosis: dict[str, Any]) -> str:
    """One line."""
    top = diagnosis["causes"][0]
    places = [*top.get("tensors", ()), *top.get("modules", ())]
    shown = ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
    return (
        f"{top['cause']} ({diagnosis['severity']}) on {top.get('ranks', [])} {shown} "
        f"at {diagnosis['first_step']}, seen at {diagnosis['detected_step']}"
    )


def counts(diagnosis: dict[str, Any], severity: str) -> bool:
    """Whether it is severe enough, and has a cause."""
    return bool(diagnosis["causes"]) and SEVERITIES.index(diagnosis["severity"]) >= SEVERITIES.index(severity)


def judge(
    result: Result, expected: Expected, diagnoses: Sequence[dict[str, Any]], of_twin: Sequence[dict[str, Any]] = ()
) -> Result:
    """Fill in what was right. What is looked at is the first alarm; of several opened in the same second, the better one.

    A wrong cause that is said of the healthy twin too is a false alarm, and finds nothing.
    """
    result.twin_alarms = [brief(one) for one in of_twin if counts(one, "warning")]
    false = {one["causes"][0]["cause"] for one in of_twin if counts(one, "info")} - set(expected.causes)
    alarms = sorted((one for one in diagnoses if counts(one, expected.severity)), key=lambda one: one["opened_at"])
    result.said = [brief(one) for one in alarms]
    alarms = [one for one in alarms if one["causes"][0]["cause"] not in false]
    in_time = [one for one in alarms if _is_in_time(expected, one)]
    result.is_found = bool(in_time)
    if not in_time:
        return result
    first = [one for one in in_time if one["opened_at"] == in_time[0]["opened_at"]]
    chosen = next((one for one in first if one["causes"][0]["cause"] in expected.causes), first[0])
    top = chosen["causes"][0]
    result.others = len(alarms) - 1
    result.is_cause_first = top["cause"] in expected.causes
    if expected.ranks is not None:
        result.is_rank_right = tuple(sorted(top["ranks"])) in expected.ranks
    result.is_place_right = _is_place_right(expected, top)
    if expected.has_step and chosen["first_step"] is not None:
        result.is_step_right = expected.begin - EARLY_BY <= chosen["first_step"] <= expected.begin + expected.late_by
    if expected.within is not None and chosen["detected_step"] is not None:
        result.steps_to_detection = max(0, chosen["detected_step"] - expected.begin)
    return result


def _is_in_time(expected: Expected, diagnosis: dict[str, Any]) -> bool:
    step = diagnosis["detected_step"]
    if step is None:
        return True
    if step < expected.begin - EARLY_BY:
        return False
    return expected.within is None or step <= expected.begin + expected.within


def _is_place_right(expected: Expected, top: dict[str, Any]) -> bool | None:
    """By tensors or by modules: a case may be told in either."""
    if expected.tensors is None and expected.modules is None:
        return None
    tensors = {_bare(name) for name in top.get("tensors", ())}
    modules = {_bare(name) for name in top.get("modules", ())}
    wanted = set(expected.tensors or ())
    known = {part for name in tensors for part in wanted if name == part or name.endswith(f".{part}")}
    is_all = len(known) == len(wanted) or (len(wanted) > MANY and 2 * len(known) >= len(wanted))
    if wanted and tensors and len(known) == len(tensors) and is_all:
        return True
    named = modules or {name.rpartition(".")[0] for name in tensors}
    return bool(expected.modules and named and all(_is_inside(name, expected.modules) for name in named))


def _is_inside(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") or name.endswith(f".{module}") for module in modules)


def _bare(name: str) -> str:
    """Without what a wrapper puts in front."""
    return name.removeprefix("module.")


def wilson(right: int, number: int, z: float = 1.96) -> tuple[float, float]:
    """The interval in which the true share lies, with 95 % confidence.

    9 of 10: between 0.60 and 0.98.
    """
    if number == 0:
        return 0.0, 1.0
    share, width = right / number, z * z / number
    middle = share + width / 2
    spread = z * math.sqrt(share * (1 - share) / number + width / number / 4)
    return max(0.0, (middle - spread) / (1 + width)), min(1.0, (middle + spread) / (1 + width))


def ratio(values: Sequence[bool | None]) -> str:
    """`9 of 10 (60 to 98 %)`; None does not count."""
    known = [value for value in values if value is not None]
    if not known:
        return "none"
    low, high = wilson(sum(known), len(known))
    return f"{sum(known)} of {len(known)} ({100 * low:.0f} to {100 * high:.0f} %)"


def table(results: Sequence[Result]) -> str:
    """Markdown: a row a family, and one for all."""
    lines = [
        "| family | cases | found | cause first | rank | tensor or module | step | steps to detection, median | void |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    faults = [result for result in results if result.family != "healthy"]
    for family in [*sorted({result.family for result in faults}), "all"]:
        own = [result for result in faults if family in (result.family, "all")]
        ran = [result for result in own if result.status == "ran"]
        found = [result for result in ran if result.is_found]
        steps = [result.steps_to_detection for result in found if result.steps_to_detection is not None]
        cells = [
            family,
            str(len(ran)),
            ratio([result.is_found for result in ran]),
            ratio([result.is_cause_first for result in ran]),
            ratio([result.is_rank_right for result in found]),
            ratio([result.is_place_right for result in found]),
            ratio([result.is_step_right for result in found]),
            f"{statistics.median(steps):g}" if steps else "",
            str(sum(result.status == "void" for result in own)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *_sums(results)]) + "\n"


def _sums(results: Sequence[Result]) -> list[str]:
    faults = [result for result in results if result.family != "healthy" and result.status == "ran"]
    twins = [result for result in faults if result.has_twin]
    healthy = [result for result in results if result.family == "healthy" and result.status == "ran"]
    early = [result.steps_to_detection for result in faults if result.is_from_start and result.is_found and result.steps_to_detection is not None]  # fmt: skip
    return [
        f"- False alarms: {sum(bool(result.twin_alarms) for result in twins)} in {len(twins)} twins, {sum(bool(result.said) for result in healthy)} in {len(healthy)} healthy runs.",
        f"- Steps to detection of faults from the start, median: {f'{statistics.median(early):g}' if early else 'none found'}.",
        f"- Alarms beside the right one: {sum(result.others for result in faults)}.",
        "- Rank, tensor or module, and step are counted among what was found, where there is one to be named.",
        f"- Void, and not counted: {sum(result.status == 'void' for result in results)}; left out: {sum(result.status == 'left out' for result in results)}; twins that failed by themselves: {sum(bool(result.twin_failure) for result in faults)}.",
    ]


def misses(results: Sequence[Result]) -> list[str]:
    """A line for each case that is not wholly right."""
    lines = []
    for result in results:
        said = "; ".join(result.said) or "nothing"
        if result.status == "void":
            lines.append(f"{result.seed}: void ({result.why}): {result.title}")
        elif result.family == "healthy" and result.said:
            lines.append(f"{result.seed}: false alarm: {said}: {result.title}")
        elif result.mistakes:
            lines.append(f"{result.seed}: {', '.join(result.mistakes)}: {result.title}; said: {said}" + (f"; of the twin: {result.twin_alarms}" if result.twin_alarms else ""))  # fmt: skip
    return lines
