"""What ranks send and learn, given what they have heard: no sockets, no time."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from holter.rank.hold.agreement import KEPT_ROUNDS, AgreementRounds, Round, Sending, Tree, Word

FIRST = Round(7, 0)


class Job:
    """All ranks of a job, and what is under way between them."""

    def __init__(self, world_size: int, fan_out: int) -> None:
        self.rounds = [AgreementRounds(Tree(rank, world_size, fan_out)) for rank in range(world_size)]
        self.under_way: deque[tuple[int, Sending]] = deque()

    def say(self, rank: int, word: Word) -> None:
        self.under_way.extend((rank, sending) for sending in self.rounds[rank].hear(rank, word))

    def deliver(self, pick=lambda _: 0) -> None:
        """Everything, in any order."""
        while self.under_way:
            self.under_way.rotate(-pick(len(self.under_way)))
            sender, (to, word) = self.under_way.popleft()
            self.under_way.extend((to, sending) for sending in self.rounds[to].hear(sender, word))

    def answers(self) -> list[Word | None]:
        return [rounds.answer for rounds in self.rounds]


def test_a_tree_of_sixteen_thousand_ranks_is_four_levels_deep_and_everybody_has_one_parent():
    trees = [Tree(rank, 16_000) for rank in range(16_000)]
    depth = [0] * 16_000
    for tree in trees[1:]:
        assert tree.rank in trees[tree.parent].children
        depth[tree.rank] = depth[tree.parent] + 1
    assert 15_999 == sum(len(tree.children) for tree in trees)
    assert 4 == max(depth)
    assert trees[0].parent is None


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(2, 5), st.data())
def test_everybody_learns_the_first_bad_step_whoever_speaks_first(world_size, fan_out, data):
    job = Job(world_size, fan_out)
    bad = {rank: data.draw(st.sampled_from([None, None, 5, 6, 7])) for rank in range(world_size)}
    for rank in data.draw(st.permutations(range(world_size))):
        job.say(rank, Word(FIRST, bad[rank]))
        if data.draw(st.booleans()):
            job.deliver(lambda n: data.draw(st.integers(0, n - 1)))
    job.deliver()
    expected = min((step for step in bad.values() if step is not None), default=None)
    assert [Word(FIRST, expected)] * world_size == job.answers()


@given(st.integers(2, 40), st.integers(2, 5), st.data())
def test_nobody_learns_anything_before_the_last_has_spoken(world_size, fan_out, data):
    job, silent = Job(world_size, fan_out), data.draw(st.integers(0, world_size - 1))
    for rank in set(range(world_size)) - {silent}:
        job.say(rank, Word(FIRST, 7))
    job.deliver()
    assert [None] * world_size == job.answers()


def test_whoever_waits_knows_whom_it_waits_for():
    job = Job(7, 2)
    for rank in (0, 1, 2, 3, 5, 6):
        job.say(rank, Word(FIRST, None))
    job.deliver()
    assert [1] == job.rounds[0].awaited(FIRST)
    assert [4] == job.rounds[1].awaited(FIRST)
    assert [0] == job.rounds[2].awaited(FIRST)
    assert [2] == job.rounds[6].awaited(FIRST)


def test_an_answer_that_comes_late_is_none_to_the_round_that_is_asked():
    rank = AgreementRounds(Tree(1, 2))
    rank.hear(1, Word(Round(8, 0), None))
    rank.hear(0, Word(FIRST, 7))
    assert rank.answered(Round(8, 0)) is None
    rank.hear(0, Word(Round(8, 0), None))
    rank.hear(0, Word(Round(3, 0), 3))
    assert Word(Round(8, 0), None) == rank.answered(Round(8, 0))


def test_two_turns_of_one_step_are_two_rounds():
    job = Job(2, 16)
    job.say(0, Word(Round(7, 0), None))
    job.say(1, Word(Round(7, 1), 7))
    job.deliver()
    assert [None, None] == job.answers()
    job.say(0, Word(Round(7, 1), None))
    job.deliver()
    assert [Word(Round(7, 1), 7)] * 2 == job.answers()


def test_rounds_in_which_somebody_never_speaks_are_forgotten():
    root = AgreementRounds(Tree(0, 2))
    for step in range(10 * KEPT_ROUNDS):
        assert [] == root.hear(0, Word(Round(step, 0), None))
    assert KEPT_ROUNDS == len(root._said)
    assert [] == root.hear(1, Word(Round(0, 0), 0))
    newest = Round(10 * KEPT_ROUNDS - 1, 0)
    assert [Sending(1, Word(newest, None))] == root.hear(1, Word(newest, None))
