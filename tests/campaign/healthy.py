"""Runs in which nothing is injected, drawn as the faults are; among them what looks odd and is no fault."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.campaign.grammar import Case, Draw, Injected, Need, When, draw_names, draw_setting

PLAIN = Need("loop", ("plain",), "it is done by hand in a loop of one's own")
BY_HAND = Need("loop", ("plain", "accelerate"), "the Trainer does this part itself")
ALONE = Need("hasnt", ("logs",), "the model is called alone")
ONE = Need("optimizer", ("sgd", "adamw", "own"), "one optimizer")


@dataclass(frozen=True)
class Oddity:
    """Something odd that is no fault."""

    name: str
    make: Callable[[Draw], Injected]
    needs: tuple[Need, ...] = ()


def _warm_restarts(d: Draw) -> Injected:
    period = d.rng.choice((20, 30, 50))
    return Injected("warm restarts", base_replaced={"schedule": f"lambda step: 0.5 + 0.5 * math.cos(math.pi * (step % {period}) / {period})"})  # fmt: skip


def _zero_warmup(d: Draw) -> Injected:
    return Injected(
        "the first rate is zero",
        base_replaced={"schedule": f"lambda step: min(1.0, step / {d.rng.choice((5, 10, 20))})"},
    )


def _curriculum(d: Draw) -> Injected:
    if "tokens" in d.model.has:
        return Injected("texts get longer", base_points={"batch": ["length = 3 + min(9, step // 10)", "x, y = x[:, :length], y[:, :length]"]})  # fmt: skip
    return Injected("inputs get harder", base_points={"batch": ["x = x * (0.5 + 0.5 * min(1.0, step / 60))"]})


def _spikes(d: Draw) -> Injected:
    every, factor = d.rng.choice((31, 37, 53)), d.rng.choice((5.0, 20.0))
    return Injected(
        "spikes that recover", base_points={"batch": [f"if step % {every} == {every - 1}:", f"    x = x * {factor}"]}
    )


def _uneven_lengths(_: Draw) -> Injected:
    return Injected("lengths differ by step and rank", base_points={"batch": ["length = 4 + (7 * step + 5 * rank) % 9", "x, y = x[:, :length], y[:, :length]"]})  # fmt: skip


def _dropped_last(_: Draw) -> Injected:
    return Injected("the last batch is dropped", base_points={"dataset": ["data = TensorDataset(*data[: len(data) - 5 * world])"]}, base_replaced={"loader": ", drop_last=True"})  # fmt: skip


def _short_last(_: Draw) -> Injected:
    return Injected(
        "the last batch is short", base_points={"dataset": ["data = TensorDataset(*data[: len(data) - 5 * world])"]}
    )


def _unfreezing(d: Draw) -> Injected:
    layer = d.model.layers[0]
    at = d.rng.choice((20, 40))
    lines = [
        f"if step == {at}:",
        f'    net.get_submodule("{layer}").requires_grad_(True)',
        "    model = DistributedDataParallel(net)",
        f'    optimizer.add_param_group({{"params": list(net.get_submodule("{layer}").parameters())}})',
    ]
    return Injected(f"{layer} is unfrozen at step {at}", base_points={"model": [f'net.get_submodule("{layer}").requires_grad_(False)'], "step": lines})  # fmt: skip


def _freezing(d: Draw) -> Injected:
    layer = d.model.layers[0]
    at = d.rng.choice((20, 40))
    lines = [f"if step == {at}:", f'    net.get_submodule("{layer}").requires_grad_(False)', f'    for p in net.get_submodule("{layer}").parameters():', "        p.grad = None", "    model = DistributedDataParallel(net)"]  # fmt: skip
    return Injected(f"{layer} is frozen at step {at}", base_points={"step": lines})


_EVALUATION = [
    "net.eval()",
    "with torch.no_grad():",
    "    for part in range(4):",
    "        net(sample(900_000 + part)[0])",
    "net.train()",
]


def _evaluation(d: Draw) -> Injected:
    every = d.rng.choice((10, 25))
    return Injected("evaluation in the loop", base_points={"stepped": [f"if step % {every} == {every - 1}:", *(f"    {line}" for line in _EVALUATION)]})  # fmt: skip


def _sampling(_: Draw) -> Injected:
    lines = ["if step % 20 == 19:", "    net.eval()", "    with torch.no_grad():", "        text = x[:2, :3]", "        for _ in range(5):", "            text = torch.cat([text, net(text)[:, -1:].argmax(-1)], dim=1)", "    net.train()"]  # fmt: skip
    return Injected("sampling in the loop", base_points={"stepped": lines})


def _gradient_noise(d: Draw) -> Injected:
    lines = ["noise = torch.Generator().manual_seed(step)", "for p in net.parameters():", "    if p.grad is not None:", f"        p.grad.add_(torch.randn(p.shape, generator=noise), alpha={d.rng.choice((1e-4, 1e-3))})"]  # fmt: skip
    return Injected("the same gradient noise on all ranks", base_points={"clipped": lines})


def _swapping(_: Draw) -> Injected:
    lines = ["if step % 25 == 24:", "    own = {name: value.clone() for name, value in net.state_dict().items()}", "    net.load_state_dict(average.state_dict())", *(f"    {line}" for line in _EVALUATION), "    net.load_state_dict(own)"]  # fmt: skip
    return Injected("the average is swapped in for evaluation", base_points={"stepped": lines})


def _resuming(d: Draw) -> Injected:
    at = d.rng.choice((30, 60))
    lines = [
        f"if step == {at}:",
        "    kept_file = io.BytesIO()",
        '    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, kept_file)',
        f"if step == {at + 12}:",
        "    kept_file.seek(0)",
        "    kept = torch.load(kept_file)",
        '    net.load_state_dict(kept["model"])',
        '    optimizer.load_state_dict(kept["optimizer"])',
    ]
    return Injected("it goes on from an earlier checkpoint", base_points={"stepped": lines})


def _jitter(_: Draw) -> Injected:
    return Injected("ranks of jittery speed", base_points={"step": ["time.sleep((step * 31 + rank * 17) % 11 / 2000)"]})


def _slow_save(_: Draw) -> Injected:
    return Injected("rank 0 saves, slowly", base_points={"stepped": ["if step % 40 == 39 and rank == 0:", "    torch.save(net.state_dict(), io.BytesIO())", "    time.sleep(0.5)"]})  # fmt: skip


def _tokens(*more: Need) -> tuple[Need, ...]:
    return (Need("has", ("tokens",), "there must be texts"), *more)


ODDITIES = (
    Oddity("warm restarts", _warm_restarts),
    Oddity("a rate of zero in the first step", _zero_warmup),
    Oddity("curriculum", _curriculum, (Need("hasnt", ("policy", "codebook"), "there must be labels"),)),
    Oddity("spikes that recover", _spikes, (Need("has", ("vectors", "labels"), "inputs are numbers"), Need("clip", (True,), "spikes are clipped"), Need("hasnt", ("policy",), "labels"))),
    Oddity("uneven lengths", _uneven_lengths, _tokens()),
    Oddity("dropped last batches", _dropped_last, (PLAIN, Need("data", ("loader",), "it is a loader's"))),
    Oddity("short last batches", _short_last, (PLAIN, Need("data", ("loader",), "it is a loader's"))),
    Oddity("unfreezing", _unfreezing, (PLAIN, ONE, Need("model", ("mlp", "vit", "rnn", "policy"), "its first layer is trained"), Need("precision", ("fp32", "bf16"), ""), Need("ema", (False,), ""))),
    Oddity("freezing", _freezing, (PLAIN, ONE, Need("model", ("mlp", "vit", "rnn", "policy"), "its first layer is trained"), Need("precision", ("fp32", "bf16"), ""), Need("ema", (False,), ""))),
    Oddity("evaluation in the loop", _evaluation, (BY_HAND, ALONE)),
    Oddity("sampling in the loop", _sampling, _tokens(BY_HAND)),
    Oddity("gradient noise", _gradient_noise, (BY_HAND, Need("precision", ("fp32", "bf16"), "a scaler would scale it"))),
    Oddity("weight averaging and swapping", _swapping, (PLAIN, ALONE, Need("ema", (True,), "there must be an average"))),
    Oddity("resuming", _resuming, (PLAIN, ONE)),
    Oddity("jitter", _jitter, (BY_HAND,)),
    Oddity("slow saves", _slow_save, (BY_HAND,)),
)  # fmt: skip
APART = ({"warm restarts", "a rate of zero in the first step"}, {"dropped last batches", "short last batches"}, {"unfreezing", "freezing", "resuming"}, {"curriculum", "uneven lengths"})  # fmt: skip
"""Of each set at most one: they are about the same thing."""


def draw(seed: str, rng: random.Random) -> Case:
    """A healthy run of this seed."""
    how = draw_setting(rng, None)
    possible = [oddity for oddity in ODDITIES if all(need.holds(how) for need in oddity.needs)]
    chosen: list[Oddity] = []
    for oddity in rng.sample(possible, min(len(possible), rng.choice((0, 1, 1, 2, 3)))):
        names = {one.name for one in chosen} | {oddity.name}
        if all(len(names & group) <= 1 for group in APART):
            chosen.append(oddity)
    steps = rng.choice((100, 150, 200, 300, 400))
    made = tuple((one.name, one.make(Draw(rng, how, When("start"), (0,), steps))) for one in chosen)
    return Case(seed, how, steps, oddities=made, names=draw_names(rng, how.model))
