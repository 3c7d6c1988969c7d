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


def _ends_at_zero(_: Draw) -> Injected:
    return Injected(
        "the rate ends at zero", base_replaced={"schedule": "lambda step: max(0.0, 1 - step / (STEPS - 1))"}
    )


def _milestones(d: Draw) -> Injected:
    at = d.rng.choice((30, 60))
    return Injected("the rate changes at milestones", base_replaced={"schedule": f"lambda step: 0.3 if step < {at} else 1.0 if step < {2 * at} else 0.1"})  # fmt: skip


def _late_group(d: Draw) -> Injected:
    name, at = d.weight(), d.rng.choice((5, 15))
    groups = f'[{{"params": [net.get_parameter("{name}")]}}, {{"params": [p for n, p in net.named_parameters() if n != "{name}" and p.requires_grad]}}]'  # fmt: skip
    return Injected(f"{name} begins to learn at step {at}", base_replaced={"parameters": groups, "schedule": f"[lambda step: float(step >= {at}), lambda step: 1.0]"})  # fmt: skip


def _compressed(d: Draw) -> Injected:
    hook = d.rng.choice(("bf16_compress_hook", "fp16_compress_hook"))
    lines = ["from torch.distributed.algorithms.ddp_comm_hooks import default_hooks", f"model.register_comm_hook(None, default_hooks.{hook})"]  # fmt: skip
    return Injected("gradients are compressed on their way", base_points={"ddp": lines})


def _own_precision(d: Draw) -> Injected:
    layer = {"mlp": "head", "gpt": "head", "vit": "head", "tied": "norm", "lora": "head"}[d.model.name]
    lines = ["def in_float32(layer, given):", "    return tuple(value.float() for value in given)", f"net.{layer}.register_forward_pre_hook(in_float32)", "plain_forward = net.LAYER.forward".replace("LAYER", layer), f'net.{layer}.forward = lambda *given: torch.autocast("cpu", enabled=False)(plain_forward)(*given)']  # fmt: skip
    return Injected(f"{layer} computes in float32 on purpose", base_points={"model": lines})


def _frozen_statistics(_: Draw) -> Injected:
    return Injected("normalisation is frozen", base_points={"model": ["net.norm.eval().requires_grad_(False)"], "step": ["net.norm.eval()"]})  # fmt: skip


def _augmented(_: Draw) -> Injected:
    lines = ["draw = torch.Generator().manual_seed(977 * step + rank)", "x = x * (0.5 + torch.rand((), generator=draw)) + 0.3 * torch.randn((), generator=draw)"]  # fmt: skip
    return Injected("inputs are augmented", base_points={"batch": lines})


def _common_class(d: Draw) -> Injected:
    share = d.rng.choice((0.4, 0.6))
    line = f"y = torch.where(torch.rand(y.shape, generator=torch.Generator().manual_seed(31 * step + rank)) < {share}, 0, y)"
    return Injected("one class is common", base_points={"batch": [line]})


def _filling_cache(d: Draw) -> Injected:
    line = f"if step < {d.rng.choice((10, 20))}:"
    return Injected("a cache fills and is full", base_points={"made": ["cache = []"], "step": [line, "    cache.append(torch.ones(1 << 19))"]})  # fmt: skip


def _late_term(d: Draw) -> Injected:
    name = "codebook" if d.model.name == "vq" else "kl"
    return Injected(f"the weight of {name} rises from zero", base_points={"terms": [f'terms["{name}"] = terms["{name}"] * min(1.0, step / 20)']})  # fmt: skip


def _own_clip(_: Draw) -> Injected:
    lines = ["norm = torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None]).norm()", "if norm > 0.5:", "    for p in net.parameters():", "        if p.grad is not None:", "            p.grad.mul_(0.5 / norm)"]  # fmt: skip
    return Injected("a clip by hand, the same on all ranks", base_points={"clipped": lines})


def _uneven_parts(_: Draw) -> Injected:
    return Injected("the number of micro-batches changes", base_replaced={"parts": "(2, 8)[step // 10 % 2]"})


def _layer_drop(_: Draw) -> Injected:
    line = "net.second.register_forward_hook(lambda _, __, out: out * float(step % 4 > 0))"
    return Injected("a layer is left out now and then", base_points={"made": ["step = 0", line]})


def _solved_groups(_: Draw) -> Injected:
    return Injected("now and then all rewards are equal", base_points={"rewards": ["if step % 15 == 14:", "    rewards = torch.ones_like(rewards)"]})  # fmt: skip


def _slow_average(_: Draw) -> Injected:
    return Injected("the average is slow", base_replaced={"ema": "kept.lerp_(live, 0.0005)"})


