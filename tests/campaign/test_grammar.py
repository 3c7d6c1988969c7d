"""The grammar itself: the same seed gives the same bytes, every kind can be drawn, every script compiles, the rules hold."""

import ast
import collections
import hashlib
import random
import re

import pytest
import torch
from tests.campaign.faults import EXCLUDED, KINDS
from tests.campaign.grammar import RULES, SCOPE, draw, draw_setting, objections, twin
from tests.campaign.healthy import ODDITIES
from tests.campaign.models import MODELS
from tests.campaign.render import render
from torch import nn

from holter import faults as detectors

DRAWN = [draw(f"{seed}-{number}") for seed in (1, 2) for number in range(150)]
HEALTHY = [draw(f"1-h{number}") for number in range(150)]
FROZEN = "7978a21ae059750a"
"""Of the first scripts of a seed. Whoever changes the grammar changes what every earlier score was about: say so in docs/campaign.md."""


def test_the_same_seed_gives_the_same_bytes():
    assert render(draw("7-3")) == render(draw("7-3"))
    assert render(draw("7-3")) != render(draw("7-4"))


def test_the_grammar_is_frozen():
    texts = "".join(render(draw(f"0-{mark}{number}")) for mark in ("", "h") for number in range(400))
    assert FROZEN == hashlib.sha256(texts.encode()).hexdigest()[:16]


def test_every_family_occurs_in_300_draws():
    assert {kind.family for kind in KINDS} == {case.family for case in DRAWN}


def test_every_dimension_of_how_and_when_occurs():
    for name, number in (("loop", 3), ("precision", 3), ("optimizer", 4), ("ranks", 2), ("clip", 2), ("ema", 2), ("schedule", 3), ("accumulate", 3), ("data", 2)):  # fmt: skip
        assert number == len({getattr(case.setting, name) for case in DRAWN}), name
    assert {"start", "from", "once", "every"} == {case.when.kind for case in DRAWN}
    assert set(MODELS) == {case.setting.model.name for case in DRAWN}


def test_every_oddity_occurs_in_150_healthy_runs():
    assert {oddity.name for oddity in ODDITIES} == {name for case in HEALTHY for name, _ in case.oddities}
    assert {100, 150, 200, 300, 400} == {case.steps for case in HEALTHY}


def test_every_script_compiles_and_so_does_its_twin():
    for case in [*DRAWN, *HEALTHY]:
        for one in [case, twin(case)] if case.is_faulty else [case]:
            compile(render(one), one.seed, "exec")


def test_a_fault_is_marked_and_its_twin_has_nothing_of_it():
    for case in DRAWN:
        assert "# FAULT: " in render(case), case.title
        text = render(twin(case))
        assert not re.search(r"FAULT|effect\(|holter\.testing", text), case.title


def test_a_twin_is_the_script_without_the_marked_lines():
    for case in DRAWN:
        # The Trainer is told of its callbacks in a line of its own.
        if not case.injected.replaced and case.setting.loop != "trainer":
            faulty = re.sub(
                r"^ *# FAULT: .*?# \(end of the fault\)\n", "", render(case), flags=re.MULTILINE | re.DOTALL
            )
            lines, healthy = set(map(str.strip, faulty.splitlines())), map(str.strip, render(twin(case)).splitlines())
            assert all(line in lines for line in healthy if not line.startswith(('"""', "import ", "from "))), case.seed


def test_every_script_checks_its_own_effect():
    for case in DRAWN:
        assert re.search(r"^ *effect\(", render(case), flags=re.MULTILINE), case.title


def test_no_rule_is_broken_and_each_excludes_something():
    assert [] == [case.seed for case in DRAWN if objections(case.kind.needs, case.setting)]
    assert [] == [case.seed for case in HEALTHY if objections((), case.setting)]
    rng = random.Random(1)  # noqa: S311
    settings = [draw_setting(rng) for _ in range(20)]
    assert not any(rule.excludes(how) for rule in RULES for how in settings)
    assert all(rule.why.endswith(".") for rule in RULES)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_some_setting_satisfies_every_kind(kind):
    assert not objections(kind.needs, draw_setting(random.Random(3), kind.needs))  # noqa: S311


def test_every_cause_is_drawn_or_left_out_with_a_reason():
    drawn = {kind.cause for kind in KINDS}
    known = set(detectors.CAUSES)
    assert set() == known - drawn - set(EXCLUDED)
    assert set() == drawn & set(EXCLUDED)
    assert drawn <= set(SCOPE)


def test_kinds_have_one_name_each():
    assert [] == [name for name, number in collections.Counter(kind.name for kind in KINDS).items() if number > 1]


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_the_names_of_a_model_are_those_of_its_text(model):
    own = {"torch": torch, "nn": nn}
    exec(compile(model.source, model.name, "exec"), own)  # noqa: S102  our own text
    net = own["Net"]()
    names = {name: tensor.requires_grad for name, tensor in net.named_parameters()}
    assert set(model.trained) == {name for name, is_trained in names.items() if is_trained}
    assert set(model.frozen) == {name for name, is_trained in names.items() if not is_trained}
    for layer in (*model.layers, *(layer for layer, _ in model.cuts)):
        net.get_submodule(layer)


def test_what_is_expected_comes_from_the_grammar():
    for case in DRAWN:
        expected = case.expected
        assert case.kind.cause == next(iter(expected.causes))
        assert case.when.begin == expected.begin
        assert case.steps >= expected.begin + (expected.within or 0)
        assert twin(case).expected is None
        if expected.tensors:
            model = case.setting.model
            assert all(name in (*model.trained, *model.frozen, "inv_freq", "norm.running_mean", "norm.running_var", "extra.weight", "extra.bias") for name in expected.tensors)  # fmt: skip
    assert all(case.expected is None for case in HEALTHY)


def test_scripts_need_nothing_but_torch_their_framework_and_holters_public_face():
    allowed = {
        "torch",
        "accelerate",
        "transformers",
        "holter",
        "contextlib",
        "copy",
        "io",
        "math",
        "os",
        "tempfile",
        "time",
    }
    for case in [*DRAWN, *HEALTHY]:
        for node in ast.walk(ast.parse(render(case))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
                assert {name.split(".")[0] for name in names} <= allowed


def test_of_two_ranks_that_do_not_match_either_may_be_named_and_of_four_only_the_culprit():
    for case in (draw(f"{seed}-{number}") for seed in range(3, 9) for number in range(150)):
        if case.kind.cause == "uneven_batches":
            each = ((0,), (1,), (0, 1), ())
            assert (each if case.setting.ranks == 2 else (case.culprits,)) == case.expected.ranks


def test_of_two_ranks_that_differed_from_the_start_both_may_be_named_but_not_the_sound_one():
    for case in (draw(f"{seed}-{number}") for seed in range(3, 9) for number in range(150)):
        if case.kind.name == "other_rate":
            is_tie = case.setting.ranks == 2 and case.when.begin == 0
            assert ((case.culprits, (0, 1)) if is_tie else (case.culprits,)) == case.expected.ranks
