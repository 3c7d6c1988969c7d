"""What is drawn is what was there: extremes stay, NaN breaks a line, names are escaped, and no plot counts as proof."""

import json
import math
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

from holter.diagnosis import explain, to_html, to_markdown, to_text
from holter.diagnosis.plots import KIND, MAX_POINTS, Point, decades, figure, plots, sparkline, thinned, ticks, words
from holter.faults.window import Arrival, Note, Spread, StepArrivals, StepNumbers, Window
from holter.records import Diagnosis, Directive, Evidence, Finding, ModuleVitals, Vitals
from made_up import made_window

FINDING = Finding(
    detector="nonfinite_values",
    severity="critical",
    first_step=40,
    detected_step=41,
    ranks=(1,),
    modules=("layers.3",),
    summary="NaN at step 40.",
    facts={"has_nonfinite_input": True, "has_nonfinite_loss": True, "series": ["log.kl", "nobody"]},
    evidence=(Evidence(kind="nonfinite", summary="the batch held 3 NaN"),),
)


def spread(*values: float) -> Spread:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Spread(math.nan, math.nan, math.nan, -1, -1, len(values), len(values))
    low, high = min(finite), max(finite)
    return Spread(
        sum(finite) / len(finite),
        low,
        high,
        values.index(low),
        values.index(high),
        len(values),
        len(values) - len(finite),
    )


def vitals(module: str, norm: float, exponents: list[int] | None = None) -> ModuleVitals:
    return ModuleVitals(module, "torch.float16", 8, 2.0, norm, 0.0, 0.0, 1.0, 1e-3, 1.0, 1e-3, exponents or [])


def window(num_steps: int = 50) -> Window:
    series = [
        StepNumbers(
            step,
            step,
            {
                "loss": spread(2.0 - step / 100, math.nan if step >= 40 else 2.1 - step / 100),
                "gradient_norm": spread(10.0 ** (step / 10), 10.0 ** (step / 10)),
                "learning_rate": spread(1e-3, 1e-3),
                "sum.parameters_after": spread(1.0, 1.0 + max(0, step - 40) * 1e-4),
                "norm.parameters_after": spread(2.0, 2.0),
                "log.kl": spread(step * 0.01),
            },
        )
        for step in range(num_steps)
    ]
    exponents = [0] * 12 + [5, 50, 5] + [0] * 17
    notes = [
        Note(0, step, 0, Vitals(view="replicated", modules=modules, num_trainable=2))
        for step in range(0, num_steps, 10)
        for modules in [[vitals(f"layers.{number}", 1.0 + number * step, exponents) for number in range(12)]]
    ]
    return made_window(series=tuple(series), notes=tuple(notes))


def by_title(found: tuple[Evidence, ...]) -> dict[str, Evidence]:
    return {plot.values["title"]: plot for plot in found}


def test_the_plots_that_people_ask_for_are_there_and_the_named_series_comes_first() -> None:
    found = plots(window(), FINDING)
    titles = [plot.values["title"] for plot in found]
    assert "kl" == titles[0]
    assert {
        "loss",
        "gradient norm",
        "distance between ranks, relative",
        "gradient norm by module",
        "exponents of the gradients at step 40, float16",
    } <= set(titles)
    assert "learning rate" not in titles, "a constant one shows nothing"
    assert all(plot.kind == KIND for plot in found)
    assert all(plot.values.get("mark", 40) == 40 for plot in found)


def test_nan_on_one_rank_breaks_the_mean_and_not_the_other_rank() -> None:
    mean, low, high = by_title(plots(window(), FINDING))["loss"].values["lines"]
    assert ("mean of 2 ranks", "lowest rank", "highest rank") == (mean["name"], low["name"], high["name"])
    assert (None, 1.6) == (mean["values"][40], low["values"][40])
    assert "not finite at step 40" in by_title(plots(window(), FINDING))["loss"].summary


