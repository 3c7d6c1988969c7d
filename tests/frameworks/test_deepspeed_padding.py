"""What ZeRO-3 pads a partition with is nobody's number."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from holter.frameworks.deepspeed.keeper import DeepSpeedKeeper


def parameter(numel: int, part: int) -> SimpleNamespace:
    return SimpleNamespace(ds_numel=numel, ds_tensor=SimpleNamespace(ds_numel=part), ds_process_group="the ranks")


def test_padding_is_not_looked_at(monkeypatch):
    """Of 5 and 4 elements on two ranks the second has 2 and one of padding, then 2."""
    monkeypatch.setattr(dist, "get_rank", lambda group: {"the ranks": 1}[group])
    engine = SimpleNamespace(optimizer=SimpleNamespace(fp16_groups=[[parameter(5, 3), parameter(4, 2)]]))
    keeper = DeepSpeedKeeper(engine, None, ())
    flat = torch.tensor([1.0, 2.0, 1e30, 3.0, 4.0])
    for name in ("master weights of group 0", "optimizer: 0.exp_avg"):
        assert [[1.0, 2.0], [3.0, 4.0]] == [part.tolist() for part in keeper.used(name, flat)]
    for name, tensor in (
        ("model: head.weight", flat),
        ("master weights of group 7", flat),
        ("optimizer: 0.step", flat[:1]),
    ):
        assert [tensor.tolist()] == [part.tolist() for part in keeper.used(name, tensor)]
