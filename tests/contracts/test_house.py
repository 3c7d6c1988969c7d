"""A class name has one meaning, a folder can be looked over, and `make test` has a real job for every family of faults."""

import hangs
from tests.contracts.house import SOURCES, House

import corpus
from holter import faults

MOST_FILES = 24
NEVER_IN_A_JOB = {"model"}
"""Families whose detectors were tried on made-up windows only."""
OUTSIDE_THE_CORPUS = {"devices"}
"""Families whose job needs more than a script: `tests/e2e/test_devices.py`."""


def test_a_class_name_has_one_meaning():
    assert {} == House().doubled_classes()


def test_no_class_of_the_kernels_has_the_name_of_another_in_the_daemon() -> None:
    kernels = House(SOURCES.parent.parent / "kernels" / "holter_kernels").classes()
    # The statistics of some tensors: as they are computed, and as they travel.
    assert {"Table"} == set(kernels) & set(House().classes())


def test_a_folder_has_two_dozen_files_at_most():
    assert {} == {folder: num for folder, num in House().files_of_folders().items() if num > MOST_FILES}


def test_every_family_of_faults_has_a_real_job_in_make_test():
    families = {type(detector).__module__.split(".")[2] for detector in faults.ALL}
    assert families - NEVER_IN_A_JOB - OUTSIDE_THE_CORPUS == {
        case.family for case in (*corpus.CASES, *corpus.COMPOSED_CASES, *hangs.CASES) if case.family
    }


def test_the_numbers_are_counted_right(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "__init__.py").write_text("from top.a.one import One\n")
    (tmp_path / "a" / "one.py").write_text("class One: ...\nclass _Own: ...\n")
    (tmp_path / "a" / "two.py").write_text("from top.a import one\nclass One: ...\nclass _Own: ...\n")
    top = tmp_path.rename(tmp_path.with_name("top"))
    house = House(top)
    assert {"top.a.one": {"top.a", "top.a.two"}, "top.a.two": set()} == house.importers()
    assert {"One": ["top.a.one", "top.a.two"]} == house.doubled_classes()
    assert ({"top/a": 2}, 6) == (house.files_of_folders(), house.num_lines())
