"""Policy entropy: a policy that has come down to one answer, or has gone up to noise.

What it detects
    A logged entropy that fell to a tenth of what it was and under a fiftieth of log(vocabulary), or that rose above nine tenths of
    log(vocabulary) from well below, and stays there at nine of ten logs. A fall to a tenth within tens of logs counts too where rewards
    are logged and did not rise with it.

Why it matters
    A policy without entropy samples the same answer again and again: groups lose their spread, nothing new is ever tried. One with all
    the entropy there is writes gibberish, whatever its reward says.

False positives
    Entropy falls in every run that learns: only the end of the scale counts, for many logs in a row, and only if it was higher before. A
    policy that begins untrained begins near log(vocabulary): there only plain noise, from below it, is an explosion. Without the
    vocabulary's size nothing is said of an explosion, and a collapse must reach a hundredth of a nat. A small task that is solved for
    good may end like this, and is reported.

What to do
    Read what the policy writes now (`holter explain entropy_collapse`, `entropy_explosion`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from holter.faults.shared.logged_series import LoggedPoint, logged, mostly_trailing
from holter.faults.shared.robust import deviation
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.window import Window
from holter.records import Evidence, Finding

ENTROPY = frozenset({"entropy", "policy_entropy"})
REWARDS = frozenset({"rewards", "reward"})


@dataclass(frozen=True)
class PolicyEntropy:
    """Compares a logged entropy with its beginning and with log(vocabulary)."""

    name: ClassVar[str] = "policy_entropy"

    min_logs: int = threshold(16, at_least=2)  # Once is an outlier.
    """Number of logs in a row at one end of the scale."""
    collapsed: float = 0.02
    """Share of log(vocabulary) below which the policy has one mode."""
    collapsed_nats: float = 0.01
    """The same in nats, if the vocabulary's size is not known."""
    fallen: float = 0.1
    """Share of its beginning below which it must have fallen."""
    sudden: int = 60
    """Number of logs within which a fall to that share counts by itself, if the reward did not rise with it."""
    paid: float = 3.0
    """Deviations by which the reward must have risen with such a fall: a policy that knows its answers earns by them."""
    exploded: float = 0.9
    """Share of log(vocabulary) above which it is noise."""
    was_lower: float = 0.7
    """Share of log(vocabulary) below which it must have started, to have exploded."""

    was_not_noise: float = 0.95
    """Share of log(vocabulary) below which an untrained policy was still more than plain noise."""
    is_noise: float = 0.995
    """Share of log(vocabulary) from which on all answers are equally likely."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: the newest logs, if all of them are at one end."""
        found = logged(window, ENTROPY.__contains__)
        sizes = [points[-1][1] for points in logged(window, lambda name: name == "vocabulary").values()]
        top = math.log(sizes[0]) if sizes and sizes[0] > 1 else None
        for name, points in sorted(found.items()):
            begin = median(value for _, value in points[:5])
            ends = self._ends(begin, top)
            runs = [mostly_trailing(points, holds) for holds in ends]
            run = next((one for one in runs if len(one) >= self.min_logs), self._fall(window, points, begin, top))
            if run and len(points) > len(run):
                yield _finding(window, (name, begin, top), points, run, self.min_logs)
                return

    def _fall(
        self, window: Window, points: Sequence[LoggedPoint], begin: float, top: float | None
    ) -> Sequence[LoggedPoint]:
        """Return the newest logs, if the entropy fell to a tenth within tens of logs and the reward did not rise with it."""
        low = self.fallen * min(begin, top or begin)
        run = mostly_trailing(points, lambda value: value < low)
        high = [step for step, value in points[: len(points) - len(run)] if value > begin / 2]
        if len(run) < self.min_logs or not high or sum(step > high[-1] for step, _ in points) - len(run) > self.sudden:
            return ()
        rewards = next(iter(logged(window, REWARDS.__contains__).values()), [])
        # Only just before the fall: a long earlier rise of the reward did not pay for it.
        before = [value for step, value in rewards if step <= high[-1]][-self.min_logs :]
        after = [value for step, value in rewards if step >= run[0][0]]
        # A policy that knows the answers earns at every step: a reward that swings between all and nothing stays within its own noise.
        is_paid = (
            not before
            or not after
            or median(after) > median(before) + self.paid * max(deviation(before), deviation(after))
        )
        return () if is_paid else run

    def _ends(self, begin: float, top: float | None) -> Iterator[Callable[[float], bool]]:
        """Yield a test for too low, and if the largest possible value is known and it began well below, a test for too high."""
        low = min(self.collapsed * top if top else self.collapsed_nats, self.fallen * begin)
        yield lambda value: value < low
        if top and begin < self.was_lower * top:
            yield lambda value: value > self.exploded * top
        elif top and begin < self.was_not_noise * top:
            yield lambda value: value > self.is_noise * top


def _finding(
    window: Window,
    known: tuple[str, float, float | None],
    points: Sequence[LoggedPoint],
    run: Sequence[LoggedPoint],
    min_logs: int,
) -> Finding:
    name, begin, top = known
    is_low = run[-1][1] < begin
    half = (begin + run[-1][1]) / 2
    # Since when it has been nearer to its end than to its beginning.
    before = [step for step, value in points if step < run[0][0] and (value >= half) is is_low]
    first_step = next(step for step, _ in points if not before or step > before[-1])
    of_top = f" of at most {top:.3g}" if top else ""
    return Finding(
        detector=PolicyEntropy.name,
        severity="warning",
        first_step=first_step,
        detected_step=run[min_logs - 1][0],
        ranks=tuple(sorted(window.attached)),
        summary=f"The policy's entropy {'fell' if is_low else 'rose'} from {begin:.3g} to {run[-1][1]:.3g}{of_top} and has stayed there since step {run[0][0]}.",
        facts={
            "is_collapsed": is_low,
            "is_exploded": not is_low,
            "is_vocabulary_known": top is not None,
            "is_returning": False,
            "series": [name],
        },
        evidence=(
            Evidence(
                kind="series",
                summary=f"{name.removeprefix('log.')}: {begin:.3g} at first, {run[-1][1]:.3g} now{of_top}, at {len(run)} logs in a row",
                values={"name": name, "begin": begin, "last": run[-1][1], "top": top, "num_logs": len(run)},
            ),
        ),
    )
