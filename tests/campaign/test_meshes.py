"""The second grammar draws the same case for a seed, always."""

import hashlib

from tests.campaign.meshes import FOUR_RANKS, HEALTHY, KINDS, draw

FROZEN = "66dd85e2a225cda7"
"""Of 2,400 draws. A change of it is a commit of its own, before anything is drawn, and a line in docs/campaign.md."""
DRAWN = [draw(f"0-{mark}{number}") for mark in ("", "h") for number in range(1200)]


def test_the_grammar_of_meshes_is_frozen():
    commands = (" ".join(part.rpartition("/")[2] for part in case.command()) + case.title for case in DRAWN)
    assert FROZEN == hashlib.sha256("".join(commands).encode()).hexdigest()[:16]


def test_every_kind_occurs_and_ranks_fit():
    assert set(KINDS) == {case.kind for case in DRAWN} - {None}
    assert all(case.ranks == 4 for case in DRAWN if case.framework in FOUR_RANKS)
    assert all(0 <= case.culprit < case.ranks for case in DRAWN)
    assert set(HEALTHY) == {case.framework for case in DRAWN if case.kind is None}


def test_the_same_case_hardly_comes_again():
    titles = [case.title for case in DRAWN if case.kind is not None]
    assert len(set(titles)) > 0.97 * len(titles)


def test_a_twin_is_the_same_job_without_the_fault():
    case = draw("0-0")
    assert [*case.command(is_healthy=True)] != case.command()
    assert "--healthy" in case.command(is_healthy=True)
