"""Steps that a loss scaler skips."""

import pytest
import torch
from torch import nn

from holter.records import Origin, Skipped, StepDone


def train(worn, num_steps: int, bad=lambda _: False, *, init_scale: float = 65536.0, fused: bool = False) -> None:
    model = nn.Linear(4, 4)
    worn.monitor.add_model(model)
    worn.model = model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    for step in range(num_steps):
        optimizer.zero_grad()
        inputs = torch.full((2, 4), torch.inf if bad(step) else 1.0)
        scaler.scale(model(inputs).pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()


def said(worn) -> list[Skipped]:
    return [observation.body for observation in worn.said(Skipped)]


@pytest.mark.parametrize("fused", [False, True])
def test_a_series_is_said_at_a_few_of_its_steps(worn, fused):
    train(worn, 21, lambda _: True, fused=fused)
    told = said(worn)
    assert [1, 2, 4, 8, 12, 16, 20] == [skipped.in_a_row for skipped in told]
    assert {65536.0} == {skipped.first_scale for skipped in told}
    assert 65536.0 / 2**19 == told[-1].scale == told[-1].lowest_scale
    assert 0 == told[-1].num_taken


def test_what_was_not_finite_comes_with_it(worn):
    train(worn, 1, lambda _: True)
    (skipped,) = said(worn)
    assert {"loss", "gradient"} == {entry.where for entry in skipped.nonfinite}
    assert not skipped.loss < float("inf")


def test_the_end_of_a_series_is_said(worn):
    train(worn, 8, lambda step: step in (2, 3))
    assert [(1, 2), (2, 2), (0, 3)] == [(skipped.in_a_row, skipped.num_taken) for skipped in said(worn)]
    assert [2, 2] == [observation.step for observation in worn.said(Skipped)][:2]


def test_a_scaler_that_skips_nothing_says_nothing(worn):
    train(worn, 8)
    assert [] == said(worn)
    assert {65536.0} == {observation.body.numbers["loss_scale"] for observation in worn.said(StepDone)}


def test_a_scaler_that_is_off_says_nothing(worn):
    model = nn.Linear(4, 4)
    worn.monitor.add_model(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(3):
        scaler.scale(model(torch.ones(2, 4)).pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [] == said(worn)
    assert 3 == len(worn.said(StepDone))


def test_a_module_that_overflows_behind_a_scaler_is_looked_for_once(worn):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].weight.data.fill_(1e6)
    worn.monitor.add_model(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu")
    for _ in range(12):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(torch.ones(2, 4))
        scaler.scale(out.float().pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    (origin,) = [observation.body for observation in worn.said(Origin)]
    assert ("1", True, "float16") == (origin.module, origin.is_input_finite, origin.dtype)