def _renewed_reference(_: Draw) -> Injected:
    return Injected("the reference is renewed now and then", base_points={"stepped": ["if step % 40 == 39:", "    reference.load_state_dict(net.state_dict())"]})  # fmt: skip


def _growing_penalty(_: Draw) -> Injected:
    lines = ['terms = {"task": loss, "penalty": 1e-4 * min(1.0, step / 50) * sum(p.square().sum() for p in net.parameters() if p.requires_grad)}', "loss = sum(terms.values())"]  # fmt: skip
    return Injected("a small penalty rises from zero", base_points={"loss": lines, "stepped": ['log({"loss_terms": terms})']})  # fmt: skip


def _validation(_: Draw) -> Injected:
    lines = ["if step % 20 == 19:", "    net.eval()", "    with torch.no_grad():", "        for part in range(8):", "            net(sample(700_000_000 + part)[0])", "    net.train()"]  # fmt: skip
    return Injected("the same held-out batches are evaluated again and again", base_points={"stepped": lines})


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
    Oddity("a rate that ends at zero", _ends_at_zero),
    Oddity("milestones", _milestones),
    Oddity("a group that begins late", _late_group, (BY_HAND, ONE, Need("model", ("mlp", "gpt", "vit", "rnn", "policy", "lora"), "a tied tensor has two names"))),
    Oddity("compressed gradients", _compressed, (PLAIN, Need("precision", ("fp32", "bf16"), ""))),
    Oddity("a layer in float32", _own_precision, (PLAIN, Need("precision", ("bf16",), "there must be an autocast region"), Need("model", ("mlp", "gpt", "vit", "lora"), ""))),
    Oddity("frozen statistics", _frozen_statistics, (BY_HAND, Need("has", ("batch_norm",), ""))),
    Oddity("augmented inputs", _augmented, (Need("has", ("vectors", "labels"), "inputs are numbers"),)),
    Oddity("a common class", _common_class, (Need("model", ("mlp", "vit", "rnn", "lora"), "there must be classes"),)),
    Oddity("a cache that fills", _filling_cache, (BY_HAND,)),
    Oddity("a term that begins late", _late_term, (Need("has", ("loss_terms",), ""), PLAIN)),
    Oddity("a clip by hand", _own_clip, (BY_HAND, Need("clip", (False,), "one clip is enough"))),
    Oddity("a changing number of micro-batches", _uneven_parts, (PLAIN, Need("accumulate", (2, 4), "there must be micro-batches"))),
    Oddity("layer drop", _layer_drop, (BY_HAND, Need("model", ("mlp",), "it has a layer that can be left out"))),
    Oddity("solved groups", _solved_groups, (Need("has", ("policy",), ""),)),
    Oddity("a slow average", _slow_average, (Need("ema", (True,), "there must be an average"),)),
    Oddity("a renewed reference", _renewed_reference, (BY_HAND, Need("has", ("reference",), ""))),
    Oddity("a penalty that rises", _growing_penalty, (PLAIN, ALONE)),
    Oddity("held-out batches", _validation, (BY_HAND, ALONE)),
)  # fmt: skip
APART = ({"warm restarts", "a rate of zero in the first step", "a rate that ends at zero", "milestones", "a group that begins late"}, {"dropped last batches", "short last batches"}, {"unfreezing", "freezing", "resuming", "a group that begins late", "compressed gradients"}, {"curriculum", "uneven lengths"}, {"augmented inputs", "spikes that recover", "curriculum"}, {"evaluation in the loop", "held-out batches", "frozen statistics", "weight averaging and swapping"})  # fmt: skip
"""Of each set at most one: they are about the same thing."""


def draw(seed: str, rng: random.Random) -> Case:
    """A healthy run of this seed."""
    number = rng.choice((0, 1, 1, 2, 3))
    # One oddity first, and then a setting for it: so that rare ones occur as often as common ones.
    chosen = [rng.choice(ODDITIES)] if number else []
    how = draw_setting(rng, chosen[0].needs if chosen else ())
    possible = [oddity for oddity in ODDITIES if oddity not in chosen and all(need.holds(how) for need in oddity.needs)]
    for oddity in rng.sample(possible, min(len(possible), max(0, number - 1))):
        names = {one.name for one in chosen} | {oddity.name}
        if all(len(names & group) <= 1 for group in APART):
            chosen.append(oddity)
    steps = rng.choice((100, 150, 200, 300, 400))
    made = tuple((one.name, one.make(Draw(rng, how, When("start"), (0,), steps))) for one in chosen)
    return Case(seed, how, steps, oddities=made, names=draw_names(rng, how.model))
