"""Many ranks' stacks as one tree that a person reads at night, whatever the number of ranks."""

from collections.abc import Sequence

from holter.faults.hangs.stacks import MAX_LINES, evidence, main_stack, merged, ranges
from holter.records import Exam, Frame, ThreadStack

SITE = "/opt/venv/lib/python3.11/site-packages/"
MODULE = Frame("<module>", "/home/me/train.py", 88)
WAITING = [
    Frame("0x7f5f130a3f16", "/usr/lib/x86_64-linux-gnu/libc.so.6", 0, is_native=True),
    Frame("pthread_cond_wait", "/usr/lib/x86_64-linux-gnu/libc.so.6", 0, is_native=True),
    Frame("c10d::Work::wait(std::chrono::duration<long>)", SITE + "torch/lib/libtorch_cpu.so", 0, is_native=True),
    Frame("all_reduce", SITE + "torch/distributed/distributed_c10d.py", 2900),
    Frame("wrapper", SITE + "torch/distributed/c10d_logger.py", 81),
    Frame("main", "/home/me/train.py", 61),
    Frame("run", SITE + "holter/rank/hooks/step.py", 5),
    MODULE,
]
SPINNING = [Frame("spin", "/home/me/train.py", 31), Frame("main", "/home/me/train.py", 64), MODULE]


def exam(frames: Sequence[Frame]) -> Exam:
    helper = ThreadStack("helper", False, True, True, [Frame("poll", "/home/me/other.py", 1)])
    return Exam(reason="asked", stacks=[helper, ThreadStack("MainThread", True, False, False, list(frames))])


def test_common_frames_are_said_once_and_who_is_elsewhere_is_seen() -> None:
    assert merged({0: WAITING, 1: SPINNING, 2: WAITING, 3: WAITING}) == [
        "all 4 ranks",
        "  <module> (/home/me/train.py:88)",
        "├─ ranks 0,2,3",
        "│    main (/home/me/train.py:61)",
        "│    all_reduce (torch/distributed/distributed_c10d.py:2900)",
        "│    c10d::Work::wait [native] (libtorch_cpu.so)",
        "│    pthread_cond_wait [native] (libc.so.6)",
        "└─ rank 1",
        "     main (/home/me/train.py:64)",
        "     spin (/home/me/train.py:31)",
    ]


def test_addresses_without_a_name_do_not_part_ranks() -> None:
    other = [Frame("0x7fb1ce84524a", WAITING[0].file, 0, is_native=True), *WAITING[1:]]
    assert not [line for line in merged({0: WAITING, 1: other}) if "─" in line]


def test_a_rank_that_stands_in_a_frame_others_went_through_is_a_branch() -> None:
    lines = merged({0: SPINNING, 1: SPINNING[1:]})
    assert lines[-2:] == ["└─ rank 1", "     here, in the frame above"]


def test_ranks_without_a_stack_are_said() -> None:
    assert "ranks 1,2: no stack" == merged({0: SPINNING, 1: [], 2: []})[-1]
    assert [] == merged({})


def test_ranks_are_ranges() -> None:
    assert ["", "3", "0,1", "0-2", "0,2,3,7-9"] == [
        ranges(ranks) for ranks in ([], [3], [0, 1], [2, 0, 1], [0, 2, 3, 7, 8, 9])
    ]
    assert ranges(range(0, 1000, 2)).endswith(",14,... (500 ranks)")


def test_sixteen_thousand_ranks_make_a_few_lines() -> None:
    stacks = dict.fromkeys(range(16_000), WAITING) | {4711: SPINNING}
    lines = merged(stacks)
    assert len(lines) < 12
    assert "├─ ranks 0-4710,4712-15999" in lines
    assert "└─ rank 4711" in lines


def test_as_many_places_as_ranks_stay_bounded() -> None:
    stacks = {rank: [Frame("spin", "/home/me/train.py", rank), MODULE] for rank in range(16_000)} | {5: WAITING}
    lines = merged(stacks)
    assert len(lines) < 30
    assert "├─ 15992 ranks in 15992 other places" in lines
    assert max(map(len, lines)) < 140


def test_deep_stacks_and_wide_trees_stay_bounded() -> None:
    deep = [Frame("recurse", "/home/me/train.py", line) for line in range(5000)]
    assert len(merged({0: deep, 1: deep})) < 30

    def path(rank: int) -> list[Frame]:
        return [Frame(f"f{rank >> bit & 7}", "/home/me/train.py", bit) for bit in range(12, -1, -3)]

    assert len(merged({rank: path(rank) for rank in range(2**14)})) <= MAX_LINES + 1


def test_long_names_are_cut() -> None:
    name = "std::map<" + "std::vector<int>, " * 50 + ">::operator[]"
    frames = [Frame(name, "libx.so", 0, is_native=True), Frame("f", "/very" * 40 + "/deep/train.py", 3)]
    lines = merged({0: frames})
    assert "  std::map::operator[] [native] (libx.so)" in lines
    assert "  f (.../very/deep/train.py:3)" in lines


def test_the_evidence_says_what_the_script_called_and_where() -> None:
    found = evidence({0: exam(WAITING), 1: exam(SPINNING), 2: exam(WAITING), 3: exam(WAITING)})
    assert found is not None
    assert ("stacks", "ranks 0,2,3 in all_reduce (/home/me/train.py:61); rank 1 in spin (/home/me/train.py:31)") == (
        found.kind,
        found.summary,
    )
    assert found.values["tree"][0] == "all 4 ranks"
    assert found.values["ranks"]["1"] == {
        "function": "spin",
        "file": "/home/me/train.py",
        "line": 31,
        "activity": "script",
    }
    assert "collective" == found.values["ranks"]["0,2,3"]["activity"]


def test_each_place_has_a_column_of_its_own() -> None:
    found = evidence({0: exam(WAITING), 1: exam(SPINNING), 2: exam(WAITING)})
    assert found is not None
    waiting, spinning = found.values["columns"]
    assert ("ranks 0,2", "rank 1") == (waiting["ranks"], spinning["ranks"])
    assert ["<module> (/home/me/train.py:88)", "main (/home/me/train.py:64)", "spin (/home/me/train.py:31)"] == (
        spinning["frames"]
    )
    assert "pthread_cond_wait [native] (libc.so.6)" == waiting["frames"][-1]


def test_a_column_is_bounded() -> None:
    deep = [Frame(f"f{number}", "/home/me/train.py", number) for number in range(500)]
    found = evidence({0: exam(deep)})
    assert found is not None
    assert len(found.values["columns"][0]["frames"]) < 30


def test_the_evidence_of_very_many_places_is_bounded_and_keeps_the_odd_one() -> None:
    exams = {rank: exam([Frame("spin", "/home/me/train.py", rank // 2), MODULE]) for rank in range(1000)}
    found = evidence(exams | {999: exam(WAITING)})
    assert found is not None
    assert "rank 999 in all_reduce" in found.summary
    assert "and 497 more places" in found.summary
    assert len(found.values["ranks"]) <= 16


def test_no_stack_is_no_evidence() -> None:
    assert evidence({}) is None
    assert evidence({0: Exam(reason="asked", stack_error="py-spy is not there")}) is None
    assert main_stack(Exam(reason="asked")) is None
