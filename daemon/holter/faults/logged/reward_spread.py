"""Reward spread: all samples of every group are rewarded alike, so that no advantage is left to learn from.

What it detects
    Log after log in which every group of samples has equal rewards: groups without spread counted from the rewards themselves, or the
    framework's own figures (`frac_reward_zero_std`, `reward_std`, a deviation of advantages of zero). And advantages that are all exactly
    zero although the rewards they are made of differ.

Why it matters
    A group-relative advantage is a reward minus its group's mean: with equal rewards it is zero, and so is the policy's gradient. Only the
    KL term is trained, toward the reference. The loss is small and steady, and looks like convergence.

False positives
    Some groups without spread are ordinary, a few such steps too: it must be all groups for many logs in a row. Figures that contradict
    each other, such as constant rewards at each step beside advantages that vary (returns of an episode), say nothing. A task that is
    solved entirely also ends like this: there it is no fault, but training on is a waste, and it is reported.

What to do
    Look at rewards and completions of one group: solved by all, failed by all, or a reward function that cannot tell them apart
    (`holter explain zero_advantages`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from holter.faults.shared.logged_series import LoggedPoint, logged, plain
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.window import Window
from holter.records import Evidence, Finding

DEVIATIONS = frozenset({"reward_std", "rewards_std"})
"""Deviations over all samples or over groups: zero if there is no spread; above zero they prove nothing, because groups
may differ."""
ADVANTAGES = frozenset({"advantage_std", "advantages_std"})
"""Zero if and only if there is no spread."""
SHARES = frozenset({"frac_reward_zero_std", "rewards_flat_share"})
"""Share of groups without spread."""
ALL_GROUPS, FLAT_GROUPS = "rewards.num_groups", "rewards.num_flat_groups"
LARGEST = "advantages.largest"
REWARDS = frozenset({"reward", "rewards", "reward_mean", "rewards_mean"})
ROUNDING = 1e-7
"""Deviation of equal numbers by rounding, as a share of their magnitude."""


@dataclass(frozen=True)
class RewardSpread:
    """Judges whether rewards still distinguish the samples of a group."""

    name: ClassVar[str] = "reward_spread"

    min_logs: int = threshold(8, at_least=1)
    """Number of logs in a row without any spread."""
    all_groups: float = 0.99
    """Share of groups from which on all count as flat."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: the newest logs, if none of them shows any spread."""
        known = {ALL_GROUPS, FLAT_GROUPS, LARGEST} | DEVIATIONS | ADVANTAGES | SHARES
        found = logged(window, (known | REWARDS).__contains__)
        at_step: dict[int, dict[str, float]] = {}
        for name, points in found.items():
            for step, value in points:
                at_step.setdefault(step, {})[plain(name)] = value
        flat = {step: says for step, values in at_step.items() if (says := self._is_flat(values)) is not None}
        steps = sorted(flat)
        run = steps[max((place + 1 for place, step in enumerate(steps) if not flat[step]), default=0) :]
        if len(run) >= self.min_logs:
            # A step without spread may be explained by rewards alone.
            is_lost = 2 * sum(_is_lost(at_step[step]) for step in run) > len(run)
            finding = _finding(window, run, found, is_from_start=len(run) == len(steps), is_lost=is_lost)
            yield msgspec.structs.replace(finding, detected_step=run[self.min_logs - 1])

    def _is_flat(self, values: dict[str, float]) -> bool | None:
        """Return what one log shows; None if nothing.

        The surest figure in it counts, and advantages that differ refute all others.
        """
        if any(abs(values.get(name, 0.0)) > ROUNDING for name in ADVANTAGES):
            return False
        if values.get(LARGEST) == 0 or any(name in values for name in ADVANTAGES):
            return True
        if values.get(ALL_GROUPS, 0.0) > 0 and FLAT_GROUPS in values:
            return values[FLAT_GROUPS] >= self.all_groups * values[ALL_GROUPS]
        shares = [values[name] for name in SHARES if name in values]
        if shares:
            return min(shares) >= self.all_groups
        deviations = [values[name] for name in DEVIATIONS if name in values]
        scale = max([1.0, *(abs(values[name]) for name in REWARDS if name in values)])
        return max(deviations) <= ROUNDING * scale if deviations else None


def _is_lost(values: dict[str, float]) -> bool:
    """Whether rewards differ although advantages do not."""
    has_spread = any(values.get(name, 0.0) > ROUNDING for name in DEVIATIONS)
    is_flat = FLAT_GROUPS in values and values[FLAT_GROUPS] >= values.get(ALL_GROUPS, 0.0)
    has_none = values.get(LARGEST) == 0 or any(name in values for name in ADVANTAGES)
    return has_none and has_spread and not is_flat


def _finding(
    window: Window, run: Sequence[int], found: dict[str, list[LoggedPoint]], *, is_from_start: bool, is_lost: bool
) -> Finding:
    what = (
        f"All advantages have been exactly zero since step {run[0]} although rewards differ"
        if is_lost
        else f"All rewards of every group have been equal since step {run[0]}: there is no advantage to learn from"
    )
    return Finding(
        detector=RewardSpread.name,
        severity="warning",
        first_step=run[0],
        detected_step=run[-1],
        ranks=tuple(sorted(window.attached)),
        summary=f"{what}.",
        facts={
            "has_no_spread": not is_lost,
            "is_lost_after_rewards": is_lost,
            "has_spread": False,
            "is_from_start": is_from_start,
            "is_counted": FLAT_GROUPS in found,
            "series": sorted(found),
        },
        evidence=tuple(_evidence(name, dict(points), run) for name, points in sorted(found.items())),
    )


def _evidence(name: str, values: dict[int, float], run: Sequence[int]) -> Evidence:
    inside = [values[step] for step in run if step in values]
    shown = (
        f"{min(inside):g} to {max(inside):g}"
        if inside and min(inside) != max(inside)
        else f"{inside[0]:g}"
        if inside
        else "not said"
    )
    return Evidence(
        kind="series",
        summary=f"{name.removeprefix('log.')}: {shown} at {len(inside)} logs, steps {run[0]} to {run[-1]}",
        values={"name": name, "last": inside[-1] if inside else None, "num_logs": len(inside)},
    )
