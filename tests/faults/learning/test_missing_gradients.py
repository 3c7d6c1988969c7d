"""Fires on modules that are called and get no gradient; quiet on what is not called, on warm-up, and on zeros with another reason."""

import math

import pytest

from holter.diagnosis import top_cause
from holter.faults import Window
from holter.faults.learning.missing_gradients import MissingGradients
from holter.faults.window import Note, Spread, StepNumbers
from holter.records import Census, Finding, Inspection, Named, TensorEntry, Vitals, Witness
from made_up import made_window


def vitals(none: tuple[str, ...] = (), zero: tuple[str, ...] = (), *, idle: int = 16, num_trainable: int = 6) -> Vitals:
    return Vitals(
        view="replicated",
        modules=[],
        num_trainable=num_trainable,
        no_gradient=Named(len(none), list(none)),
        zero_gradient=Named(len(zero), list(zero)),
        idle_steps=idle,
    )


def witness(
    module: str,
    kind: str = "Linear",
    *,
    calls: int = 1,
    on: bool = True,
    path: bool = True,
    zeros: float = math.nan,
    given: float = math.nan,
    has_gradient: bool | None = None,
    lost_in: str = "",
) -> Witness:
    return Witness(module, kind, calls, "float32", zeros, given, on, path, kind != "ReLU", None, has_gradient, lost_in)


def judge(
    *said: Vitals,
    seen: tuple[Witness, ...] = (),
    rate: float = 1e-3,
    reason: str = "idle",
    ranks: int = 2,
    uncalled: tuple[str, ...] = (),
) -> list[Finding]:
    notes = [Note(rank, 15 + i, 0, one) for i, one in enumerate(said) for rank in range(ranks)]
    if seen:
        never = Named(len(uncalled), list(uncalled))
        inspection = Inspection(reason=reason, autocast_dtype="", witnesses=list(seen), num_modules=len(seen), uncalled=never)  # type: ignore[arg-type]  # fmt: skip
        notes.append(Note(0, 17, 0, inspection))
    rates = Spread(rate, rate, rate, 0, 0, ranks)
    window = Window(
        now_ns=0,
        world_size=ranks,
        attached=frozenset(range(ranks)),
        notes=tuple(notes),
        series=tuple(StepNumbers(step, 0, {"learning_rate": rates}) for step in range(18)),
    )
    return list(MissingGradients().judge(window))


BLOCKS = ("blocks.0.0.weight", "blocks.0.0.bias", "blocks.1.0.weight", "blocks.1.0.bias")
CUT = (
    witness("blocks.0.0", on=False, path=False),
    witness("blocks.1.0", on=False, path=False),
    witness("head"),
)


def test_checkpointed_blocks_behind_a_frozen_embedding_are_named_and_not_the_head() -> None:
    (finding,) = judge(vitals(BLOCKS), vitals(BLOCKS, idle=17), seen=CUT)
    assert finding.modules == ("blocks.0.0", "blocks.1.0")
    assert finding.tensors == BLOCKS
    assert (finding.severity, finding.first_step, finding.detected_step, finding.ranks) == ("warning", 0, 16, (0, 1))
    assert finding.facts["is_gradient_off"] is True
    assert top_cause(finding) == "graph_detached"
    assert any("ran while gradients were not recorded" in one.summary for one in finding.evidence)


def test_an_output_without_a_path_is_proof_as_well() -> None:
    (finding,) = judge(vitals(BLOCKS), vitals(BLOCKS, idle=17), seen=(witness("blocks.0.0", path=False),))
    assert finding.modules == ("blocks.0.0",)
    assert (finding.severity, top_cause(finding)) == ("warning", "graph_detached")


def test_what_comes_before_a_cut_gets_nothing_either() -> None:
    names = ("encoder.weight", "norm.weight", "side.weight")
    seen = (witness("encoder"), witness("norm", path=False), witness("side"), witness("head"))
    (finding,) = judge(vitals(names), vitals(names, idle=17), seen=seen)
    assert finding.modules == ("norm",)
    assert finding.tensors == ("norm.weight", "encoder.weight"), "side is called later: something else keeps it idle"
    assert "2 trainable parameters (norm and, before it, encoder) have had no gradient" in finding.summary


def test_modules_that_were_not_called_are_silent() -> None:
    assert judge(vitals(BLOCKS), vitals(BLOCKS), seen=(witness("blocks.0.0", calls=0), witness("head"))) == []


def test_without_an_inspection_nothing_is_said() -> None:
    assert judge(vitals(BLOCKS), vitals(BLOCKS)) == []
    assert judge(vitals(BLOCKS), vitals(BLOCKS), seen=CUT, reason="first") == []


def test_a_few_idle_steps_are_silent() -> None:
    assert judge(vitals(BLOCKS, idle=3), vitals(BLOCKS, idle=4), seen=CUT) == []
    assert judge(vitals(BLOCKS), vitals(), seen=CUT) == []
    assert judge(vitals(("aux.weight",), idle=9), vitals(("aux.weight",), idle=13), seen=(witness("aux"),)) == []


def test_what_is_proven_takes_eight_steps() -> None:
    (finding,) = judge(vitals(BLOCKS, idle=5), vitals(BLOCKS, idle=9), seen=CUT)
    assert finding.first_step == 8


def test_zero_gradients_while_the_learning_rate_is_zero_do_not_count() -> None:
    lora = ("lora_A.weight",)
    dead = (witness("lora_A"), witness("lora_B", zeros=1.0))
    assert judge(vitals(zero=lora), vitals(zero=lora), seen=dead, rate=0.0) == []


