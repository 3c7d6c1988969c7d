"""A loss that is not finite although the model's own modules are: the rank tells the operation and the line, in the process itself."""

from pathlib import Path

import torch
from torch import nn

from holter.diagnosis import rank_causes
from holter.faults.numerics.nonfinite_values import NonfiniteValues
from holter.faults.window import StepView
from holter.records import Nonfinite, Origin
from made_up import made_window

HERE = Path(__file__).name


def total(out: torch.Tensor) -> torch.Tensor:
    odds = out * 0
    return torch.log(odds).mean()


class WithLoss(nn.Module):
    """As models of the Hugging Face hub are: their forward pass makes the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.head(x)
        return {"loss": torch.log(out * 0).mean(), "logits": out}


def told(worn, model: nn.Module, loss_of) -> Origin:
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss = loss_of(model(torch.ones(2, 4)))
    loss.backward()
    optimizer.step()
    *_, origin = (observation.body for observation in worn.said(Origin))
    return origin


def test_a_loss_function_of_the_scripts_own_is_named_with_its_line_and_operation(worn):
    origin = told(worn, nn.Linear(4, 3), total)
    assert "log of 6 of 6 values that are zero or negative" == origin.operation
    assert ("", False, 1) == (origin.module_class, origin.is_loss_alone, origin.num_models)
    assert any(HERE in line for line in origin.lines)


def test_a_loss_made_in_the_models_own_forward_pass_is_told_from_its_modules(worn):
    origin = told(worn, WithLoss(), lambda given: given["loss"])
    assert origin.is_loss_alone
    assert "log of 6 of 6 values that are zero or negative" == origin.operation
    assert 'return {"loss": torch.log(out * 0).mean(), "logits": out}' == origin.lines[0].partition(": ")[2]


def test_a_module_that_makes_it_is_named_as_before(worn):
    class Bad(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sqrt(x * 0 - 1)

    origin = told(worn, nn.Sequential(nn.Linear(4, 3), Bad(), nn.Linear(3, 3)), lambda out: out.mean())
    assert ("1", False) == (origin.module, origin.is_loss_alone), origin


def test_the_diagnosis_names_the_line_first(worn):
    origin = told(worn, nn.Linear(4, 3), total)
    entry = Nonfinite(where="loss", name="loss", nans=1, infs=0, numel=1)
    view = StepView(step=7, first_seen_ns=0, num_reported=2, missing=(), nonfinite=((1, entry),))
    (finding,) = NonfiniteValues().judge(made_window(now_ns=10**10, steps=(view,), origins={(1, 7): origin}))
    (cause, *_) = rank_causes(finding)
    assert ("nonfinite_loss_function", (), (1,)) == (cause.cause, cause.modules, cause.ranks)
    assert "script_line" == cause.evidence[0].kind
    assert "made outside the model's modules" in finding.summary