def test_the_scale_follows_the_values_and_the_distance_is_relative() -> None:
    found = by_title(plots(window(), FINDING))
    assert found["gradient norm"].values["log"]
    assert not found["loss"].values["log"]
    (distance,) = found["distance between ranks, relative"].values["lines"]
    assert ("parameters after", 0.0, pytest.approx(9e-4 / 2)) == (
        distance["name"],
        distance["values"][40],
        distance["values"][49],
    )


def test_the_modules_of_the_finding_come_first_then_those_that_moved_most() -> None:
    lines = by_title(plots(window(), FINDING))["gradient norm by module"].values["lines"]
    assert ["layers.3", "layers.11", "layers.10"] == [line["name"] for line in lines[:3]]
    assert 8 == len(lines)


def test_exponents_are_bars_of_the_named_module_with_the_ends_of_the_dtype() -> None:
    values = by_title(plots(window(), FINDING))["exponents of the gradients at step 40, float16"].values
    assert [0, 5, 50, 5, 0] == [bar["value"] for bar in values["bars"]]
    assert ["2^-39", "2^-31", "2^-23"] == [bar["label"] for bar in values["bars"][:3]]
    # 2^-24 is seven eighths into the bucket of 2^-31, the second drawn.
    assert 1.875 == values["edges"][0]["at"]


def test_a_run_without_numbers_has_no_plots() -> None:
    assert () == plots(made_window(now_ns=0, world_size=2, attached=frozenset()), FINDING)
    assert () == plots(window(1), msgspec.structs.replace(FINDING, first_step=0, detected_step=-1))


def test_thinning_keeps_the_ends_the_extremes_the_gaps_and_the_marked_step() -> None:
    points: list[Point] = [(step, math.sin(step)) for step in range(4096)]
    points[777], points[1500], points[1501] = (777, 99.0), (1500, None), (1501, None)
    thin = thinned(points, 2000)
    steps = [step for step, _ in thin]
    assert len(thin) <= MAX_POINTS
    assert {0, 777, 1500, 2000, 4095} <= set(steps)
    assert sorted(steps) == steps
    assert len(thinned([(step, None) for step in range(4096)], 5)) <= MAX_POINTS


def test_words_tell_the_beginning_the_step_before_the_step_and_the_end() -> None:
    line: list[Point] = [(step, 1.0 + step if step < 40 else None) for step in range(60)]
    assert "loss: 1 at step 0, 40 at step 39, not finite at step 40, not finite at step 59" == words("loss", line, 40)


def diagnosed(found: tuple[Evidence, ...]) -> Diagnosis:
    return explain(
        FINDING,
        (),
        incident_id="20261115T101500-1",
        run_id="run-7",
        opened_at="2026-11-15T10:15:00Z",
        detected_after_s=0.84,
        directive=Directive(directive="notify", reason="so"),
        plots=found,
    )


