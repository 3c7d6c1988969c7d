"""What holds for every detector."""

import dataclasses
import importlib
from typing import Any, cast

import pytest

from holter import faults
from holter.faults import Detector
from made_up import made_window

EMPTY = made_window()
each = pytest.mark.parametrize("detector", faults.ALL, ids=lambda detector: detector.name)


def test_names_are_unique() -> None:
    names = [detector.name for detector in faults.ALL]
    assert sorted(set(names)) == sorted(names)


@each
def test_it_is_frozen_and_lives_in_a_file_of_its_name(detector: Detector) -> None:
    assert type(detector).__module__.split(".")[3] == detector.name
    for field in dataclasses.fields(cast("Any", detector)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(detector, field.name, 0)


@each
def test_its_page_has_every_heading(detector: Detector) -> None:
    text = importlib.import_module(type(detector).__module__).__doc__ or ""
    for heading in ("What it detects", "Why it matters", "False positives", "What to do"):
        assert f"\n{heading}\n" in text


@each
def test_an_empty_window_raises_nothing(detector: Detector) -> None:
    assert list(detector.judge(EMPTY)) == []
