"""Any interleaving gives the same window; memory is bounded; the window says what its docstrings promise."""

from collections.abc import Iterable

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.coordinator.conftest import attached, census, done, exited, healthy_roots, seen

from holter import clock
from holter.coordinator import assembly
from holter.coordinator.assembly import Assembly
from holter.detectors.window import Window
from holter.records import Nonfinite, Observation, Origin, Table

ROOTS = st.dictionaries(st.sampled_from(["parameters_before", "gradients", "parameters_after"]), st.integers(1, 2))
NONFINITE = st.lists(
    st.builds(
        Nonfinite,
        where=st.sampled_from(["input", "loss", "gradient"]),
        name=st.sampled_from(["a", "b"]),
        nans=st.integers(1, 3),
        infs=st.just(0),
        numel=st.just(8),
        order=st.integers(0, 3),
    ),
    max_size=3,
)


@st.composite
def lives(draw: st.DrawFn) -> list[list[tuple[Observation, int]]]:
    """What each of up to four ranks says, in its own order, and when it is received."""
    world_size = draw(st.integers(1, 4))
    ranks = []
    for rank in range(world_size):
        first = draw(st.integers(0, 2))
        says = [attached(rank, world_size, step=first), census(rank, 0, 2), census(rank, 1, 2)]
        steps = range(first, first + draw(st.integers(0, 6)))
        # Now and then one is lost on the way.
        says += [done(rank, step, draw(ROOTS), draw(NONFINITE)) for step in steps if draw(st.integers(0, 9))]
        if draw(st.booleans()):
            says.append(exited(rank, 3))
        says = [msgspec.structs.replace(said, at_ns=number) for number, said in enumerate(says)]
        ranks.append([(said, draw(st.integers(0, 1000))) for said in says])
    return ranks


def feed(entries: Iterable[tuple[Observation, int]], *, look: bool = False) -> Window:
    built = Assembly()
    for observation, received_ns in entries:
        built.add(observation, received_ns)
        if look:
            built.window(0)
    return built.window(0)


@settings(max_examples=100, deadline=None)
@given(lives(), st.randoms(use_true_random=False))
def test_any_interleaving_gives_the_same_window(ranks: list[list[tuple[Observation, int]]], random: object) -> None:
    expected = feed(entry for life in ranks for entry in life)
    queues = [list(life) for life in ranks]
    shuffled = []
    while any(queues):
        queue = random.choice([queue for queue in queues if queue])  # type: ignore[attr-defined]
        shuffled.append(queue.pop(0))
    assert expected == feed(shuffled)
    assert expected == feed(shuffled, look=True), "looking in between changes nothing"


def healthy(num_ranks: int, num_steps: int) -> Assembly:
    built = Assembly(num_ranks)
    for rank in range(num_ranks):
        built.add(attached(rank, num_ranks), 0)
    for step in range(num_steps):
        for rank in range(num_ranks):
            built.add(done(rank, step), step)
    return built


def test_agreement_is_counted_since_the_start() -> None:
    built = healthy(2, 5)
    for rank in range(2):
        built.add(done(rank, 5, {"gradients": rank}), 5)
    history = built.window(0).classes["gradients"]
    assert (0, True, 4, 5, 5, 1) == (
        history.first_step,
        history.is_equal_at_first,
        history.last_equal_step,
        history.first_unequal_step,
        history.num_equal,
        history.num_unequal,
    )


def test_only_those_that_read_a_class_are_compared_and_it_takes_two() -> None:
    built = healthy(3, 1)
    for rank, roots in enumerate([{"gradients": 4}, {}, {"gradients": 4, "buffers": 1}]):
        built.add(done(rank, 1, roots), 1)
    window = built.window(0)
    assert 2 == window.classes["gradients"].num_equal
    assert "buffers" not in window.classes
    assert {4: (0, 2)} == window.step(1).roots["gradients"]  # type: ignore[union-attr]


def test_agreement_waits_for_the_missing_and_difference_does_not() -> None:
    built = healthy(3, 1)
    built.add(done(0, 1), 1)
    built.add(done(1, 1), 1)
    view = built.window(0).steps[-1]
    assert ((2,), 2) == (view.missing, view.num_reported)
    assert 1 == built.window(0).classes["gradients"].num_equal
    built.add(done(0, 2, {"gradients": 1}), 2)
    built.add(done(1, 2, {"gradients": 2}), 2)
    assert 2 == built.window(0).classes["gradients"].first_unequal_step


