"""A threshold out of its bounds is refused, named as the user wrote it, with the value."""

import dataclasses
import math
from typing import ClassVar

import pytest

from holter import faults
from holter.faults.shared.thresholds import check_thresholds, threshold


@dataclasses.dataclass(frozen=True)
class Picky:
    name: ClassVar[str] = "picky"

    wait_s: float = threshold(1.0, at_least=0)
    ratio: float = threshold(2.0, above=0)
    share: float = threshold(0.5, above=0, below=1)
    most: float = threshold(0.9, above=0.5, at_most=1)
    lost: int = threshold(9, at_least="fewest")
    fewest: int = threshold(3, at_least=2)
    free: float = -1.0

    def __post_init__(self) -> None:
        check_thresholds(self)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"wait_s": -1}, "picky.wait_s must not be negative, got -1"),
        ({"ratio": 0}, "picky.ratio must be positive, got 0"),
        ({"share": 1}, "picky.share must be between 0 and 1, got 1"),
        ({"share": math.nan}, "picky.share must be between 0 and 1, got nan"),
        ({"most": 0.5}, "picky.most must be above 0.5 and at most 1, got 0.5"),
        ({"lost": 2}, "picky.lost must be at least fewest, got 2"),
        ({"fewest": 1}, "picky.fewest must be at least 2, got 1"),
    ],
)
def test_what_is_out_of_bounds_is_named_with_its_value(wrong: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the whole sentence is compared
        Picky(**wrong)
    assert sentence == str(refused.value)


def test_what_is_within_bounds_is_taken() -> None:
    taken = Picky(wait_s=0, most=1, lost=3)
    assert (0, 1, 3, -1.0) == (taken.wait_s, taken.most, taken.lost, taken.free)


@pytest.mark.parametrize("detector", faults.ALL, ids=lambda detector: detector.name)
def test_every_detector_checks_the_bounds_that_it_declares(detector: faults.Detector) -> None:
    for one in dataclasses.fields(detector):
        if one.metadata.get("bounds") is not None:
            with pytest.raises(ValueError, match=rf"^{detector.name}\.{one.name} must "):
                dataclasses.replace(detector, **{one.name: math.nan})