class Figures(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not [name for name, _ in attrs if name in {"src", "href"} or name.startswith("on")]
        self.tags.append(tag)


def test_html_draws_every_plot_and_says_it_in_words_too() -> None:
    found = plots(window(), FINDING)
    page = to_html(diagnosed(found))
    parser = Figures()
    parser.feed(page)
    assert len(found) == parser.tags.count("svg") == parser.tags.count("desc") == parser.tags.count("figcaption")
    assert page.index("Why we think so") < page.index("What it looked like") < page.index("How it comes about")
    assert "step 40" in page
    assert "nan" not in page.split("<svg", 1)[1].replace("NaN or Inf", "").split("How it comes about")[0]
    assert "url(" not in page


def test_a_plot_is_no_proof() -> None:
    text = to_text(diagnosed(plots(window(), FINDING)))
    proofs = text[text.index("Why we think so") : text.index("What it looked like")]
    assert "held 3 NaN" in proofs
    assert "loss" not in proofs
    assert max(map(len, text.splitlines())) <= 100
    assert "!" in text, "NaN is seen in the small line too"
    assert "loss, mean of 2 ranks: 2.05 at step 0" in to_markdown(diagnosed(plots(window(), FINDING)))


def test_the_json_has_no_nan() -> None:
    content = msgspec.json.encode(diagnosed(plots(window(), FINDING)))
    record = json.loads(content, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert KIND == record["causes"][0]["evidence"][-1]["kind"]


def series(values: dict[str, Any]) -> Evidence:
    return Evidence(kind=KIND, summary="<b>x</b>", values=values)


def test_names_of_the_script_are_escaped() -> None:
    lines = [{"name": "<script>", "steps": [0, 1], "values": [1.0, 2.0]}] * 2
    drawn = figure(series({"title": "<script>", "log": False, "mark": 1, "lines": lines}), 0)
    bars = figure(series({"title": "x", "bars": [{"label": "<script>", "value": 1}], "edges": []}), 0)
    assert "<script" not in drawn + bars
    assert "<b>" not in drawn


@pytest.mark.parametrize(
    "values",
    [
        {"title": "flat", "log": False, "mark": 3, "lines": [{"name": "a", "steps": [0, 1], "values": [1.0, 1.0]}]},
        {"title": "void", "log": True, "mark": 3, "lines": [{"name": "a", "steps": [0, 1], "values": [None, None]}]},
        {"title": "zeros", "log": True, "mark": 0, "lines": [{"name": "a", "steps": [0, 1], "values": [0.0, 0.0]}]},
        {"title": "one", "log": False, "mark": 0, "lines": [{"name": "a", "steps": [0], "values": [-1e300]}]},
        {"title": "wide", "log": True, "mark": 9, "lines": [{"name": "a", "steps": [0, 9], "values": [1e-300, 1e300]}]},
        {"title": "empty bars", "bars": [{"label": "a", "value": 0}]},
        {"title": "of another version", "points": 3},
        {"title": "broken", "lines": [{"name": "a", "steps": [0], "values": []}], "mark": 1},
    ],
)
def test_odd_values_draw_without_failing(values: dict[str, Any]) -> None:
    drawn = figure(series(values), 0)
    assert "nan" not in drawn
    assert "inf" not in drawn
    assert sparkline(series(values)) is not None


def test_ticks_are_round_numbers_within_the_range() -> None:
    assert [0.0, 0.5, 1.0, 1.5, 2.0] == ticks(0.0, 2.2)
    assert [1.2, 1.4, 1.6, 1.8, 2.0] == ticks(1.17, 2.03)
    assert [5.0] == ticks(5.0, 5.0)
    assert [0.01, 1.0, 100.0] == decades(0.005, 2000.0, 3)


def test_the_lag_of_a_late_rank_is_drawn_beside_what_the_others_are_used_to() -> None:
    arrivals = tuple(
        StepArrivals(step, 0, 4, 1, (Arrival(1 if step >= 20 else 0, 0.05, "0", step, 0.0, 0.0),), 0.001, 0.0, 0.002)
        for step in range(40)
    )
    finding = msgspec.structs.replace(FINDING, detector="slow_rank", first_step=20, facts={"late_ranks": [1]})
    known = msgspec.structs.replace(finding, facts={})
    seen = made_window(now_ns=0, world_size=4, attached=frozenset(range(4)), arrivals=arrivals)
    (plot,) = plots(seen, finding)
    late, usual = plot.values["lines"]
    assert ("rank 1", [0.0] * 20 + [50.0] * 20) == (late["name"], late["values"])
    assert {2.0} == set(usual["values"])
    assert plots(seen, known) == ()


def test_a_line_of_block_letters_shows_where_it_began():
    line = {"name": "loss", "steps": list(range(8)), "values": [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]}
    drawn = Evidence(kind=KIND, summary="", values={"title": "loss", "mark": 4, "lines": [line]})
    assert "▁▁▁▁|████" == sparkline(drawn)
    assert "▁▁|██" == sparkline(drawn, 4)
    assert "▁▁▁▁████" == sparkline(Evidence(kind=KIND, summary="", values={**drawn.values, "mark": 0}))
