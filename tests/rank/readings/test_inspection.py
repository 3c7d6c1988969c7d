"""One pass under hooks."""

import io
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from holter.records import Inspection


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Other tests of this process may have used torch.compile, which keeps inspections away."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None:
        utils.counters.clear()


class Net(nn.Module):
    """Two blocks behind an embedding; the blocks may run under reentrant checkpointing, or not at all."""

    def __init__(self, *, is_frozen: bool = False, is_reentrant: bool = True, is_skipping: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8).requires_grad_(not is_frozen)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)])
        self.head = nn.Linear(8, 2)
        self.is_reentrant, self.is_skipping = is_reentrant, is_skipping

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in () if self.is_skipping else self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=self.is_reentrant)
        return self.head(hidden)


def train(worn, model: nn.Module, num_steps: int, region=None) -> list[Inspection]:
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(num_steps):
        optimizer.zero_grad()
        with region or torch.autocast("cpu", enabled=False):
            loss = model(torch.randint(10, (2, 3))).float().pow(2).mean()
        loss.backward()
        optimizer.step()
    return [observation.body for observation in worn.said(Inspection)]


def hooks(model: nn.Module) -> list[int]:
    return [len(module._forward_hooks) for module in model.modules()]


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_a_healthy_pass_reaches_every_module_with_gradients(worn, is_reentrant):
    model = Net(is_reentrant=is_reentrant)
    (inspection,) = train(worn, model, 10)
    assert "first" == inspection.reason
    assert {"embedding", "blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1", "head"} == {
        witness.module for witness in inspection.witnesses
    }
    assert all(witness.was_gradient_on and witness.has_gradient_path for witness in inspection.witnesses)
    assert "" == inspection.autocast_dtype
    assert 0 == inspection.uncalled.count
    assert 0 == sum(hooks(model)[1:])


def test_witnesses_come_in_the_order_of_their_calls(worn):
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.act, self.embedding = nn.Linear(4, 2), nn.ReLU(), nn.Embedding(10, 4)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.act(self.embedding(tokens)))

    (inspection,) = train(worn, Turned(), 4)
    assert ["embedding", "act", "head"] == [witness.module for witness in inspection.witnesses]


def test_outputs_with_the_mantissas_of_a_narrower_dtype_are_told(worn):
    model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1))
    model[1].register_forward_hook(lambda _, __, out: out.half().float())
    (inspection,) = train(worn, model, 4)
    assert [False, True, False, False] == [witness.is_rounded for witness in inspection.witnesses]


def test_wholes_and_inputs_with_the_mantissas_of_a_narrower_dtype_are_told(worn):
    class Rounding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.layer(hidden).bfloat16().float()

    model = nn.Sequential(nn.Embedding(10, 16), nn.Sequential(nn.Linear(16, 16)), Rounding(), nn.Linear(16, 1))
    (inspection,) = train(worn, model, 4)
    assert [False] * 4 == [witness.is_rounded for witness in inspection.witnesses]
    expected = {"1": False, "1.0 (input)": False, "2": True, "2.layer (input)": False, "3 (input)": True}
    assert expected == inspection.rounded


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_blocks_cut_off_by_reentrant_checkpointing_are_shown(worn):
    inspection, *more = train(worn, Net(is_frozen=True), 12)
    cut = {witness.module for witness in inspection.witnesses if not witness.was_gradient_on}
    assert {"blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1"} == cut
    assert "idle" in {each.reason for each in more}
    assert all(each.reason == "idle" for each in more)


def test_modules_that_are_not_called_are_named(worn):
    inspection = train(worn, Net(is_skipping=True), 5)[0]
    assert (2, ["blocks.0.0", "blocks.1.0"]) == (inspection.uncalled.count, inspection.uncalled.names)


def test_idleness_is_asked_about_three_times_at_most(worn):
    said = train(worn, Net(is_skipping=True), 80)
    assert ["first", "idle", "idle", "idle"] == [inspection.reason for inspection in said]


def test_the_dtype_of_the_region_and_of_the_outputs_is_told(worn):
    inspection = train(worn, Net(is_reentrant=False), 4, torch.autocast("cpu", dtype=torch.bfloat16))[0]
    assert "bfloat16" == inspection.autocast_dtype
    dtypes = {witness.module: witness.output_dtype for witness in inspection.witnesses}
    assert ("float32", "bfloat16") == (dtypes["embedding"], dtypes["head"])


def test_a_dtype_that_changes_under_autocast_is_told_at_the_next_look(worn):
    region, model = torch.autocast("cpu", dtype=torch.bfloat16), Net(is_reentrant=False)
    assert ["first"] == [one.reason for one in train(worn, model, 40, region)]
    wide = torch.autocast("cpu", enabled=False)(model.head.forward)
    model.head.forward = lambda x: wide(x.float())
    (changed,) = [one for one in train(worn, model, 40, region) if one.reason == "changed"]
    assert "float32" == next(one.output_dtype for one in changed.witnesses if one.module == "head")
    assert not any(hooks(model)[1:])


def test_values_that_begin_to_go_through_a_narrower_dtype_are_told_at_the_next_look(worn):
    model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 16), nn.Linear(16, 1))
    assert ["first"] == [one.reason for one in train(worn, model, 40)]
    model[1].register_forward_hook(lambda _, __, out: out.half().float())
    (changed,) = [one for one in train(worn, model, 40) if one.reason == "changed"]
    assert [False, True, False] == [witness.is_rounded for witness in changed.witnesses]


def test_zeros_are_counted(worn):
    model = Net()
    nn.init.constant_(model.blocks[1][0].bias, -100.0)
    inspection = train(worn, model, 3)[0]
    zeros = {witness.module: witness.output_zeros for witness in inspection.witnesses}
    assert 1.0 == zeros["blocks.1.1"]
    assert zeros["blocks.0.1"] < 1.0
    assert 0.0 == zeros["embedding"]


