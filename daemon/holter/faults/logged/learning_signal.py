"""Learning signal: what is generated leaves nothing to learn from, from log to log.

What it detects
    Three logs in a row in which all rewards are equal and the gradient is exactly zero; or all completions are empty, or cut at
    their longest, and the rewards are equal or the gradient is zero. Read from what a trainer logs (`reward_std`,
    `frac_reward_zero_std`, `completions/clipped_ratio`, `completions/max_length`), or from `watch.log(rewards=...)`.

Why it matters
    Nothing is trained, at full cost: most often a reward function that returns the same whatever it reads, an end token that is
    never met, or a template after which the model has nothing to say.

False positives
    Completions that are all cut are how some tasks are set: where their rewards differ and gradients are there, they are silent.
    Equal rewards beside a term that is trained (KL, entropy) are `zero_advantages`, after more logs. A hard task may begin like
    this for some steps; the incident closes when a signal comes.

What to do
    Print prompt, completion and reward of one group (`holter explain no_learning_signal`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.logged_series import logged, plain
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.window import Window
from holter.records import Evidence, Finding

SPREADS = frozenset({"reward_std", "rewards_std"})
SHARES = frozenset({"frac_reward_zero_std", "rewards_flat_share"})
CUT, LONGEST = "clipped_ratio", "max_length"
REWARDS = frozenset({"reward", "rewards"})
ROUNDING = 1e-7


@dataclass(frozen=True)
class LearningSignal:
    """Judges whether what is generated leaves anything to learn from."""

    name: ClassVar[str] = "learning_signal"

    min_logs: int = threshold(3, at_least=1)
    """Number of logs in a row."""
    all_cut: float = threshold(0.999, above=0, at_most=1)
    """Share of cut completions from which on all count as cut."""
    empty_length: float = threshold(1.0, at_least=0)
    """The longest completion is at most this long: an end token, or nothing."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: the newest logs, if none has a signal."""
        at_step: dict[int, dict[str, float]] = {}
        for name, points in logged(window, (SPREADS | SHARES | REWARDS | {CUT, LONGEST}).__contains__).items():
            for step, value in points:
                at_step.setdefault(step, {})[plain(name)] = value
        norms = {step: spread.high for step, spread in window.values("gradient_norm")}
        said = [step for step in sorted(at_step) if (SPREADS | SHARES) & at_step[step].keys()]
        run: list[int] = []
        for step in reversed(said):
            if not self._has_none(at_step[step], _norm_before(norms, step)):
                break
            run.insert(0, step)
        if len(run) >= self.min_logs:
            yield self._finding(window, run, at_step, is_zero=_norm_before(norms, run[-1]) == 0.0)

    def _has_none(self, values: dict[str, float], norm: float | None) -> bool:
        is_flat = _is_flat(values)
        return (is_flat and norm == 0.0) or (self._is_spoilt(values) and (is_flat or norm == 0.0))

    def _is_spoilt(self, values: dict[str, float]) -> bool:
        return (
            values.get(CUT, 0.0) >= self.all_cut or values.get(LONGEST, 2 * self.empty_length + 1) <= self.empty_length
        )

    def _finding(
        self, window: Window, run: list[int], at_step: dict[int, dict[str, float]], *, is_zero: bool
    ) -> Finding:
        newest = at_step[run[-1]]
        is_empty = newest.get(LONGEST, 2 * self.empty_length + 1) <= self.empty_length
        is_cut = not is_empty and newest.get(CUT, 0.0) >= self.all_cut
        what = [
            "all completions are empty" if is_empty else "all completions are cut at their longest" if is_cut else "",
            f"all rewards are equal ({newest.get('reward', newest.get('rewards', 0.0)):g})" if _is_flat(newest) else "",
            "the gradient is exactly zero" if is_zero else "",
        ]
        said = ", ".join(word for word in what if word)
        return Finding(
            detector=self.name,
            severity="warning",
            first_step=run[0],
            detected_step=run[self.min_logs - 1],
            ranks=tuple(sorted(window.attached)),
            summary=f"There has been nothing to learn from since step {run[0]}: {said}.",
            facts={
                "has_no_signal": True,
                "has_signal": False,
                "is_gradient_zero": is_zero,
            },
            evidence=(
                Evidence(
                    kind="series",
                    summary=f"{len(run)} logs in a row, steps {run[0]} to {run[-1]}: {', '.join(f'{name} {value:g}' for name, value in sorted(newest.items()))}{', gradient norm 0' if is_zero else ''}",
                    values=newest | {"num_logs": len(run)},
                ),
            ),
        )


def _is_flat(values: dict[str, float]) -> bool:
    scale = max([1.0, *(abs(values[name]) for name in REWARDS if name in values)])
    spreads = [values[name] <= ROUNDING * scale for name in SPREADS if name in values]
    shares = [values[name] >= 1.0 - ROUNDING for name in SHARES if name in values]
    return bool(spreads or shares) and all(spreads) and all(shares)


def _norm_before(norms: dict[int, float], step: int) -> float | None:
    """Return the gradient norm of the step that was logged: trackers are told after it, when the next step has begun."""
    known = [norms[one] for one in (step, step - 1) if one in norms]
    return max(known) if known else None