def test_a_rank_that_exited_is_not_missing_and_one_that_joins_late_owes_no_past() -> None:
    built = healthy(2, 2)
    built.add(done(0, 2), 2)
    assert (1,) == built.window(0).steps[-1].missing
    built.add(exited(1, 2), 2)
    assert () == built.window(0).steps[-1].missing
    built.add(attached(2, 3, step=3), 3)
    built.add(done(0, 3), 3)
    assert [(), (), (), (2,)] == [view.missing for view in built.window(0).steps]


def test_own_history_is_kept_or_broken_by_each_rank() -> None:
    built = healthy(2, 3)
    built.add(done(0, 3), 3)
    built.add(done(1, 3, healthy_roots(3) | {"parameters_before": 1}), 3)
    last = built.window(0).steps[-1]
    assert ((1,), (0,)) == (last.broke_history, last.kept_history)
    assert ((), ()) == (built.window(0).steps[0].broke_history, built.window(0).steps[0].kept_history)


def test_a_rank_that_begins_again_takes_the_future_back() -> None:
    built = healthy(2, 10)
    built.add(exited(1, 9), 9)
    for rank in range(2):
        built.add(attached(rank, 2, pid=9000 + rank, step=4), 10)
    window = built.window(0)
    assert [0, 1, 2, 3] == [view.step for view in window.steps]
    assert () == window.exits


def test_evidence_is_found_again_by_its_key() -> None:
    built = healthy(2, 1)
    table = Table(tensor_class="gradients", root=1, names=["a"], fingerprints=[1], norms=[])
    origin = Origin(module="m", module_class="M", is_input_finite=True, input_absmax=1.0, replayed=True, reason="")
    built.add(seen(1, 0, table), 0)
    built.add(seen(1, 0, origin), 0)
    built.mark_unavailable(("gradients", 0, 0))
    window = built.window(0)
    assert ({("gradients", 0, 1): table}, {(1, 0): origin}) == (window.tables, window.origins)
    assert {("gradients", 0, 0)} == window.unavailable


def test_equal_censuses_are_one_object() -> None:
    built = Assembly()
    for rank in range(3):
        built.add(census(rank, 0, 2), 0)
        assert rank not in built.window(0).census
        built.add(census(rank, 1, 2), 0)
    joined = built.window(0).census
    assert 1 == len({id(one) for one in joined.values()})
    assert (4, [1, 0], 1) == (len(joined[0].entries), joined[0].backward_order, joined[0].parts)


def test_memory_is_bounded_in_steps_and_the_histories_still_count_all() -> None:
    built = healthy(2, 3000)
    window = built.window(0)
    assert (assembly.MAX_STEPS, 2999) == (len(window.steps), window.steps[-1].step)
    assert 3000 == window.classes["gradients"].num_equal
    built.add(done(0, 5, {"gradients": 1}), 0)
    assert 3000 == built.window(0).classes["gradients"].num_equal, "a forgotten step stays forgotten"


def test_memory_is_bounded_for_a_rank_that_never_stops_saying_nonsense() -> None:
    built = Assembly(100_000)
    bad = [Nonfinite(where="gradient", name=str(order), nans=1, infs=0, numel=1, order=order) for order in range(500)]
    for step in range(0, 10**9, 10**7):
        built.add(done(0, step, {str(name): 1 for name in range(100)}, bad), 0)
    steps = built.window(0).steps
    assert assembly.MIN_STEPS == len(steps)
    assert all(len(view.nonfinite) <= 4 and len(view.roots) <= 16 for view in steps)
    for number in range(assembly.MAX_TABLES + 5):
        built.add(seen(0, number, Table(tensor_class="g", root=1, names=[], fingerprints=[], norms=[])), 0)
    window = built.window(0)
    assert (assembly.MAX_TABLES, 5) == (len(window.tables), len(window.unavailable))


def test_16_000_ranks_cost_a_few_microseconds_each_and_finished_steps_nothing() -> None:
    built = healthy(16_000, 1)
    records = [done(rank, 1) for rank in range(16_000)]
    began_s = clock.monotonic_s()
    for record in records:
        built.add(record, 1)
    added_s = clock.monotonic_s() - began_s
    first = built.window(0)
    began_s = clock.monotonic_s()
    second = built.window(1)
    looked_s = clock.monotonic_s() - began_s
    # Ten times what a 2 GHz core needs; the bound that matters is one second a step.
    assert added_s < 1.0
    assert looked_s < 0.1
    assert first.steps[0] is second.steps[0]
