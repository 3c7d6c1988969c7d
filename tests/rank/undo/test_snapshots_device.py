"""A snapshot is put back on a device behind all that is queued there, which would move it again."""

import fake_cuda
import pytest
import torch
from tests.rank.conftest import Worn
from torch import nn

pytestmark = pytest.mark.device

EVERY = 2
LATE_S = 0.05


def test_what_is_queued_does_not_move_what_was_restored() -> None:
    torch.manual_seed(0)
    worn = Worn(snapshot_every=EVERY)
    model = nn.Linear(8, 4).cuda()
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 8, device="cuda")).square().mean().backward()
        optimizer.step()

    for _ in range(EVERY):
        step()
    expected = [parameter.detach().cpu() for parameter in model.parameters()]
    step()
    fake_cuda.drain()
    with fake_cuda.delayed(LATE_S), torch.no_grad():
        for _ in range(4):
            for parameter in model.parameters():
                parameter.add_(1.0)
        assert EVERY == worn.monitor.context.undo.snapshots.restore(EVERY).step
    fake_cuda.drain()
    assert all(torch.equal(one, parameter.cpu()) for one, parameter in zip(expected, model.parameters(), strict=True))
