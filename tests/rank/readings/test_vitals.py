"""What a step changes, and what changes without one."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from holter.page import CONTROL_THIN
from holter.records import StepDone, Vitals


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 2))


class Loop:
    """A plain training loop, with a place for mischief between the steps."""

    def __init__(self, worn, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **how) -> None:
        self.worn, self.model, self.is_clearing = worn, model, how.pop("is_clearing", True)
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = optimizer or torch.optim.AdamW(trained, **{"lr": 1e-3, **how})
        worn.monitor.add_model(model)

    def run(self, num_steps: int, between=lambda _: None) -> list[Vitals]:
        for step in range(num_steps):
            if self.is_clearing:
                self.optimizer.zero_grad()
            dtype = next(self.model.parameters()).dtype
            self.model(torch.randn(4, 8, dtype=dtype)).pow(2).mean().backward()
            self.optimizer.step()
            between(step)
        return self.said()

    def said(self) -> list[Vitals]:
        return [observation.body for observation in self.worn.said(Vitals)]


LISTS = (
    "no_gradient",
    "zero_gradient",
    "unchanged",
    "rounded",
    "frozen_moved_in_step",
    "frozen_moved_between",
    "moved_between",
)


def named(vitals: Vitals) -> dict[str, list[str]]:
    return {name: getattr(vitals, name).names for name in LISTS if getattr(vitals, name).count}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("rate", [1e-5, 1e-3, 0.1])
def test_a_healthy_run_has_nothing_to_name(worn, kind, rate):
    model = mlp()
    said = Loop(worn, model, kind(model.parameters(), lr=rate)).run(30)
    assert len(said) > 8
    assert all(named(vitals) == {} for vitals in said)
    assert all(vitals.uncleared_steps == 0 for vitals in said)


def test_modules_are_told_with_their_figures(worn):
    model = mlp()
    said = Loop(worn, model, torch.optim.SGD(model.parameters(), lr=0.1)).run(1)
    (vitals,) = said
    assert ["0", "2", "4"] == [module.module for module in vitals.modules]
    assert [144, 272, 34] == [module.numel for module in vitals.modules]
    for module, layer in zip(vitals.modules, (model[0], model[2], model[4]), strict=True):
        gradient = torch.cat([p.grad.flatten() for p in layer.parameters()])
        weight = torch.cat([p.detach().flatten() for p in layer.parameters()])
        assert math.isclose(module.gradient_norm, gradient.norm().item(), rel_tol=1e-5)
        assert math.isclose(module.weight_norm, weight.norm().item(), rel_tol=1e-5)
        assert math.isclose(module.gradient_absmax, gradient.abs().max().item(), rel_tol=1e-6)
        # All elements are in the sample; plain descent moves by rate times gradient, rounded to the weights' precision.
        before = (weight + 0.1 * gradient).norm().item()
        assert math.isclose(module.update_ratio, 0.1 * gradient.norm().item() / before, rel_tol=1e-3)
        assert module.changed > 0.9
        assert module.learning_rate == 0.1
        assert sum(module.exponents) == module.numel
        assert len(module.exponents) == 32


def test_groups_are_few_however_many_modules(worn):
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(100)])
    (vitals,) = Loop(worn, model).run(1)
    assert len(vitals.modules) == 32
    assert sum(module.numel for module in vitals.modules) == sum(p.numel() for p in model.parameters())


def test_small_steps_of_narrow_weights_are_lost(worn):
    said = Loop(worn, mlp().bfloat16(), lr=1e-5, weight_decay=0.0).run(4)
    assert max(module.changed for module in said[-1].modules) < 0.2
    assert {"bfloat16"} == {module.dtype for module in said[-1].modules}


class Partly(nn.Module):
    """One branch is not part of the loss."""

    def __init__(self, *, is_detached: bool = False) -> None:
        super().__init__()
        self.used, self.unused, self.is_detached = nn.Linear(8, 8), nn.Linear(8, 8), is_detached

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) + (0.0 * self.unused(x) if self.is_detached else 0.0)


def test_parameters_without_a_gradient_are_named_with_their_patience(worn):
    said = Loop(worn, Partly()).run(20)
    assert (2, ["unused.weight", "unused.bias"]) == (said[0].no_gradient.count, said[0].no_gradient.names)
    assert 1 == said[0].idle_steps
    assert said[-1].idle_steps >= 16
    assert all(not vitals.zero_gradient.count for vitals in said)


def test_parameters_with_a_gradient_of_zeros_are_named(worn):
    said = Loop(worn, Partly(is_detached=True)).run(20)
    assert ["unused.weight", "unused.bias"] == said[-1].zero_gradient.names
    assert said[-1].idle_steps >= 16


def test_branches_that_take_turns_are_not_patient(worn):
    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches, self.turn = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.turn += 1
            return self.branches[self.turn % 2](x)

    loop = Loop(worn, Turns())
    worn.reader.set_control(CONTROL_THIN, 1)
    said = loop.run(60)
    assert worn.monitor.context.schedule.plan.check_interval == 2
    assert all(vitals.idle_steps <= 2 for vitals in said)


def test_a_gradient_that_is_lost_later_counts_anew(worn):
    model = Partly(is_detached=True)
    loop = Loop(worn, model)
    loop.run(10)
    model.is_detached = False
    said = loop.run(20)
    assert said[-1].no_gradient.count == 2
    assert 8 <= said[-1].idle_steps <= 20


def test_an_optimizer_that_does_nothing_is_seen(worn):
    class Lazy(torch.optim.SGD):
        def step(self, closure=None) -> None:  # noqa: ARG002
            return

    model = mlp()
    said = Loop(worn, model, Lazy(model.parameters(), lr=0.1)).run(4)
    assert all("0.weight" in vitals.unchanged.names for vitals in said)
    assert all(module.changed == 0.0 for module in said[-1].modules)


def test_a_step_that_is_undone_before_the_next_is_lost(worn):
    model = mlp()
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    class Undone(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002
            model.load_state_dict(kept)
            super().zero_grad(set_to_none)

    said = Loop(worn, model, Undone(model.parameters(), lr=0.1)).run(6)
    assert all("0.weight" in vitals.unchanged.names for vitals in said[1:])


def test_steps_too_small_for_the_weights_precision_are_not_called_lost(worn):
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    said = Loop(worn, model, torch.optim.SGD(model.parameters(), lr=1e-9)).run(10)
    assert all(not vitals.unchanged.count for vitals in said)


@pytest.mark.parametrize(
    ("first", "factor", "named"),
    [(0.1, 0.0, []), (0.0, 1.0, ["0.weight", "0.bias"]), (0.1, None, ["0.weight", "0.bias", "2.weight", "2.bias"])],
    ids=["a schedule thaws it later", "it was given no rate", "the schedule has them all at zero"],
)
def test_a_rate_of_zero_is_named_unless_a_schedule_keeps_one_group_back(worn, first, factor, named):
    model = mlp()
    groups = [{"params": list(model[0].parameters()), "lr": first}, {"params": list(model[2].parameters())}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: factor or 0.0, lambda _: 0.0 if factor is None else 1.0])
    assert named == Loop(worn, model, optimizer).run(3)[-1].without_rate.names


def test_what_no_optimizer_holds_is_named_unless_it_is_moved_by_hand_or_weighed_with_zero(worn):
    model = mlp()
    model.moved, model.still, model.idle = (nn.Parameter(torch.ones(3)) for _ in range(3))

    def step_by_hand(_: int) -> None:
        model.moved.data -= 0.1
        for p in (model.moved, model.still, model.idle):
            p.grad = None

    model.register_forward_hook(lambda _, __, out: out * (model.moved.sum() + model.still.sum() + 0 * model.idle.sum()))
    held = [p for name, p in model.named_parameters() if "." in name]
    *_, last = Loop(worn, model, torch.optim.SGD(held, lr=1e-3)).run(6, step_by_hand)
    assert ["still"] == last.unheld.names


def test_a_rate_of_zero_loses_nothing(worn):
    model = mlp()
    said = Loop(worn, model, torch.optim.SGD(model.parameters(), lr=0.0)).run(10)
    assert all(not vitals.unchanged.count for vitals in said)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_weights_that_pass_through_a_narrower_dtype_are_seen(worn, narrow):
    model = mlp()

    def round_trip(_: int) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.to(narrow).float())

    class Rounding(torch.optim.SGD):
        def step(self, closure=None) -> None:
            super().step(closure)
            round_trip(0)

    said = Loop(worn, model, Rounding(model.parameters(), lr=0.1)).run(3)
    assert "0.weight" in said[-1].rounded.names


def test_weights_that_are_no_numbers_did_not_pass_through_a_narrower_dtype(worn):
    model = mlp()

    class Spoiling(torch.optim.SGD):
        def step(self, closure=None) -> None:
            super().step(closure)
            for p in model.parameters():
                p.detach().fill_(torch.nan)

    said = Loop(worn, model, Spoiling(model.parameters(), lr=0.1)).run(3)
    assert not any(vitals.rounded.count for vitals in said)


def test_a_matrix_with_next_to_no_gradient_is_named_and_its_bias_is_not(worn):
    model = mlp()
    model[0].weight.register_hook(lambda g: g * 1e-12)
    model[0].bias.register_hook(lambda g: g * 1e-12)
    said = Loop(worn, model, torch.optim.SGD(model.parameters(), lr=0.1)).run(3)
    assert ["0.weight"] == said[-1].faint.names


def test_frozen_parameters_that_a_step_moves_are_named(worn):
    model = mlp()
    loop = Loop(worn, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loop.run(2)
    loop.is_clearing = False
    for p in model[0].parameters():
        p.requires_grad_(False)
    said = loop.run(10)
    assert ["0.weight", "0.bias"] == said[-1].frozen_moved_in_step.names


def test_frozen_parameters_that_move_between_steps_are_named_with_their_patience(worn):
    model = mlp()
    model[0].requires_grad_(False)
    loop = Loop(worn, model)

    def disturb(step: int) -> None:
        if step == 5:
            model[0].weight.data.add_(torch.randn(16, 8))

    said = loop.run(12, disturb)
    told = [vitals for vitals in said if vitals.frozen_moved_between.count]
    assert 1 == len(told)
    assert ["0.weight"] == told[0].frozen_moved_between.names
    assert told[0].frozen_still_checks >= 5
    assert all(not vitals.frozen_moved_in_step.count for vitals in said)


def test_what_is_frozen_and_multiplied_by_a_factor_is_told_from_an_average(worn):
    model = mlp()
    model[0].requires_grad_(False)
    target = torch.randn(16, 8)

    def write(step: int) -> None:
        model[0].weight.data.mul_(0.9995)
        model[0].bias.data.copy_(target[:, step % 8])

    said = Loop(worn, model).run(6, write)
    assert ["0.weight"] == said[-1].frozen_scaled.names
    assert ["0.weight", "0.bias"] == said[-1].frozen_moved_between.names

    def average(_: int) -> None:
        model[0].weight.data.lerp_(target, 0.01)

    said = Loop(worn, model).run(6, average)
    assert not said[-1].frozen_scaled.count


@pytest.mark.parametrize("delay", [0, 2])
def test_a_copy_of_the_live_weights_is_no_disturbance(worn, delay):
    class Game(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.online(x) - self.target(x)

    model = Game()
    loop = Loop(worn, model)
    said = loop.run(
        40, lambda step: model.target.load_state_dict(model.online.state_dict()) if step % 5 == delay else None
    )
    assert all(not vitals.frozen_moved_between.count for vitals in said)


def test_trained_parameters_that_move_between_steps_are_named(worn):
    model = mlp()

    def disturb(step: int) -> None:
        if step == 3:
            model[2].weight.data[0, 0] += 1.0

    said = Loop(worn, model).run(8, disturb)
    assert [["2.weight"]] == [vitals.moved_between.names for vitals in said if vitals.moved_between.count]


def test_old_gradients_are_counted_and_grow(worn):
    model = mlp()
    said = Loop(worn, model, torch.optim.SGD(model.parameters(), lr=1e-4), is_clearing=False).run(12)
    assert said[-1].uncleared_steps >= 6
    assert said[-1].uncleared_growth > 2.0


def test_gradients_set_to_zero_are_cleared(worn):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    worn.monitor.add_model(model)
    for _ in range(10):
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert all(o.body.uncleared_steps == 0 for o in worn.said(Vitals))


def test_each_side_of_a_game_clears_its_own_gradients(worn):
    one, other = nn.Linear(8, 8), nn.Linear(8, 1)
    worn.monitor.add_model(one)
    worn.monitor.add_model(other)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-3) for each in (one, other)]
    for _ in range(12):
        optimizers[1].zero_grad()
        other(one(torch.randn(4, 8))).pow(2).mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        other(one(torch.randn(4, 8))).mean().backward()
        optimizers[0].step()
    said = worn.said(Vitals)
    assert said
    assert all(o.body.uncleared_steps == 0 for o in said)
    assert all(named(o.body) == {} for o in said)


def test_the_one_of_two_optimizers_that_clears_nothing_is_seen_beside_the_other(worn):
    one, other = nn.Linear(8, 8), nn.Linear(8, 1)
    worn.monitor.add_model(one)
    worn.monitor.add_model(other)
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-5) for each in (one, other)]
    for _ in range(12):
        optimizers[0].zero_grad()
        one(torch.randn(4, 8)).pow(2).mean().backward()
        optimizers[0].step()
        other(torch.randn(4, 8)).pow(2).mean().backward()
        optimizers[1].step()
    said = worn.said(Vitals)
    assert said[-1].body.uncleared_steps >= 3
    assert said[-1].body.uncleared_growth > 1.2


def test_accumulated_gradients_are_not_old_ones(worn):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    worn.monitor.add_model(model)
    for index in range(40):
        model(torch.randn(4, 8)).pow(2).mean().backward()
        if index % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    said = worn.said(Vitals)
    assert said
    assert all(o.body.uncleared_steps == 0 for o in said)


def test_a_closure_is_left_alone(worn):
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    worn.monitor.add_model(model)
    batch = torch.randn(4, 8)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(6):
        optimizer.step(closure)
    assert all(named(o.body) == {} for o in worn.said(Vitals))


def test_vitals_become_rarer(worn):
    Loop(worn, mlp()).run(48)
    steps = [observation.step for observation in worn.said(Vitals)]
    assert list(range(8)) == steps[:8]
    assert steps[8:] == list(range(8, 48, 4))


def test_of_many_ranks_few_speak_at_a_time(wear):
    worn = wear(world_size=128)
    Loop(worn, mlp()).run(24)
    steps = [observation.step for observation in worn.said(Vitals)]
    assert [0, 2, 4, 6, 8, 16] == steps


def test_the_view_of_a_bare_model_is_local(worn):
    assert {"local"} == {vitals.view for vitals in Loop(worn, mlp()).run(2)}


@pytest.mark.usefixtures("gloo")
def test_the_view_of_a_wrapped_model_is_replicated(worn):
    assert {"replicated"} == {vitals.view for vitals in Loop(worn, DistributedDataParallel(mlp())).run(2)}


@pytest.mark.usefixtures("gloo")
def test_the_view_of_a_sharded_model_is_sharded(worn):
    model = mlp()
    fully_shard(model)
    said = Loop(worn, model).run(3)
    assert {"sharded"} == {vitals.view for vitals in said}
    assert all(named(vitals) == {} for vitals in said)
    assert all(module.changed > 0.9 for module in said[-1].modules)
    assert {"sharded"} == {observation.body.view for observation in worn.said(StepDone)}


def test_a_device_that_answers_late_tells_the_same(worn):
    at_once = Loop(worn, mlp()).run(12)
    worn.forget()
    worn.answer_late()
    late = Loop(worn, mlp()).run(24)
    assert late
    assert all(named(vitals) == {} for vitals in late)
    assert [module.module for module in at_once[0].modules] == [module.module for module in late[0].modules]


def test_nothing_of_a_dropped_model_is_kept(worn):
    model = mlp()
    loop = Loop(worn, model)
    loop.run(4)
    gone = weakref.ref(model[0].weight)
    del model, loop
    gc.collect()
    assert gone() is None
