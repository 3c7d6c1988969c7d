"""The score on made-up diagnoses, the intervals, and what is kept on disk and written into the page."""

import pytest
from tests.campaign import __main__ as campaign
from tests.campaign.grammar import Expected, draw
from tests.campaign.runner import void
from tests.campaign.score import Result, judge, misses, ratio, table, wilson


def expected(**more):
    known = {"causes": {"uneven_clipping": "what was injected"}, "begin": 20, "late_by": 10, "within": 50, "ranks": ((1,),), "tensors": ("a.weight",), "modules": None, "severity": "warning", "has_step": True}  # fmt: skip
    return Expected(**(known | more))


def diagnosis(cause="uneven_clipping", **more):
    top = {"cause": cause, "ranks": more.pop("ranks", [1]), "tensors": more.pop("tensors", ["a.weight"]), "modules": more.pop("modules", [])}  # fmt: skip
    known = {"severity": "critical", "first_step": 21, "detected_step": 25, "opened_at": "2026-01-01T00:00:05Z", "causes": [top]}  # fmt: skip
    return known | more


def result(**more):
    return Result(
        **({"seed": "1-0", "title": "t", "family": "replicas", "cause": "uneven_clipping", "status": "ran"} | more)
    )


def test_all_right():
    scored = judge(result(), expected(), [diagnosis()])
    assert [] == scored.mistakes
    assert (True, True, True, True, True, 5) == (scored.is_found, scored.is_cause_first, scored.is_rank_right, scored.is_place_right, scored.is_step_right, scored.steps_to_detection)  # fmt: skip


@pytest.mark.parametrize(
    ("said", "mistakes"),
    [
        ([], ["not found"]),
        ([diagnosis(severity="info")], ["not found"]),
        ([diagnosis(detected_step=71)], ["not found"]),
        ([diagnosis(detected_step=10, first_step=10)], ["not found"]),
        ([diagnosis("lost_update")], ["cause"]),
        ([diagnosis(ranks=[0, 1])], ["rank"]),
        ([diagnosis(tensors=["b.weight"])], ["place"]),
        ([diagnosis(tensors=["a.weight", "b.weight"])], ["place"]),
        ([diagnosis(tensors=[])], ["place"]),
        ([diagnosis(first_step=31)], ["step"]),
        ([diagnosis(first_step=18)], ["step"]),
        ([diagnosis("lost_update"), diagnosis(opened_at="2026-01-01T00:00:09Z")], ["cause"]),
        ([diagnosis("lost_update"), diagnosis()], []),
    ],
)
def test_what_is_wrong_is_named(said, mistakes):
    assert mistakes == judge(result(), expected(), said).mistakes


def test_a_cause_that_is_as_right_counts():
    also = expected(causes={"uneven_clipping": "what was injected", "lost_update": "as right"})
    assert [] == judge(result(), also, [diagnosis("lost_update")]).mistakes


def test_what_is_said_of_the_twin_too_finds_nothing():
    false = diagnosis("loss_divergence", opened_at="2026-01-01T00:00:01Z")
    alone = judge(result(), expected(), [false], [false])
    assert ["not found", "twin"] == alone.mistakes
    both = judge(result(), expected(), [false, diagnosis()], [false])
    assert (True, True, 0) == (both.is_found, both.is_cause_first, both.others)


def test_any_of_the_allowed_ranks_will_do_and_none_where_nobody_is_to_blame():
    assert judge(result(), expected(ranks=((1,), (0, 1))), [diagnosis(ranks=[1, 0])]).is_rank_right
    assert judge(result(), expected(ranks=None), [diagnosis(ranks=[0])]).is_rank_right is None


def test_half_of_many_tensors_will_do_if_no_other_is_named():
    many = tuple(f"layer.{number}.weight" for number in range(20))
    assert judge(result(), expected(tensors=many), [diagnosis(tensors=many[:10])]).is_place_right
    assert not judge(result(), expected(tensors=many), [diagnosis(tensors=many[:9])]).is_place_right
    assert not judge(result(), expected(tensors=many), [diagnosis(tensors=[*many[:10], "x"])]).is_place_right


def test_a_module_will_do_where_modules_are_expected():
    where = expected(tensors=("block.up.weight",), modules=("block",))
    assert judge(result(), where, [diagnosis(tensors=[], modules=["block.up"])]).is_place_right
    assert not judge(result(), where, [diagnosis(tensors=[], modules=["blocked"])]).is_place_right


