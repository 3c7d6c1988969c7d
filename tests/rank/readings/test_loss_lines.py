"""Which line of a script made a loss that is not finite, and which operation."""

import math
import types
from pathlib import Path

import pytest
import torch

from holter.rank.readings import loss_lines


def loaded(tmp_path: Path, source: str) -> types.ModuleType:
    """A script of these lines."""
    path = tmp_path / "train.py"
    path.write_text(source)
    module = types.ModuleType("train")
    exec(compile(source, str(path), "exec"), module.__dict__)  # noqa: S102
    return module


def test_the_graph_tells_the_operation() -> None:
    x = torch.ones(4, requires_grad=True)
    ignored = torch.nn.functional.cross_entropy(x[None], torch.tensor([-100]))
    cases = {
        torch.log(x * 0).mean(): "log of 4 of 4 values that are zero or negative",
        (x / torch.zeros(4)).sum(): "division by 4 of 4 values that are zero",
        x[x > 9].mean(): "mean of nothing: it was given no values",
        ignored: "cross entropy in which every label is ignored",
        torch.sqrt(x - 10).sum(): "sqrt with 4 of 4 values that are not finite, in its result",
        torch.nn.functional.mse_loss(x, torch.full((4,), math.nan)): "mse_loss against 4 of 4 values that are not finite, in its target",
    }  # fmt: skip
    for loss, said in cases.items():
        assert not math.isfinite(loss.item())
        assert said == loss_lines._culprit(loss.grad_fn)[1]
    assert ("", "", False) == loss_lines._culprit(torch.log(x + 1).mean().grad_fn)


class Fused(torch.autograd.Function):
    """Whose graph shows nothing of what it does."""

    @staticmethod
    def forward(_, x):
        return x.sum()

    @staticmethod
    def backward(_, gradient):
        return gradient.expand(4)


def test_an_average_over_nothing_is_told_from_what_cannot_be_read() -> None:
    x, labels = torch.ones(4, requires_grad=True), torch.tensor([-100])
    nll = torch.nn.functional.cross_entropy
    of_nothing = [
        x[x > 9].mean(),
        nll(x[None], labels) / 3,
        nll(x[None], labels, label_smoothing=0.1),
        torch.nn.functional.mse_loss(x[x > 9], torch.ones(0)),
    ]
    assert [True] * 4 == [loss_lines._culprit(loss.grad_fn)[2] for loss in of_nothing]
    assert all(math.isnan(loss.item()) for loss in of_nothing)
    assert loss_lines._culprit((x.sum() + 0 * torch.log(torch.zeros(()))).grad_fn)[2] is False
    assert loss_lines._culprit(Fused.apply(x).grad_fn)[2] is None


def test_a_line_that_adds_what_carries_no_gradient_comes_before_the_one_that_began_the_loss(tmp_path: Path) -> None:
    source = """
def main():
    loss = total(model(x), y)
    loss = loss + 0.0 * torch.log(torch.zeros(()))
    loss += 3
    loss = loss / 4
    loss.backward()
"""
    module = loaded(tmp_path, source)
    scope = loss_lines._scope(module.main.__code__)
    assert scope is not None
    for word, first in (("", "loss = loss + 0.0 * torch.log(torch.zeros(()))"), ("mean", "loss = total(model(x), y)")):
        made = loss_lines._of_backward(scope, 7)
        lines = list(loss_lines._made(module.main.__code__, scope, made, 7, word, {}, 0))
        assert first == lines[0].partition(": ")[2]


BACKWARDS = ("loss.backward()", "accelerator.backward(loss)", "scaler.scale(loss).backward()", "fabric.backward(loss)")


@pytest.mark.parametrize("call", BACKWARDS)
def test_the_line_that_gave_the_loss_its_value_is_named_not_one_that_divides_it(tmp_path: Path, call: str) -> None:
    source = f"""
def total(out):
    kept = out[out > 1e9]
    return kept.mean()

def main():
    out = model(x)
    loss = total(out)
    loss = loss / 4
    {call}
"""
    module = loaded(tmp_path, source)
    scope = loss_lines._scope(module.main.__code__)
    assert scope is not None
    made = loss_lines._of_backward(scope, 10)
    lines = list(loss_lines._made(module.main.__code__, scope, made, 10, "mean", vars(module), 0))
    codes = [text.partition(": ")[2] for text in lines]
    assert ("return kept.mean()", "loss = total(out)") == (codes[0], codes[-1])


def test_a_function_that_returns_the_loss_is_read_where_it_called_the_model(tmp_path: Path) -> None:
    source = """
def compute_loss(model, inputs, both=False):
    out = model(inputs)
    loss = out.log().mean()
    return (loss, out) if both else loss
"""
    module = loaded(tmp_path, source)
    lines = list(loss_lines._lines(None, (module.compute_loss.__code__, 3), "log"))
    assert [f"{tmp_path}/train.py:4 in compute_loss: loss = out.log().mean()"] == lines
