"""Every detector, every cause and every alert about holter itself has a page; nothing else has."""

import pytest

from holter import faults
from holter.exporters.alerts import WATCHER_RULES
from holter.exporters.pages import names, page


@pytest.mark.parametrize("name", names())
def test_a_page_begins_with_its_name_and_fits_a_terminal(name: str) -> None:
    text = page(name)
    assert text is not None
    assert text.startswith(name)
    assert max(map(len, text.splitlines())) <= 140


def test_everything_that_can_be_named_has_a_page() -> None:
    watches = {watch.name for watch in WATCHER_RULES}
    assert set(faults.DETECTORS) | set(faults.CAUSES) | watches == set(names())


def test_a_detectors_page_shows_its_settings() -> None:
    assert "nonfinite_values.patience_s = 2.0" in (page("nonfinite_values") or "")


def test_a_detector_that_never_saw_a_job_says_so_on_its_page() -> None:
    on_trial = [name for name, entry in faults.DETECTORS.items() if entry.tried_on != "jobs"]
    assert "kl_term" in on_trial
    for name in faults.DETECTORS:
        assert (name in on_trial) is ("\nOn trial\n    It was tried on made-up windows only" in (page(name) or ""))


def test_a_causes_page_has_the_fix_in_six_parts() -> None:
    text = page("rank_dead") or ""
    for title in (
        "Do",
        "What that changes",
        "What it does not fix",
        "What to expect",
        "How to verify",
        "If it does not help",
    ):
        assert f"\n{title}\n" in text


def test_an_unknown_name_has_none() -> None:
    assert page("gremlins") is None
