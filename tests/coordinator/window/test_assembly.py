"""Any interleaving gives the same window; memory is bounded; the window says what its docstrings promise."""

import math
import time
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.coordinator.conftest import attached, census, done, exited, healthy_roots, seen

from holter.coordinator.intake import is_sound
from holter.coordinator.window import assembly
from holter.coordinator.window.assembly import Assembly, ProgressBook
from holter.faults.window import Window
from holter.records import (
    Body,
    Census,
    Exam,
    Feed,
    Halting,
    Inspection,
    Link,
    Logged,
    Nonfinite,
    Observation,
    Origin,
    Overdue,
    Phase,
    ProcessState,
    Rare,
    ScriptWarning,
    Skipped,
    StageTimes,
    Table,
    Traffic,
    Vitals,
)


def numbered(
    rank: int,
    step: int,
    loss: float | None,
    batch: int = 0,
    *,
    roots: dict[str, int] | None = None,
    nonfinite: list[Nonfinite] | None = None,
    **numbers: float,
) -> Observation:
    record = done(rank, step, roots, nonfinite)
    body = msgspec.structs.replace(record.body, loss=loss, batch=batch, numbers=numbers)
    return msgspec.structs.replace(record, body=body)


def feed_note(loader: int, epoch: int, *, is_end: bool = False, is_training: bool = False) -> Feed:
    return Feed(
        loader=loader,
        epoch=epoch,
        is_end=is_end,
        is_training=is_training,
        dataset="D",
        dataset_size=8,
        num_batches=4,
        batch_size=2,
        num_taken=4 if is_end else 0,
        num_samples=8 if is_end else 0,
        sampler="RandomSampler",
        is_shuffling=True,
        sampler_epoch=-1,
        num_shards=1,
    )


