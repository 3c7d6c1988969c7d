"""The loss as backward met it, and backward as the script called it."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.checkpoint import checkpoint

from holter.records import Phase, StepDone


def watched(worn, values: torch.Tensor) -> nn.Parameter:
    """A parameter in a model of its own."""
    model = nn.ParameterList([values])
    worn.monitor.add_model(model)
    worn.model = model
    return model[0]


def bodies(worn) -> list[StepDone]:
    return [observation.body for observation in worn.said(StepDone)]


def test_the_loss_is_told_before_the_scaler_multiplied_it(worn):
    model = nn.Linear(4, 1, bias=False)
    worn.monitor.add_model(model)
    nn.init.ones_(model.weight)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert [4.0] == [body.loss for body in bodies(worn)]


def test_the_norm_is_told_without_the_scale(worn):
    model = nn.Linear(4, 1, bias=False)
    worn.monitor.add_model(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert [2.0] == [body.gradient_norm for body in bodies(worn)]


def test_steps_that_the_scaler_skips_are_no_fault(worn):
    model = nn.Linear(4, 4)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-60)
    scales = []
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).pow(2).sum() * 100).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] < 2.0**127, "the first step was to be skipped"
    told = bodies(worn)
    assert 3 == len(told)
    assert [[], [], []] == [body.nonfinite for body in told]
    assert all(math.isfinite(body.loss) for body in told)


def test_steps_that_a_fused_optimizer_skips_for_the_scaler_are_no_fault(worn):
    model = nn.Linear(4, 4)
    worn.monitor.add_model(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    before = model.weight.clone()
    scaler.scale(model(torch.ones(2, 4)).pow(2).sum() * 100).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(before, model.weight)
    assert all(body.nonfinite == [] for body in bodies(worn))


def test_the_first_of_several_losses_is_told(worn):
    weight = watched(worn, torch.ones(2))
    torch.autograd.backward([weight.sum(), (3 * weight).sum()])
    torch.optim.SGD([weight], lr=0.1).step()
    assert [2.0] == [body.loss for body in bodies(worn)]
    assert [4.0, 4.0] == weight.grad.tolist()


def test_losses_from_a_generator_reach_torch(worn):
    weight = watched(worn, torch.ones(2))
    torch.autograd.backward(factor * weight.sum() for factor in (1.0, 3.0))
    assert weight.grad is not None
    assert [4.0, 4.0] == weight.grad.tolist()


def test_a_loss_that_is_no_scalar_is_not_told(worn):
    model = nn.Linear(4, 2)
    worn.monitor.add_model(model)
    model(torch.ones(1, 4)).backward(torch.ones(1, 2))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert [(1, None)] == [(body.micro_steps, body.loss) for body in bodies(worn)]


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_checkpointing_calls_backward_once_a_step(worn, is_reentrant):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        inputs = torch.ones(2, 4, requires_grad=True)
        checkpoint(model, inputs, use_reentrant=is_reentrant).sum().backward()
        optimizer.step()
    assert [1, 1, 1] == [body.micro_steps for body in bodies(worn)]
    assert all(body.gradient_norm > 0 for body in bodies(worn))


def test_a_second_backward_through_the_same_graph_is_heard_again(worn):
    weight = watched(worn, torch.ones(2))
    loss = weight.pow(2).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    torch.optim.SGD([weight], lr=0.1).step()
    assert [4.0, 4.0] == weight.grad.tolist()
    assert [(2, 2.0)] == [(body.micro_steps, body.loss) for body in bodies(worn)]


def test_a_gradient_of_a_gradient_is_what_it_was(worn):
    weight = watched(worn, torch.full((2,), 3.0))
    (slope,) = torch.autograd.grad(weight.pow(3).sum(), weight, create_graph=True)
    slope.sum().backward()
    torch.optim.SGD([weight], lr=0.1).step()
    assert [18.0, 18.0] == weight.grad.tolist()
    assert [54.0] == [body.loss for body in bodies(worn)]


def test_no_hook_stays_on_the_loss(worn):
    weight = watched(worn, torch.ones(2))
    loss = weight.sum()
    loss.backward()
    assert not loss._backward_hooks


def test_a_backward_that_raises_leaves_the_probe_ready(worn):
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):  # noqa: ARG004
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):  # noqa: ARG004
            raise RuntimeError("out of memory")

    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="out of memory"):
        Bad.apply(model(torch.ones(1, 4)).sum()).backward()
    assert Phase.OTHER is worn.monitor.context.phases.phase
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert bodies(worn)[0].gradient_norm > 0


def test_an_interrupt_at_the_start_of_backward_blinds_nothing(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def interrupt() -> None:
        worn.monitor._losses._on_begin = lambda: None
        raise KeyboardInterrupt

    worn.monitor._losses._on_begin = interrupt
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 4)).sum().backward()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert bodies(worn)[0].loss is not None


def test_a_loss_that_is_not_finite_is_told_although_the_gradients_are(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for offset in (0.0, math.nan, 0.0):
        optimizer.zero_grad()
        (model(torch.ones(1, 4)).sum() + offset).backward()
        optimizer.step()
    told = bodies(worn)
    assert [False, True, False] == [math.isnan(body.loss) for body in told]
    assert [[], [], []] == [body.nonfinite for body in told]


def test_a_loss_whose_gradients_the_script_threw_away_is_not_told(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for factor in (1.0, math.nan, 1.0):
        optimizer.zero_grad()
        (model(torch.ones(1, 4)).sum() * factor).backward()
        if math.isfinite(factor):
            optimizer.step()
    assert all(math.isfinite(body.loss) for body in bodies(worn))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda loss: loss, 0.0),
        (lambda loss: loss / 4, 1.0),
        (lambda loss: 0.25 * loss, 1.0),
        (lambda loss: loss + loss.detach(), 0.0),
        (lambda loss: loss + 0.1 * loss.sqrt(), 1.0),
        (lambda loss: loss * loss, 0.0),
        (lambda loss: (loss / torch.tensor(4.0)).double(), 1.0),
    ],
)
def test_whether_the_loss_is_divided_is_told(worn, make, expected):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    make(model(torch.ones(2, 4)).pow(2).mean()).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert [expected] == [body.numbers["loss.is_divided"] for body in bodies(worn)]


def test_the_scalers_own_factor_is_no_division(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    (body,) = bodies(worn)
    assert (0.0, 1024.0) == (body.numbers["loss.is_divided"], body.numbers["loss_scale"])


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("divides", [True, False])
def test_a_pipeline_that_divides_the_gradients_itself_divides_the_loss(worn, divides):
    stage = PipelineStage(nn.Linear(4, 4), 0, 1, torch.device("cpu"))
    worn.monitor.add_model(stage.submod)
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss, scale_grads=divides)
    schedule.step(torch.ones(4, 4), target=torch.zeros(4, 4), losses=[])
    torch.optim.SGD(stage.submod.parameters(), lr=0.1).step()
    (body,) = bodies(worn)
    assert (2, float(divides)) == (body.micro_steps, body.numbers["loss.is_divided"])


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("index", [0, 1])
def test_only_the_first_stage_of_a_pipeline_is_given_a_batch(worn, index):
    stage = PipelineStage(nn.Linear(4, 4), 0, 1, torch.device("cpu"))
    stage.stage_index = index
    worn.monitor.add_model(stage.submod)
    stage.forward_maybe_with_nosync(torch.rand(4, 4)).sum().backward()
    torch.optim.SGD(stage.submod.parameters(), lr=0.1).step()
    (body,) = bodies(worn)
    assert (index == 0) == bool(body.batch)
