"""Training on the device: operations, random numbers, optimizers, scalers, autocast; all bits as on the CPU where the CPU has the same operation."""

from copy import deepcopy

import fake_cuda
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

pytestmark = pytest.mark.device

NAN = float("nan")


class Block(torch.nn.Module):
    """A little of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.attend = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        self.conv = torch.nn.Conv1d(16, 16, 3, padding=1)
        self.batch_norm = torch.nn.BatchNorm1d(16)
        self.out = torch.nn.Linear(16, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.attend(self.norm(x), self.norm(x), self.norm(x), need_weights=False)[0]
        x = x + F.gelu(self.batch_norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)
        return F.cross_entropy(self.out(x).flatten(0, 1), tokens.flatten())


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, device: str) -> list[float]:
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, 50, (4, 10), generator=torch.Generator().manual_seed(step)).to(device)
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


@pytest.mark.parametrize(
    "made",
    [
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.Adam(p, fused=True, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        lambda p: torch.optim.Adagrad(p, fused=True) if p[0].is_cpu else torch.optim.Adagrad(p),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    ],
    ids=["adamw fused", "adam fused", "sgd fused", "adagrad", "adamw foreach", "sgd single"],
)
def test_a_model_learns_as_on_the_cpu(made) -> None:
    torch.manual_seed(0)
    host = Block()
    device = deepcopy(host).cuda()
    expected = train(host, made(list(host.parameters())), 6, "cpu")
    with fake_cuda.delayed(0.0001):
        seen = train(device, made(list(device.parameters())), 6, "cuda")
    assert expected == pytest.approx(seen, rel=1e-4)
    assert expected[-1] < expected[0]


def test_a_step_makes_the_host_wait_for_nothing() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(4, 8, device="cuda")
    for _ in range(2):
        fake_cuda.syncs()
        with fake_cuda.closed():
            model(x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert [] == fake_cuda.syncs()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_fused_optimizers_leave_a_step_out_when_they_are_told_on_the_device(kind) -> None:
    weight = torch.nn.Parameter(torch.ones(100, device="cuda"))
    optimizer = kind([weight], lr=0.1, fused=True)
    for found, scale in ((0.0, 1.0), (1.0, 1.0), (0.0, 4.0)):
        before = weight.detach().clone()
        weight.grad = torch.full((100,), NAN if found else 2.0, device="cuda")
        optimizer.found_inf = torch.tensor(found, device="cuda")
        optimizer.grad_scale = torch.tensor(scale, device="cuda")
        optimizer.step()
        assert bool(found) == torch.equal(before, weight)
        assert weight.isfinite().all().item()
        if kind is torch.optim.SGD and not found:
            assert torch.allclose(before - 0.1 * 2.0 / scale, weight)
    steps = [state["step"].item() for state in optimizer.state.values() if "step" in state]
    assert steps in ([2.0], [])


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_a_grad_scaler_leaves_out_what_is_not_finite(options: dict[str, bool]) -> None:
    model = torch.nn.Linear(10, 10).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    kept = []
    for step in range(3):
        before = model.weight.detach().clone()
        with torch.autocast("cuda"):
            loss = model(torch.randn(4, 10, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        if step == 1:
            model.weight.grad[3, 3] = NAN
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        kept.append(torch.equal(before, model.weight))
    assert [False, True, False] == kept
    assert 512.0 == scaler.get_scale()


def test_a_state_is_known_at_once_and_rewinds() -> None:
    torch.cuda.manual_seed_all(3)
    host_state = torch.get_rng_state()
    with fake_cuda.closed():
        before = torch.cuda.get_rng_state()
        first = [torch.randn(5, device="cuda"), F.dropout(torch.ones(50, device="cuda"))]
        after = torch.cuda.get_rng_state()
        assert not torch.equal(before, after)
        torch.cuda.set_rng_state(before)
        second = [torch.randn(5, device="cuda"), F.dropout(torch.ones(50, device="cuda"))]
        assert torch.equal(after, torch.cuda.get_rng_state())
        third = torch.randn(5, device="cuda")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], third)
    assert torch.equal(host_state, torch.get_rng_state())


def test_each_device_has_its_generator() -> None:
    torch.cuda.manual_seed_all(5)
    states = torch.cuda.get_rng_state_all()
    torch.rand(3, device="cuda:1")
    changed = [not torch.equal(a, b) for a, b in zip(states, torch.cuda.get_rng_state_all(), strict=True)]
    assert [False, True] == changed
    torch.cuda.set_rng_state_all(states)
    generator = torch.Generator(device="cuda").manual_seed(5)
    assert torch.equal(torch.rand(3, device="cuda", generator=generator), torch.rand(3, device="cuda"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.complex64, torch.bool])
def test_dtypes_and_views_are_the_cpus(dtype: torch.dtype) -> None:
    host = torch.arange(24).reshape(4, 6).to(dtype)
    device = host.cuda()
    views = [
        lambda x: x.t(),
        lambda x: x[1:, ::2],
        lambda x: x.expand(2, 4, 6),
        lambda x: x.unfold(1, 3, 2),
        lambda x: x.view(torch.uint8) if not x.is_complex() else torch.view_as_real(x),
        lambda x: torch.cat([x, x], 1),
        lambda x: x.masked_fill(x == 3, 1),
        lambda x: x[x == 3],
        lambda x: x.index_put((torch.tensor([0, 1], device=x.device),), x[2:]),
        lambda x: x.to(torch.float32, copy=True),
    ]
    for view in views:
        assert torch.equal(view(host), view(device).cpu())


def test_numbers_promote_as_on_the_cpu() -> None:
    x = torch.ones(3, dtype=torch.int64, device="cuda")
    assert torch.float32 == (x + 1.5).dtype == (x * torch.tensor(1.5)).dtype == (x / 2).dtype
    assert torch.float16 == (x.half() * torch.tensor(2.0, dtype=torch.float64)).dtype


def test_a_wrong_call_raises_where_it_was_made() -> None:
    with pytest.raises(RuntimeError, match="size"):
        torch.ones(3, device="cuda") + torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="cuda") + torch.ones(3)


def test_channels_last_and_out_arguments() -> None:
    x = torch.randn(2, 3, 4, 4)
    device = x.cuda().to(memory_format=torch.channels_last)
    assert device.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(x, device.cpu())
    out = torch.empty(0, device="cuda")
    torch.add(device, 1, out=out)
    assert torch.equal(x + 1, out.cpu())