def retyped(rank: int, step: int, dtype: str = "bfloat16") -> Observation:
    """The same model, its first tensor of another dtype, its second frozen, one gone and one new."""
    known = census(rank).body
    assert isinstance(known, Census)
    first, second = known.entries
    entries = [
        msgspec.structs.replace(first, dtype=dtype),
        msgspec.structs.replace(second, requires_grad=False),
        msgspec.structs.replace(first, name="c.weight"),
    ]
    return seen(rank, step, msgspec.structs.replace(known, entries=entries))


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
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
LOGGED = st.dictionaries(st.sampled_from(["kl", "loss", "sum.buffers"]), FLOATS, max_size=3).map(
    lambda values: Logged(values=values)
)
RARE: st.SearchStrategy[Rare] = st.one_of(
    st.just(Vitals(view="replicated", modules=[], num_trainable=2)),
    st.builds(ScriptWarning, text=st.sampled_from(["a", "b"]), where=st.just("train.py:1")),
    st.builds(feed_note, st.integers(0, 2), st.integers(0, 3), is_end=st.booleans()),
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
        for step in steps:
            if draw(st.integers(0, 9)):
                says.append(
                    numbered(
                        rank, step, draw(FLOATS), draw(st.integers(0, 3)), roots=draw(ROOTS), nonfinite=draw(NONFINITE)
                    )
                )
            says += [seen(rank, step, body) for body in draw(st.lists(LOGGED | RARE, max_size=3))]
        if draw(st.booleans()):
            says.append(retyped(rank, first + 3))
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


@pytest.mark.slow
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
    history = built.window(0).tensors.classes["gradients"]
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
    assert 2 == window.tensors.classes["gradients"].num_equal
    assert "buffers" not in window.tensors.classes
    assert {4: (0, 2)} == window.step(1).roots["gradients"]  # type: ignore[union-attr]


def test_agreement_waits_for_the_missing_and_difference_does_not() -> None:
    built = healthy(3, 1)
    built.add(done(0, 1), 1)
    built.add(done(1, 1), 1)
    view = built.window(0).steps[-1]
    assert ((2,), 2) == (view.missing, view.num_reported)
    assert 1 == built.window(0).tensors.classes["gradients"].num_equal
    built.add(done(0, 2, {"gradients": 1}), 2)
    built.add(done(1, 2, {"gradients": 2}), 2)
    assert 2 == built.window(0).tensors.classes["gradients"].first_unequal_step


def test_a_rank_that_exited_is_not_missing_and_one_that_joins_late_owes_no_past() -> None:
    built = healthy(2, 2)
    built.add(done(0, 2), 2)
    assert (1,) == built.window(0).steps[-1].missing
    built.add(exited(1, 2), 2)
    assert () == built.window(0).steps[-1].missing
    built.add(attached(2, 3, step=3), 3)
    built.add(done(0, 3), 3)
    assert [(), (), (), (2,)] == [view.missing for view in built.window(0).steps]


def test_deaths_are_told_in_the_coordinators_time_whatever_the_hosts_clocks_say() -> None:
    assembly = Assembly()
    second = 10**9
    told = Traffic(base_ns=0, steps=[], clock_offset_ns=30 * second)
    assembly.add(msgspec.structs.replace(seen(0, 3, told), at_ns=70 * second), 100 * second)
    for rank, at_s, received_s in ((0, 72, 102), (1, 101, 103), (2, 500, 104)):
        assembly.add(msgspec.structs.replace(exited(rank, 3, number=9), at_ns=at_s * second), received_s * second)
    exits = [(end.rank, end.at_ns // second) for end in assembly.window(105 * second).processes.exits]
    assert [(1, 101), (0, 102), (2, 104)] == exits, (
        "rank 0's clock is known to be behind; nothing is heard before it was"
    )


def test_who_said_that_it_is_about_to_end_is_known_until_it_begins_again() -> None:
    assembly = Assembly()
    second = 10**9
    assembly.add(attached(0, 0), 0)
    for state, at_s in (("terminated", 20), ("terminated", 21), ("dying", 22)):
        said = msgspec.structs.replace(seen(0, 3, Halting(state=state)), at_ns=at_s * second)
        assembly.add(said, 30 * second)
    window = assembly.window(40 * second)
    assert ({0: 20 * second}, {0: 22 * second}) == (window.processes.signalled, window.processes.failing)
    again = attached(0, 0)
    assembly.add(msgspec.structs.replace(again, body=msgspec.structs.replace(again.body, pid=77)), 50 * second)
    assert ({}, {}) == (
        assembly.window(60 * second).processes.signalled,
        assembly.window(60 * second).processes.failing,
    )


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
    assert () == window.processes.exits


def test_evidence_is_found_again_by_its_key() -> None:
    built = healthy(2, 1)
    table = Table(tensor_class="gradients", root=1, names=["a"], fingerprints=[1], norms=[])
    origin = Origin(module="m", module_class="M", is_input_finite=True, input_absmax=1.0, replayed=True, reason="")
    built.add(seen(1, 0, table), 0)
    built.add(seen(1, 0, origin), 0)
    built.mark_unavailable(("gradients", 0, 0))
    window = built.window(0)
    assert ({("gradients", 0, 1): table}, {(1, 0): origin}) == (window.tensors.tables, window.tensors.origins)
    assert {("gradients", 0, 0)} == window.tensors.unavailable


def test_equal_censuses_are_one_object() -> None:
    built = Assembly()
    for rank in range(3):
        built.add(census(rank, 0, 2), 0)
        assert rank not in built.window(0).models.census
        built.add(census(rank, 1, 2), 0)
    joined = built.window(0).models.census
    assert 1 == len({id(one) for one in joined.values()})
    assert (4, [1, 0], 1) == (len(joined[0].entries), joined[0].backward_order, joined[0].parts)


def test_memory_is_bounded_in_steps_and_the_histories_still_count_all() -> None:
    built = healthy(2, 3000)
    window = built.window(0)
    assert (assembly.MAX_STEPS, 2999) == (len(window.steps), window.steps[-1].step)
    assert 3000 == window.tensors.classes["gradients"].num_equal
    built.add(done(0, 5, {"gradients": 1}), 0)
    assert 3000 == built.window(0).tensors.classes["gradients"].num_equal, "a forgotten step stays forgotten"


def test_memory_is_bounded_for_a_rank_that_never_stops_saying_nonsense() -> None:
    built = Assembly(100_000)
    bad = [Nonfinite(where="gradient", name=str(order), nans=1, infs=0, numel=1, order=order) for order in range(500)]
    for step in range(0, 10**9, 10**7):
        built.add(done(0, step, {str(name): 1 for name in range(100)}, bad), 0)
    steps = built.window(0).steps
    assert assembly.MIN_STEPS == len(steps)
    assert all(len(view.nonfinite) <= 4 and len(view.roots) <= 32 for view in steps)
    for number in range(assembly.MAX_TABLES + 5):
        built.add(seen(0, number, Table(tensor_class="g", root=1, names=[], fingerprints=[], norms=[])), 0)
    window = built.window(0)
    assert (assembly.MAX_TABLES, 5) == (len(window.tensors.tables), len(window.tensors.unavailable))


def test_16_000_ranks_cost_a_few_microseconds_each_and_finished_steps_nothing() -> None:
    built = healthy(16_000, 1)
    records = [done(rank, 1) for rank in range(16_000)]
    began_s = time.process_time()
    for record in records:
        built.add(record, 1)
    added_s = time.process_time() - began_s
    first = built.window(0)
    began_s = time.process_time()
    second = built.window(1)
    looked_s = time.process_time() - began_s
    # Ten times what a 2 GHz core needs; the bound that matters is one second a step.
    assert added_s < 1.0
    assert looked_s < 0.1
    assert first.steps[0] is second.steps[0]


def test_numbers_are_spread_over_the_ranks_of_complete_steps() -> None:
    built = healthy(3, 1)
    for rank, loss in enumerate([1.0, math.nan, 4.0]):
        built.add(numbered(rank, 1, loss, norm=float(rank)), 1)
    built.add(numbered(0, 2, 0.5), 2)
    window = built.window(0)
    assert [0, 1] == [entry.step for entry in window.series]
    loss = window.series[1].numbers["loss"]
    assert (2.5, 1.0, 4.0, 0, 2, 3, 1) == (
        loss.mean,
        loss.low,
        loss.high,
        loss.low_rank,
        loss.high_rank,
        loss.num,
        loss.num_nonfinite,
    )
    assert 1.0 == dict(window.values("norm"))[1].mean
    assert {"gradient_norm", "learning_rate", "micro_steps", "seconds"} <= set(window.series[1].numbers)


def test_a_number_that_no_rank_had_finite_has_no_mean_and_one_that_is_none_is_not_said() -> None:
    built = healthy(2, 0)
    built.add(numbered(0, 0, math.inf), 0)
    built.add(numbered(1, 0, None), 0)
    loss = built.window(0).series[0].numbers["loss"]
    assert math.isnan(loss.mean)
    assert (1, 1, -1, -1) == (loss.num, loss.num_nonfinite, loss.low_rank, loss.high_rank)


def test_of_two_records_of_a_rank_the_numbers_count_once() -> None:
    built = healthy(1, 0)
    built.add(numbered(0, 0, 1.0), 0)
    built.add(numbered(0, 0, 1.0), 0)
    assert 1 == built.window(0).series[0].numbers["loss"].num


def test_what_is_logged_belongs_to_its_step_and_the_last_word_of_a_rank_counts() -> None:
    built = healthy(2, 2)
    built.add(seen(0, 1, Logged(values={"kl": 1.0, "loss": 9.0})), 0)
    built.add(seen(0, 1, Logged(values={"kl": 3.0})), 0)
    built.add(seen(1, 2, Logged(values={"kl": 5.0})), 0)
    window = built.window(0)
    assert [(1, 3.0)] == [(step, spread.mean) for step, spread in window.values("kl")]
    assert [(1, 9.0)] == [(step, spread.mean) for step, spread in window.values("log.loss")]
    for rank in range(2):
        built.add(done(rank, 2), 2)
    assert [(1, 3.0), (2, 5.0)] == [(step, spread.mean) for step, spread in built.window(0).values("kl")]


@pytest.mark.slow
def test_numbers_outlive_their_steps_and_a_late_log_finds_them() -> None:
    built = healthy(2, 5000)
    series = built.window(0).series
    assert (4096, 4999) == (len(series), series[-1].step)
    built.add(seen(0, 2000, Logged(values={"kl": 1.0})), 0)
    built.add(seen(0, 10, Logged(values={"kl": 1.0})), 0)
    assert [2000] == [step for step, _ in built.window(0).values("kl")]


def test_logs_of_steps_that_never_come_cost_no_memory() -> None:
    built = healthy(1, 1)
    for step in range(10_000):
        built.add(seen(0, step, Logged(values={str(number): 0.0 for number in range(100)})), 0)
    assert len(built._numbers._open) <= 2048
    assert 1 == len(built.window(0).series)
    assert len(built.window(0).series[0].numbers) < 100


def test_batches_are_grouped_by_signature_and_none_is_left_out() -> None:
    built = healthy(4, 0)
    for rank, batch in enumerate([7, 9, 7, 0]):
        built.add(numbered(rank, 0, 1.0, batch), 0)
    assert {7: (0, 2), 9: (1,)} == built.window(0).steps[0].batches
    built.add(numbered(0, 0, 1.0, 9), 0)
    assert {7: (2,), 9: (0, 1)} == built.window(0).steps[0].batches


def test_a_census_that_changes_says_what_did() -> None:
    built = Assembly()
    for rank in range(2):
        built.add(census(rank), 0)
        built.add(census(rank), 0)
        built.add(retyped(rank, 5), 0)
    changes = built.window(0).models.changes
    assert [
        ("a.weight", "dtype", "float32", "bfloat16"),
        ("b.weight", "requires_grad", "True", "False"),
        ("c.weight", "new", "", "float32"),
    ] == [(one.name, one.what, one.before, one.after) for one in changes if one.rank == 1]
    built.add(census(0), 6)
    assert changes == built.window(0).models.changes, "a sidecar that connects anew tells what was before as well"
    built.add(msgspec.structs.replace(census(0), step=6), 6)
    assert ("c.weight", "gone") in [(one.name, one.what) for one in built.window(0).models.changes]
    assert all(one.step in {0, 5} for one in changes)


def test_notes_are_bounded_and_a_loader_keeps_its_first_and_latest_passes() -> None:
    built = Assembly()
    for epoch in range(5):
        built.add(seen(0, epoch * 4, feed_note(0, epoch, is_training=True)), 0)
        built.add(seen(0, epoch * 4 + 3, feed_note(0, epoch, is_end=True, is_training=True)), 0)
    for loader in range(1, 40):
        built.add(seen(0, 19, feed_note(loader, 0)), 0)
    window = built.window(0)
    kept = [(feed.epoch, feed.is_end) for _, feed in window.notes_of(Feed) if feed.loader == 0]
    assert [(0, False), (0, True), (3, True), (4, False), (4, True)] == kept
    assert len(window.notes) < 40
    for step in range(5000):
        built.add(seen(0, step, Vitals(view="local", modules=[], num_trainable=1)), 0)
        built.add(seen(0, step, ScriptWarning(text="w", where="x.py:1")), 0)
        built.add(seen(0, step, Inspection(reason="first", autocast_dtype="", witnesses=[], num_modules=1)), 0)
        built.add(seen(0, step, Skipped(in_a_row=1, scale=1, lowest_scale=1, first_scale=1, loss=0.0)), 0)
    window = built.window(0)
    steps = [note.step for note, _ in window.notes_of(Vitals)]
    assert (2048, 4999) == (len(steps), steps[-1])
    assert len(window.notes) < 4000
    assert window.notes is built.window(1).notes


def test_a_rank_that_begins_again_takes_its_words_back() -> None:
    built = healthy(1, 6)
    built.add(census(0), 0)
    built.add(seen(0, 5, Vitals(view="local", modules=[], num_trainable=1)), 0)
    built.add(seen(0, 0, feed_note(0, 0)), 0)
    built.add(attached(0, 1, pid=9, step=4), 0)
    built.add(retyped(0, 4), 0)
    window = built.window(0)
    assert ([0, 1, 2, 3], (), ()) == ([entry.step for entry in window.series], window.notes, window.models.changes)


@pytest.mark.slow
@pytest.mark.release
def test_a_window_of_16_000_ranks_with_numbers_batches_and_feeds_is_built_in_time() -> None:
    built = Assembly(16_000)
    for rank in range(16_000):
        built.add(attached(rank, 16_000), 0)
        built.add(seen(rank, 0, feed_note(0, 0)), 0)
    bodies = [numbered(rank, 0, 1.0 + rank, rank + 1, clip=0.5).body for rank in range(16_000)]
    slowest_s = added_s = 0.0
    for step in range(20):
        records = [Observation(rank=rank, step=step, at_ns=0, body=body) for rank, body in enumerate(bodies)]
        records += [seen(rank, step, Logged(values={"kl": 0.1})) for rank in range(0, 16_000, 8)]
        began_s = time.process_time()
        for record in records:
            built.add(record, step)
        added_s = max(added_s, time.process_time() - began_s)
        began_s = time.process_time()
        window = built.window(step)
        slowest_s = max(slowest_s, time.process_time() - began_s)
    assert 20 == len(window.series)
    assert 16_000 == window.series[-1].numbers["loss"].num
    # What a 2 GHz core needs: 0.2 s to take a step in, 0.04 s to look at it.
    assert added_s < 2.0
    assert slowest_s < 1.0


S = 10**9


def overdue(tier: str = "suspect", waited_s: float = 3.0, step: int = 20) -> Observation:
    body = Overdue(
        tier=tier, phase=Phase.FORWARD, micro_step=0, waited_s=waited_s, deadline_s=3.0, because="it was never so long"
    )
    return Observation(rank=1, step=step, at_ns=0, body=body)


def link(state: str) -> Observation:
    return Observation(rank=1, step=-1, at_ns=0, body=Link(state=state))


def test_a_standstill_that_is_told_again_is_the_same_one() -> None:
    book = ProgressBook()
    book.add(overdue(waited_s=3.0), 100 * S)
    book.add(overdue(waited_s=12.2), 109 * S)
    assert 100 * S == book.delays[1].at_ns, "the line was lost and found again in between"
    book.add(overdue("overdue", waited_s=13.0), 110 * S)
    assert ("overdue", 110 * S) == (book.delays[1].overdue.tier, book.delays[1].at_ns)
    book.add(overdue("overdue", waited_s=4.0), 120 * S)
    assert 120 * S == book.delays[1].at_ns, "it moved in between: another standstill"


def test_whose_sidecar_hung_up_is_not_taken_to_stand_still_for_ever() -> None:
    book = ProgressBook()
    book.add(overdue(), 100 * S)
    book.add(link("silent"), 106 * S)
    assert 1 in book.delays
    book.add(link("closed"), 107 * S)
    assert {} == book.delays, "nobody would say that it moves on"


@pytest.mark.parametrize("odd", [math.nan, math.inf, -1.0, 1e12])
def test_times_that_cannot_be_are_not_believed(odd: float) -> None:
    process = ProcessState(state="sleeping", cpu_s=1.0, cpu_share=math.nan, stopped_s=odd)
    bodies: list[Body] = [overdue(waited_s=odd).body, Exam(reason="asked", waited_s=odd)]
    bodies.append(Exam(reason="asked", process=process))
    assert [False] * 3 == [is_sound(body) for body in bodies]
    assert is_sound(overdue().body)
    assert is_sound(Exam(reason="asked", waited_s=3.0))


def test_the_last_look_with_native_frames_outlives_quick_ones() -> None:
    book = ProgressBook()
    for number, depth in enumerate(["native", "native", "quick", "quick", "quick", "quick"], 1):
        exam = Exam(reason="asked", asked_ns=number, depth=depth)
        book.add(Observation(rank=1, step=20, at_ns=0, body=exam), number)
    assert [2, 4, 5, 6] == [seen.exam.asked_ns for seen in book.exams[1]]


def test_what_is_a_rank_s_own_takes_no_place_from_what_is_compared() -> None:
    book = Assembly(2)
    for rank in (0, 1):
        book.add(attached(rank), 0)
        own = {f"state_before@own.{number}": rank for number in range(40)}
        book.add(done(rank, 0, own | {"gradients@tp#0": rank}), 0)
    assert book.window(10**12).tensors.classes["gradients@tp"].first_unequal_step == 0


def test_notes_that_are_said_again_after_a_broken_connection_are_no_second_ones() -> None:
    said = [
        seen(0, step, StageTimes(stage=0, num_steps=8, forward_s=[math.nan], backward_s=[0.1])) for step in (7, 15, 23)
    ]
    window = feed((one, place) for place, one in enumerate([*said, *said[1:]]))
    assert [7, 15, 23] == [note.step for note, _ in window.notes_of(StageTimes)]
    other = msgspec.structs.replace(said[-1], at_ns=said[-1].at_ns + 1)
    assert 4 == len(list(feed((one, place) for place, one in enumerate([*said, other])).notes_of(StageTimes)))