def test_a_pass_that_raises_leaves_no_hook(worn):
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.is_failing = nn.Linear(4, 4), False
            # A root with parameters of its own is looked at too.
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.is_failing:
                raise RuntimeError("out of memory")
            return self.layer(x) * self.scale

    model = Failing()
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model.is_failing = step == 2
        if model.is_failing:
            with pytest.raises(RuntimeError, match="out of memory"):
                model(torch.ones(1, 4))
            assert 0 == hooks(model)[1]
            continue
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
def test_a_scripted_part_keeps_the_model_unseen(worn):
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert [] == worn.said(Inspection)


def test_a_fast_path_stays_fast(worn):
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).requires_grad_(False).eval()
            self.head, self.num_hooked = nn.Linear(8, 2), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.num_hooked += sum(len(m._forward_hooks) for m in self.encoder.modules())
            return self.head(self.encoder(x))

    model = Beside()
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.ones(1, 3, 8)).sum().backward()
        optimizer.step()
    assert 1 == len(worn.said(Inspection))
    assert 0 == model.num_hooked


def test_after_something_was_compiled_nothing_is_inspected(worn):
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    assert [] == train(worn, Net(), 4)


class Rounding(nn.Module):
    """Two layers with a lossy operation between them, as a script writes it: outside of any module."""

    def __init__(self, between) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 2)
        self.between = between

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(tokens[..., None].float().expand(-1, -1, 8))))


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (torch.round, "second"),
        (lambda x: x.clamp(1e6, 2e6), "second"),
        # A branch that is weighed with zero beside one that is not: the gradient is not lost.
        (lambda x: x + 0 * torch.round(x), ""),
    ],
)
def test_an_operation_that_gives_back_nothing_but_zeros_is_placed_between_two_modules(worn, between, expected):
    *_, inspection = train(worn, Rounding(between), 40)
    if not expected:
        assert "first" == inspection.reason
        return
    assert "idle" == inspection.reason
    seen = {witness.module: witness for witness in inspection.witnesses}
    assert expected == seen["first"].lost_in
    assert seen["first"].has_gradient is False
    assert seen["second"].has_gradient is True
    assert "" == seen["second"].lost_in


def test_a_saturated_activation_of_its_own_is_the_place(worn):
    model = nn.Sequential(nn.Flatten(0, 1), nn.Linear(8, 8), nn.Hardtanh(), nn.Linear(8, 2))
    with torch.no_grad():
        model[1].bias.fill_(50.0)
    wrapper = Rounding(lambda x: x)
    wrapper.first, wrapper.second = model, nn.Linear(2, 2)
    *_, inspection = train(worn, wrapper, 40)
    assert "idle" == inspection.reason
    assert {"first.2"} == {witness.lost_in for witness in inspection.witnesses if witness.module == "first.1"}


def test_a_gate_of_zero_beside_a_trunk_loses_nothing(worn):
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.branch, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.trunk(tokens[..., None].float().expand(-1, -1, 8))
            return self.head(x + 0.0 * self.branch(x))

    *_, inspection = train(worn, Gated(), 40)
    assert "idle" == inspection.reason
    assert [] == [witness.module for witness in inspection.witnesses if witness.lost_in]


class Held:
    pass


class Doubled(torch.autograd.Function):
    """Holds an object for as long as its operation is there."""

    @staticmethod
    def forward(ctx, x, held):
        ctx.held = held
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        del ctx
        return gradient * 2, None


class Holding(nn.Module):
    """Two layers; of each call it is known whether its graph is still there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 2)
        self.held: list[weakref.ref[Held]] = []
        self.between: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = Held()
        self.held.append(weakref.ref(held))
        self.between = [self.first(x)]
        return self.second(Doubled.apply(self.between[0], held))


def test_graphs_and_tensors_of_the_script_are_left_alone(worn):
    model = Holding()
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    worn.monitor._inspection.ask()
    for _ in range(5):
        model(torch.ones(2, 8))
    model.between.clear()
    assert [] == [held for held in model.held if held() is not None], "what is thrown away takes its graph with it"
    output = model(torch.ones(2, 8))
    torch.save([output, *model.between], io.BytesIO())  # would warn of hooks on them
    output.pow(2).sum().backward()
    said = worn.said(Inspection)[-1].body
    assert [(6, True), (6, True)] == [(each.num_calls, each.has_gradient) for each in said.witnesses]
    assert not worn.monitor.context.guard.failures


def test_hooks_on_operations_are_gone_when_the_pass_is_over(worn, monkeypatch):
    asked: list[torch.Tensor] = []
    monkeypatch.setattr("holter.rank.readings.inspection._is_any", asked.append)
    model = Holding()
    worn.monitor.add_model(model)
    model(torch.ones(2, 8)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    worn.monitor._inspection.ask()
    loss = model(torch.ones(2, 8)).sum()
    loss.backward(retain_graph=True)
    assert asked
    asked.clear()
    loss.backward()
    assert not asked


def test_nothing_is_told_of_the_gradients_of_a_rollout(worn, monkeypatch):
    monkeypatch.setattr("holter.rank.readings.inspection.MAX_FOLLOWED", 4)
    model = Holding()
    worn.monitor.add_model(model)
    model(torch.ones(2, 8)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    worn.monitor._inspection.ask()
    outputs = [model(torch.ones(2, 8)) for _ in range(3)]
    sum(output.sum() for output in outputs).backward()
    said = worn.said(Inspection)[-1].body
    assert ("idle", {None}) == (said.reason, {each.has_gradient for each in said.witnesses})