def test_a_wrappers_prefix_does_not_matter():
    assert judge(result(), expected(), [diagnosis(tensors=["module.a.weight"])]).is_place_right


def test_a_hang_is_found_whatever_the_step():
    scored = judge(result(), expected(within=None), [diagnosis(detected_step=None)])
    assert (True, None) == (scored.is_found, scored.steps_to_detection)


@pytest.mark.parametrize(
    ("right", "number", "low", "high"),
    [(9, 10, 0.596, 0.982), (0, 10, 0.0, 0.278), (60, 60, 0.940, 1.0), (0, 0, 0.0, 1.0)],
)
def test_wilsons_interval(right, number, low, high):
    assert (low, high) == pytest.approx(wilson(right, number), abs=1e-3)


def test_what_has_no_rank_does_not_count():
    assert "1 of 2 (9 to 91 %)" == ratio([True, False, None])
    assert "none" == ratio([None])


def test_a_twin_that_was_not_run_is_no_silent_one():
    assert "0 in 0 twins" in table([judge(result(), expected(), [diagnosis()])])
    assert "0 in 1 twins" in table([judge(result(has_twin=True), expected(), [diagnosis()])])


def test_a_silent_healthy_run_has_no_mistakes():
    assert [] == misses([result(seed="1-h0", family="healthy", cause="")])


def test_voids_are_counted_apart_and_misses_are_listed():
    results = [
        judge(result(), expected(), [diagnosis()]),
        judge(result(seed="1-1"), expected(), []),
        result(seed="1-2", status="void", why="effect is MISSING"),
        result(seed="1-h0", family="healthy", cause="", said=["loss_divergence"]),
    ]
    text = table(results)
    assert "| all | 2 | 1 of 2" in text
    assert "1 in 1 healthy runs" in text
    assert ["1-1", "1-2", "1-h0"] == [line.partition(":")[0] for line in misses(results)]


class Ended:
    """A job that has ended."""

    def __init__(self, stdout, code=0):
        self.stdout, self.code, self.stderr = stdout, code, "Traceback\nKeyError: 1"


def test_a_fault_without_effect_is_void_and_so_is_a_script_that_fails_by_itself():
    case = next(case for number in range(99) if (case := draw(f"1-{number}")).kind.ends == "normally")
    assert "" == void(case, Ended("effect is there: x\nthe end\n"))
    assert "MISSING" in void(case, Ended("effect is MISSING: x\nthe end\n"))
    assert "KeyError" in void(case, Ended("effect is there: x\n", code=1))
    assert "not checked" in void(case, Ended("the end\n"))


def test_a_hang_that_does_not_hang_is_void():
    case = next(case for number in range(99) if (case := draw(f"1-{number}")).kind.ends == "hangs")
    assert "" == void(case, Ended("effect is there: now\n", code=-15))
    assert "otherwise" in void(case, Ended("effect is there: now\nthe end\n"))


def test_a_result_on_disk_belongs_to_its_script(tmp_path):
    case = draw("1-0")
    campaign.keep(tmp_path, case, result())
    assert result() == campaign.on_disk(tmp_path, case)
    (tmp_path / "1-0.json").rename(tmp_path / "1-1.json")
    assert campaign.on_disk(tmp_path, draw("1-1")) is None


def test_the_first_score_of_a_seed_is_never_written_twice(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- seeds: begin -->\n<!-- seeds: end -->\n<!-- families: begin -->\n<!-- families: end -->\n")
    campaign.write(page, "5", [judge(result(), expected(), [])])
    campaign.write(page, "5", [judge(result(), expected(), [diagnosis()])])
    text = page.read_text()
    assert 1 == text.count("\n| 5 | 1 |")
    assert "| 5 | 1 | 0 of 1" in text
    assert "| all | 1 | 1 of 1" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [(["show", "x"], "7-3"), (["show", "1-h0", "--twin"], "no twin"), (["list", "--number", "-1"], "negative")],
)
def test_wrong_use_is_told_in_one_sentence(capsys, words, said):
    assert 2 == campaign.main(words)
    told = capsys.readouterr().err
    assert said in told
    assert 1 == told.count("\n")


def test_show_and_list(capsys):
    assert 0 == campaign.main(["show", "7"])
    assert capsys.readouterr().out.startswith('"""Case 7-0: ')
    assert 0 == campaign.main(["list", "--seed", "7", "--number", "2", "--healthy", "1"])
    assert ["7-0", "7-1", "7-h0"] == [line.split()[0] for line in capsys.readouterr().out.splitlines()]
