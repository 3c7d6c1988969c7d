"""Fires when the optimizer's parameters are strangers or all frozen; quiet on latents, references, adapters and copies by design."""

from holter.diagnosis import top_cause
from holter.faults import StepView
from holter.faults.learning.optimizer_identity import OptimizerIdentity
from holter.records import Census, Component, Finding, TensorEntry
from made_up import made_window


def entry(name: str, *, held: int = -1, grad: bool = True, component: int = 0) -> TensorEntry:
    return TensorEntry(name, (4, 4), "float32", grad, False, held, component=component)


def census(
    *entries: TensorEntry,
    held: tuple[int, ...] = (4,),
    foreign: tuple[int, ...] = (0,),
    grads: tuple[int, ...] = (0,),
    wrapper: str = "FSDPModel",
) -> Census:
    return Census(
        model=0,
        wrapper=wrapper,
        is_replicated=False,
        optimizers=["AdamW"] * len(held),
        components=[Component("", "Net", wrapper, is_trained=False)],
        num_held=list(held),
        num_foreign=list(foreign),
        num_foreign_with_gradient=list(grads),
        backward_order=[],
        part=0,
        parts=1,
        entries=list(entries),
    )


def judge(*of_ranks: Census, steps: int = 3) -> list[Finding]:
    views = tuple(StepView(step, 0, len(of_ranks), ()) for step in range(steps))
    window = made_window(
        now_ns=0,
        world_size=len(of_ranks),
        attached=frozenset(range(len(of_ranks))),
        steps=views,
        census=dict(enumerate(of_ranks)),
    )
    return list(OptimizerIdentity().judge(window))


UNHELD = tuple(entry(f"layers.{index}.weight") for index in range(4))


def test_an_optimizer_that_was_built_before_sharding_is_stale() -> None:
    stale = census(*UNHELD, foreign=(4,))
    (finding,) = judge(stale, stale)
    assert (finding.severity, finding.first_step, finding.ranks) == ("critical", 0, (0, 1))
    assert finding.tensors == tuple(f"layers.{index}.weight" for index in range(4))
    assert finding.facts["has_foreign_gradient"] is False
    assert top_cause(finding) == "stale_optimizer_parameters"
    assert "AdamW holds 4 parameters, 4 of them in no model" in finding.evidence[0].summary


def test_a_head_that_was_replaced_after_the_optimizer_was_built() -> None:
    held = tuple(entry(f"trunk.{index}", held=0) for index in range(3))
    told = census(*held, entry("head.weight"), entry("head.bias"), held=(5,), foreign=(2,))
    (finding,) = judge(told, told)
    assert finding.tensors == ("head.weight", "head.bias")
    assert top_cause(finding) == "stale_optimizer_parameters"
    assert "does not hold 2 of the model's 5" in finding.summary


def test_a_weight_that_was_tied_or_left_out_on_purpose_is_not_stale() -> None:
    held = tuple(entry(f"trunk.{index}", held=0) for index in range(3))
    assert judge(census(*held, held=(4,), foreign=(1,))) == []
    assert judge(census(*held, entry("head.weight"), held=(3,))) == []
    assert judge(census(*held, entry("head.weight"), held=(4,), foreign=(1,), grads=(1,))) == []


def test_it_waits_for_the_second_step() -> None:
    assert judge(census(*UNHELD, foreign=(4,)), steps=1) == []


def test_many_tensors_are_capped() -> None:
    (finding,) = judge(census(*(entry(f"l.{index}") for index in range(300)), held=(300,), foreign=(300,)))
    assert len(finding.tensors) == 64
    assert "300 trainable" in finding.summary


def test_a_latent_that_is_optimised_without_a_module_has_gradients() -> None:
    assert judge(census(*UNHELD, held=(1,), foreign=(1,), grads=(1,))) == []


def test_a_model_that_is_held_is_healthy_even_beside_a_reference_and_a_part_outside() -> None:
    held = tuple(entry(f"policy.{index}.weight", held=0) for index in range(4))
    reference = tuple(entry(f"reference.{index}.weight", component=1) for index in range(4))
    assert judge(census(*held, *reference, entry("head.weight"))) == []


def test_one_stale_optimizer_of_two_is_found_by_its_count() -> None:
    held = tuple(entry(f"d.{index}.weight", held=0, component=1) for index in range(6))
    (finding,) = judge(census(*UNHELD, *held, held=(6, 4), foreign=(0, 4), grads=(0, 0)))
    assert finding.tensors == tuple(one.name for one in UNHELD)
    assert judge(census(*UNHELD, *held, held=(6, 3), foreign=(0, 3), grads=(0, 0))) == []


def test_copies_by_design_are_healthy() -> None:
    assert judge(census(*UNHELD, held=(1,), foreign=(1,), wrapper="DeepSpeedEngine")) == []


def test_an_optimizer_of_frozen_parameters_trains_nothing() -> None:
    frozen = census(*(entry(f"lora.{index}", held=0, grad=False) for index in range(4)), entry("scale"))
    (finding,) = judge(frozen, frozen)
    assert top_cause(finding) == "nothing_trainable"
    assert finding.severity == "critical"
    assert finding.tensors == tuple(f"lora.{index}" for index in range(4))


def test_lora_with_nearly_everything_frozen_is_healthy() -> None:
    frozen = [entry(f"base.{index}", held=0, grad=False) for index in range(40)]
    assert judge(census(*frozen, entry("lora_a", held=0), held=(41,))) == []


def test_only_the_rank_that_shows_it_is_named() -> None:
    held = census(*(entry(one.name, held=0) for one in UNHELD))
    (finding,) = judge(held, census(*UNHELD, foreign=(4,)), held)
    assert finding.ranks == (1,)
