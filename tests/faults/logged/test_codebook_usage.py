"""Fires when few codes are used; quiet on language models, early training and healthy codebooks."""

from collections.abc import Callable

import pytest

from holter.diagnosis import rank_causes
from holter.faults.logged.codebook_usage import CodebookUsage
from holter.faults.window import Spread, StepNumbers
from holter.records import Census, Component, Finding, TensorEntry
from made_up import made_window

BOOK = TensorEntry("quantizer.codebook.weight", (512, 16), "float32", True, False, 0, module_class="Embedding")
PROJECTION = TensorEntry("vq.project_in.weight", (64, 16), "float32", True, False, 0, module_class="Linear")
TEXT = TensorEntry("embed.weight", (50000, 16), "float32", True, False, 0, module_class="Embedding")


def judge(names: dict[str, Callable[[int], float]], *entries: TensorEntry, logs: int = 20) -> list[Finding]:
    census = Census(
        model=0,
        wrapper="",
        is_replicated=False,
        optimizers=["Adam"],
        components=[Component("", "Model", "", True)],
        backward_order=[],
        part=0,
        parts=1,
        entries=list(entries),
    )
    series = tuple(
        StepNumbers(step, 0, {name: Spread(make(step), 0, 0, 0, 0, 1) for name, make in names.items()})
        for step in range(logs)
    )
    window = made_window(series=series, census=dict.fromkeys((0, 1), census))
    return list(CodebookUsage().judge(window))


def test_one_code_of_512_is_a_collapse() -> None:
    names = {"log.codebook_perplexity": lambda _: 1.0, "log.codebook_size": lambda _: 512.0}
    assert judge(names, logs=7) == []
    (finding,) = judge(names, logs=8)
    assert (finding.severity, finding.first_step) == ("warning", 0)
    (cause,) = rank_causes(finding)
    assert (cause.cause, cause.confidence) == ("codebook_collapse", 0.95)
    assert finding.facts["series"] == ["log.codebook_perplexity"]
    assert any("1 of 512 codes, low at 8 logs in a row" in e.summary for e in finding.evidence)


def test_the_models_codebook_gives_its_size_and_name() -> None:
    (finding,) = judge({"log.train/perplexity": lambda step: 300.0 if step < 5 else 4.0}, BOOK, TEXT)
    assert finding.first_step == 5
    assert finding.tensors == ("quantizer.codebook.weight",)
    assert finding.modules == ("quantizer.codebook",)
    assert "of 512 codes" in finding.summary


@pytest.mark.parametrize("name", ["codebook_usage", "log.train/vq_utilization", "log.quantizer_usage"])
def test_a_small_share_of_used_codes_is_a_collapse(name: str) -> None:
    (finding,) = judge({name: lambda _: 0.002})
    assert rank_causes(finding)[0].confidence == 0.88


def test_a_count_of_used_codes_needs_the_size() -> None:
    names = {"log.codebook_usage": lambda step: 400.0 if step < 3 else 3.0}
    assert judge(names) == []
    assert len(judge(names, BOOK)) == 1


@pytest.mark.parametrize(
    ("names", "entries"),
    [
        ({"log.perplexity": lambda _: 1.5}, (TEXT,)),
        ({"log.perplexity": lambda _: 1.5}, (PROJECTION,)),
        ({"log.code_perplexity": lambda _: 1.9, "log.codebook_perplexity": lambda _: 1.9}, (TEXT,)),
        ({"log.codebook_usage": lambda _: 0.06, "log.codebook_perplexity": lambda _: 31.0}, (BOOK,)),
        ({"log.codebook_perplexity": lambda step: 200.0 + step}, (BOOK,)),
        ({"log.codebook_perplexity": lambda step: 1.2**step}, (BOOK,)),
        ({"log.codebook_perplexity": lambda step: 1.0 if step % 7 else 50.0}, (BOOK,)),
        ({"log.codebook_usage": lambda _: 0.6}, (BOOK,)),
        ({"log.codebook_usage": lambda _: 1.0}, (BOOK,)),
        ({"log.eval/codebook_usage": lambda _: 0.01}, (BOOK,)),
        ({"log.codebook_perplexity": lambda _: 1.9, "log.codebook_size": lambda _: 4.0}, ()),
        ({"log.codebook_size": lambda _: 512.0, "loss": lambda _: 1.0}, (BOOK,)),
        ({"log.cpu_usage": lambda _: 0.01}, (BOOK,)),
    ],
    ids=["language", "no codebook", "language of code", "small batches", "healthy", "recovering", "now and then", "used", "all used", "evaluation", "four codes", "size alone", "other usage"],
)  # fmt: skip
def test_healthy_logs_raise_nothing(names: dict[str, Callable[[int], float]], entries: tuple[TensorEntry, ...]) -> None:
    assert judge(names, *entries) == []


def test_a_wrong_threshold_is_named() -> None:
    with pytest.raises(ValueError, match=r"codebook_usage\.min_logs must be at least 2, got 1"):
        CodebookUsage(min_logs=1)