def test_a_branch_that_is_called_and_whose_result_is_not_used_is_information_only() -> None:
    (finding,) = judge(vitals(("aux.weight", "aux.bias")), vitals(("aux.weight", "aux.bias")), seen=(witness("aux"),))
    assert finding.severity == "info"


def test_a_detached_trunk_is_most_of_the_model() -> None:
    seen = (witness("blocks.0.0"), witness("blocks.1.0"), witness("head"))
    (finding,) = judge(vitals(BLOCKS), vitals(BLOCKS), seen=seen)
    assert (finding.severity, top_cause(finding)) == ("warning", "graph_detached")


def test_a_dead_relu_is_named_with_what_feeds_it() -> None:
    zero = ("fc1.weight", "fc1.bias", "fc2.weight")
    seen = (witness("fc1", zeros=0.0), witness("act", "ReLU", zeros=1.0), witness("fc2", zeros=0.0, given=1.0))
    (finding,) = judge(vitals(zero=zero), vitals(zero=zero), seen=seen)
    assert finding.modules == ("act", "fc1")
    assert (finding.severity, top_cause(finding)) == ("warning", "dead_activations")
    assert any("gave 100%" in one.summary for one in finding.evidence)


def test_an_activation_without_a_module_is_found_by_what_it_feeds() -> None:
    zero = ("fc1.weight", "fc1.bias", "fc2.weight")
    seen = (witness("fc1", zeros=0.0), witness("fc2", zeros=0.0, given=1.0))
    (finding,) = judge(vitals(zero=zero), vitals(zero=zero), seen=seen)
    assert finding.modules == ("fc2", "fc1")
    assert top_cause(finding) == "dead_activations"


def test_a_loss_term_of_weight_zero_is_silent() -> None:
    zero = ("aux.weight", "aux.bias")
    seen = (witness("trunk", zeros=0.0), witness("aux", zeros=0.0), witness("head", zeros=0.0))
    assert judge(vitals(zero=zero), vitals(zero=zero), seen=seen) == []
    elsewhere = (witness("pad", "Embedding", zeros=1.0), witness("trunk"), witness("mid"), witness("aux", zeros=0.0))
    assert judge(vitals(zero=zero), vitals(zero=zero), seen=elsewhere) == []


@pytest.mark.parametrize(
    ("module", "idle", "is_found"), [("extra", 40, True), ("extra", 20, False), ("bert.pooler", 40, True)]
)
def test_parameters_of_a_module_that_no_pass_calls_are_named_as_information(
    module: str, idle: int, *, is_found: bool
) -> None:
    names = (f"{module}.weight",)
    found = judge(vitals(names, idle=idle), vitals(names, idle=idle + 1), seen=(witness("head"),), uncalled=(module,))
    assert is_found == bool(found)
    for finding in found:
        assert ("info", names, "graph_detached") == (finding.severity, finding.tensors, top_cause(finding))
        assert "no pass calls their modules" in finding.summary


def stopped(*, idle_names: tuple[str, ...], step: int = 40, given: float = 0.5) -> list[Finding]:
    names = ("a.weight", "a.bias", "b.weight")
    census = Census(
        model=0, wrapper="DistributedDataParallel", is_replicated=True, optimizers=["SGD"], backward_order=[], part=0, parts=1,
        entries=[TensorEntry(name, (4, 4), "float32", True, False, 0, True) for name in names],
    )  # fmt: skip
    seen = [witness("a", given=given), witness("b")]
    notes = [Note(0, step + i, 0, vitals(zero=idle_names, idle=16 + i)) for i in range(2)]
    looked = Inspection(reason="idle", autocast_dtype="", witnesses=seen, num_modules=2)
    window = made_window(notes=(*notes, Note(0, step + 2, 0, looked)), census={0: census, 1: census})
    return list(MissingGradients().judge(window))


def test_a_gradient_that_stopped_beside_a_live_one_of_its_module_is_a_warning() -> None:
    (finding,) = stopped(idle_names=("a.weight",))
    assert ("warning", ("a.weight",), 25) == (finding.severity, finding.tensors, finding.first_step)
    assert top_cause(finding) == "graph_detached"


def test_whole_modules_zero_inputs_and_what_never_had_one_are_silent() -> None:
    assert [] == stopped(idle_names=("a.weight", "a.bias"))
    assert [] == stopped(idle_names=("b.weight",))
    assert [] == stopped(idle_names=("a.weight",), step=17)
    assert not any(one.facts["is_stopped"] for one in stopped(idle_names=("a.weight",), given=1.0))


def test_a_gradient_that_is_lost_between_two_modules_is_found_and_placed() -> None:
    seen = (
        witness("blocks.0.0", has_gradient=False),
        witness("blocks.1.0", has_gradient=False, lost_in="head"),
        witness("head", has_gradient=True),
    )
    (finding,) = judge(vitals(zero=BLOCKS), vitals(zero=BLOCKS, idle=17), seen=seen)
    assert ("warning", BLOCKS, ("blocks.0.0", "blocks.1.0")) == (finding.severity, finding.tensors, finding.modules)
    assert top_cause(finding) == "graph_detached"
    assert any("came back to head" in one.summary for one in finding.evidence)


def test_a_loss_term_of_weight_zero_is_not_a_lost_gradient() -> None:
    seen = (
        witness("blocks.0.0", has_gradient=False),
        witness("blocks.1.0", has_gradient=False),
        witness("head", has_gradient=True),
    )
    assert [] == judge(vitals(zero=BLOCKS), vitals(zero=BLOCKS, idle=17), seen=seen)
