"""Hooks on a model leave no trace in what the script makes of it."""

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn

from holter.records import StepDone

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.body(values)


def trained(worn=None, make=lambda model: model, num_steps: int = 5) -> tuple[nn.Module, list[torch.Tensor]]:
    """A model after some steps, and its bits."""
    torch.manual_seed(0)
    model = Model()
    if worn is not None:
        worn.monitor.add_model(model)
    called = make(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        called(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step()
    return model, [*(t.detach().clone() for t in model.state_dict().values()), torch.random.get_rng_state()]


def compiled(backend: str):
    return lambda model: torch.compile(model, backend=backend, fullgraph=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [lambda model: model, compiled("eager"), compiled("aot_eager")],
    ids=["as it is", "compiled", "compiled ahead of time"],
)
def test_training_worn_gives_the_bits_of_training_bare(wear, make):
    torch._dynamo.reset()
    _, bare = trained(make=make)
    torch._dynamo.reset()
    worn = wear()
    _, bits = trained(worn, make)
    assert all(torch.equal(one, other) for one, other in zip(bare, bits, strict=True))
    assert 5 == len(worn.said(StepDone))
    assert not worn.monitor.context.guard.failures


def test_a_call_that_is_transformed_is_left_alone(worn):
    model, x = nn.Linear(4, 1), torch.randn(8, 4)
    worn.monitor.add_model(model)
    torch.func.vmap(torch.func.grad(lambda row: model(row[None]).sum()))(x)
    torch.func.jvp(model, (x,), (torch.ones_like(x),))
    assert not worn.monitor.context.guard.failures


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],  # noqa: S301
    ids=["deep copy", "pickle"],
)
def test_a_copy_computes_the_same_and_tells_nothing(worn, copied):
    model, _ = trained(worn)
    twin = copied(model).eval()
    beat = worn.reader.heartbeat()
    inputs = torch.randn(3, 4)
    result = twin(inputs)
    assert beat == worn.reader.heartbeat()
    assert torch.equal(result, model.eval()(inputs))


def test_a_saved_model_is_loaded_again(worn):
    model, _ = trained(worn)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    again = torch.load(saved, weights_only=False).eval()
    inputs = torch.randn(3, 4)
    assert torch.equal(again(inputs), model.eval()(inputs))


class Listing(Model):
    def __init__(self) -> None:
        super().__init__()
        self.modules = [self.body]


def test_a_model_with_a_list_called_modules_is_saved_without_hooks(wear):
    model = Listing()
    wear().monitor._calls.follow(model)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    assert not torch.load(saved, weights_only=False)._forward_hooks
    assert model._forward_hooks


def test_what_goes_wrong_with_the_hooks_is_not_the_saves_trouble(wear, capsys):
    class Broken(Model):
        def named_modules(self, *_args, **_kwargs):
            raise LookupError("not now")

    worn, model = wear(), Broken()
    worn.monitor._calls.follow(model)
    torch.save({}, io.BytesIO())
    assert ["CallProbe._remove"] == list(worn.monitor.context.guard.failures)
    assert "LookupError: not now" in capsys.readouterr().err


def test_hooks_are_out_until_the_last_of_several_saves_is_done(worn):
    model, _ = trained(worn)
    first, second = Save(), Save()
    first.go_on.set()
    first.thread.join()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    second.go_on.set()
    second.thread.join()
    assert model._forward_pre_hooks
    assert model._forward_hooks


class Save:
    """One that another thread is in the middle of."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=torch.save, args=(self, io.BytesIO()))
        self.thread.start()
        assert self.begun.wait(30)

    def __reduce__(self):
        self.begun.set()
        assert self.go_on.wait(30)
        return int, ()


def test_a_state_dict_is_byte_for_byte_that_of_a_bare_run(wear):
    def saved(worn=None) -> bytes:
        buffer = io.BytesIO()
        torch.save(trained(worn)[0].state_dict(), buffer)
        return buffer.getvalue()

    bare = saved()
    assert bare == saved(wear())


@pytest.mark.parametrize(
    "script",
    [lambda model: torch.jit.script(model), lambda model: torch.jit.trace(model, torch.ones(2, 4))],  # noqa: PLW0108
    ids=["script", "trace"],
)
def test_torchscript_takes_the_model(worn, script):
    model, _ = trained(worn)
    model.eval()
    inputs = torch.randn(3, 4)
    assert torch.equal(script(model)(inputs), model(inputs))


def test_torchscript_takes_a_copy(worn):
    model, _ = trained(worn)
    model.eval()
    inputs = torch.randn(3, 4)
    assert torch.equal(torch.jit.script(copy.deepcopy(model))(inputs), model(inputs))


def test_torchscript_finds_the_names_of_a_class(worn, tmp_path, monkeypatch):  # noqa: ARG001
    lines = [
        "import torch",
        "def helper(x: torch.Tensor) -> torch.Tensor:",
        "    return x + 1",
        "@torch.jit.script",
        "class Box:",
        "    def __init__(self, x: torch.Tensor):",
        "        self.x = helper(x)",
    ]
    (tmp_path / "scripted_box.py").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    import scripted_box  # noqa: PLC0415

    assert 2.0 == scripted_box.Box(torch.ones(())).x.item()


def test_scripting_something_else_does_not_blind(worn):
    model, _ = trained(worn)
    assert "forward" in worn.said(StepDone)[-1].body.phase_seconds

    def double(values: torch.Tensor) -> torch.Tensor:
        return 2 * values

    torch.jit.script(double)
    assert model._forward_hooks


def test_a_scripted_model_blinds_nobody(wear):
    worn = wear()
    worn.monitor.add_model(torch.jit.script(nn.Sequential(nn.Linear(4, 1))))
    trained()
    assert not worn.monitor.context.guard.failures


def test_torch_save_can_be_pickled(worn):  # noqa: ARG001
    assert pickle.loads(pickle.dumps(torch.save)) is torch.save  # noqa: S301


def test_a_model_called_in_training_and_in_evaluation_shows_both(worn):
    model, _ = trained(worn)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.eval()
    with torch.no_grad():
        model(torch.randn(2, 4))
    model.train()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    assert {"forward", "evaluation"} <= set(worn.said(StepDone)[-1].body.phase_seconds)
