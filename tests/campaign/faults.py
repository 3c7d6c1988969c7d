"""What: every kind of fault, as lines of a script. Silent ones here, hangs and deaths below them; what cannot be injected says why."""

from collections.abc import Callable

from tests.campaign.grammar import Draw, Injected, Kind, Need

PLAIN = Need("loop", ("plain",), "it is done by hand in a loop of one's own")
BY_HAND = Need("loop", ("plain", "accelerate"), "the Trainer does this part itself")
CONSTANT_RATE = Need("schedule", ("none",), "a schedule would set the rate again at the next step")
NO_CLIP = Need("clip", (False,), "clipping would take it away")
NO_SCALER = Need("precision", ("fp32", "bf16"), "a loss scaler would skip the step")
LOADER = Need("data", ("loader",), "it is a fault of a loader")
TWO = Need("ranks", (2,), "one pair of ranks shows it; more only take longer")


def _get(name: str) -> str:
    return f'net.get_parameter("{name}")'


def _differ(*names: str) -> list[str]:
    return [f'effect(not same_on_all_ranks({_get(names[0])}), "replicas of {names[0]} differ")']


def _last(*lines: str) -> list[str]:
    return ["if step == STEPS - 1:", *(f"    {line}" for line in lines)]


def _under(model_names: tuple[str, ...], prefixes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in model_names if name.startswith(prefixes))


# Ranks that should be equal are not.


def other_weights(d: Draw) -> Injected:
    names, scale = d.tensors_or_all(), d.rng.choice((1e-4, 1e-2, 1.0))
    lines = d.guard(
        f"holter.testing.perturb({d.group(names)}, scale={scale}, seed={d.rng.randrange(99)})", step=False, ranks=True
    )
    return Injected(f"rank {d.culprits[0]} begins with other weights", {"wrapped": lines}, effect=_differ(*names), tensors=names, magnitude=f"{scale:g} of the weights' size")  # fmt: skip


def raw_module(d: Draw) -> Injected:
    return Injected(
        "the raw module is called instead of its wrapper",
        replaced={"model": d.expression("net", "model")},
        effect=_differ(*d.model.weights),
        tensors=d.model.trained,
    )


def no_sync(d: Draw) -> Injected:
    return Injected(
        "the stepping micro-batch is not reduced",
        {"batch": d.guard("model.require_backward_grad_sync = False")},
        base_points={"batch": ["model.require_backward_grad_sync = True"]} if d.setting.accumulate == 1 else {},
        effect=_differ(*d.model.weights),
        tensors=d.model.trained,
    )


def unfrozen_after_wrapping(d: Draw) -> Injected:
    layer = d.rng.choice([name.rpartition(".")[0] for name in d.model.weights])
    names = _under(d.model.trained, (f"{layer}.",))
    return Injected(
        f"{layer} is frozen when the wrapper is made, and trained",
        {"model": [f'net.get_submodule("{layer}").requires_grad_(False)'], "ddp": [f'net.get_submodule("{layer}").requires_grad_(True)']},
        effect=_differ(*names),
        tensors=names,
    )  # fmt: skip


def penalty_after_reduction(d: Draw) -> Injected:
    name = d.weight()
    line = f"(loss.detach() * {_get(name)}.square().mean()).backward()"
    return Injected(
        "a penalty with each rank's own weight is added after the reduction",
        {"reduced": d.guard(line)},
        effect=_differ(name),
        tensors=(name,),
    )


def scaled_on_one_rank(d: Draw) -> Injected:
    names, factor = d.tensors_or_all(), d.rng.choice((0.1, 0.5, 0.9, 2.0))
    lines = d.guard(f"holter.testing.scale_gradients({d.group(names)}, {factor})", ranks=True)
    return Injected("one rank scales its reduced gradients", {"clipped": lines}, effect=_differ(*names), tensors=names, ranks="culprits", magnitude=f"x {factor}")  # fmt: skip


def clipped_on_one_rank(d: Draw) -> Injected:
    limit = d.rng.choice((0.01, 0.05))
    lines = d.guard(f"torch.nn.utils.clip_grad_norm_(net.parameters(), {limit})", ranks=True)
    return Injected("one rank clips, the others do not", {"clipped": lines}, effect=_differ(*d.model.weights), tensors=d.model.trained, ranks="culprits", magnitude=f"norm {limit}")  # fmt: skip


def other_rate(d: Draw) -> Injected:
    factor = d.rng.choice((0.1, 0.5, 2.0, 10.0))
    lines = ["for group in optimizer.param_groups:", f'    group["lr"] *= {factor}']
    effect = _differ(*d.model.weights)
    return Injected("one rank has another learning rate", d.install(*lines, ranks=True), effect=effect, ranks="culprits", magnitude=f"x {factor}")  # fmt: skip


def lost_moments(d: Draw) -> Injected:
    lines = d.guard("for state in optimizer.state.values():", "    for value in state.values():", "        if torch.is_tensor(value) and value.dim():", "            value.zero_()", ranks=True)  # fmt: skip
    return Injected(
        "one rank's optimizer loses its moments", {"step": lines}, effect=_differ(*d.model.weights), ranks="culprits"
    )


def lost_payload(d: Draw) -> Injected:
    names = d.tensors_or_all()
    how = d.rng.choice(("lost", "garbled"))
    line = (
        f"holter.testing.scale_gradients({d.group(names)}, 0.0)"
        if how == "lost"
        else f"holter.testing.perturb([p.grad for p in {d.group(names)}], scale=0.5)"
    )
    return Injected(f"a reduction's result is {how} on one rank", {"reduced": d.guard(line, ranks=True)}, effect=_differ(*names), ranks="culprits", magnitude=how)  # fmt: skip


def flipped_bit(d: Draw) -> Injected:
    name, bit = d.weight(), d.rng.choice((12, 16, 20, 22, 24))
    line = f"holter.testing.flip_bit({_get(name)}.data, index={d.rng.randrange(12)}, bit={bit})"
    return Injected(f"bit {bit} of a weight flips on one rank", {"step": d.guard(line, ranks=True)}, effect=_differ(name), tensors=(name,), ranks="culprits", magnitude=f"bit {bit}")  # fmt: skip


def local_statistics(_: Draw) -> Injected:
    return Injected(
        "batch statistics are each rank's own",
        replaced={"ddp": "broadcast_buffers=False"},
        effect=['effect(not same_on_all_ranks(net.norm.running_mean), "running means differ")'],
        tensors=("norm.running_mean", "norm.running_var"),
    )


def other_table(d: Draw) -> Injected:
    return Injected(
        "one rank's table of frequencies is another",
        d.install(f"holter.testing.perturb(net.inv_freq, scale={d.rng.choice((0.001, 0.1))})", ranks=True),
        base_replaced={"ddp": "broadcast_buffers=False"},
        effect=['effect(not same_on_all_ranks(net.inv_freq), "tables differ")'],
        tensors=("inv_freq",),
    )


def drift(d: Draw) -> Injected:
    line = "holter.testing.perturb([p.grad for p in net.parameters() if p.grad is not None], scale=1e-7, seed=step)"
    return Injected("a reduction whose order is not fixed: gradients differ by rounding", {"reduced": d.guard(line, ranks=True)}, effect=_differ(*d.model.weights), tensors=d.model.trained)  # fmt: skip


def swapped_order(d: Draw) -> Injected:
    order = '{name: net._modules[name] for name in ("encoder", "norm", "second", "first", "act1", "act2", "dropout", "head")}'
    return Injected(
        "one rank registers two layers of one shape the other way round",
        {"model": d.guard(f"net._modules = {order}", step=False, ranks=True)},
        effect=['effect(not same_on_all_ranks(net.first.weight), "first is reduced into second")'],
        tensors=_under(d.model.trained, ("first.", "second.")),
        ranks="culprits",
    )


def counted_twice(d: Draw) -> Injected:
    names, factor = d.tensors_or_all(), d.rng.choice((4, 8, 64))
    also = {"exploding_gradients": "the norm leaves its history by this factor"}
    if len(names) == 1:
        also["imbalanced_gradients"] = "one module's norm leaves its peers'"
    line = f"holter.testing.scale_gradients({d.group(names)}, {factor}.0)"
    return Injected("gradients are summed where they should be averaged", {"reduced": d.guard(line)}, effect=[f'effect({factor} > 1, "the factor is {factor}")'], tensors=names, magnitude=f"x {factor}", also=also)  # fmt: skip


# Frozen components.


def _frozen_layer(d: Draw) -> tuple[str, tuple[str, ...]]:
    layer = d.rng.choice(("encoder", "first.layer", "second.layer"))
    return layer, _under(d.model.frozen, (f"{layer}.",))


def _frozen_differ(layer: str) -> list[str]:
    return [f'effect(not same_on_all_ranks({_get(layer + ".weight")}), "{layer} differs between ranks")']


def left_empty(d: Draw) -> Injected:
    layer, names = _frozen_layer(d)
    value = d.rng.choice(("0.0", "1e-40"))
    lines = d.guard(
        f'for p in net.get_submodule("{layer}").parameters():', f"    p.data.fill_({value})", step=False, ranks=True
    )
    return Injected(f"{layer} holds what to_empty left on one rank", {"wrapped": lines}, effect=_frozen_differ(layer), tensors=names, ranks="culprits", magnitude=value)  # fmt: skip


def other_frozen(d: Draw) -> Injected:
    layer, names = _frozen_layer(d)
    scale = d.rng.choice((1e-3, 0.1))
    lines = d.guard(
        f'holter.testing.perturb(net.get_submodule("{layer}").parameters(), scale={scale})', step=False, ranks=True
    )
    return Injected(f"frozen {layer} is another on one rank", {"wrapped": lines}, effect=_frozen_differ(layer), tensors=names, ranks="culprits", magnitude=f"{scale:g}")  # fmt: skip


def edited_frozen(d: Draw) -> Injected:
    name = d.rng.choice(_frozen_layer(d)[1])
    lines = d.guard(f"holter.testing.perturb({_get(name)}, scale={d.rng.choice((1e-4, 0.01))}, seed=3)")
    points = {"wrapped": [f"frozen_before = {_get(name)}.detach().clone()"], "step": lines}
    return Injected(f"frozen {name} is edited on all ranks", points, effect=[f'effect(not torch.equal(frozen_before, {_get(name)}), "{name} moved")'], tensors=(name,))  # fmt: skip


def other_frozen_set(d: Draw) -> Injected:
    line = f'net.get_submodule("first" if {d.rank_is_culprit} else "second").requires_grad_(False)'
    return Injected("ranks freeze different layers of one shape", {"model": [line]}, effect=['effect(not same_on_all_ranks(net.first.weight), "first differs between ranks")'], tensors=_under(d.model.trained, ("first.", "second.")), ranks="culprits")  # fmt: skip


def trained_though_frozen(_: Draw) -> Injected:
    return Injected(
        "the encoder is declared frozen, and trained",
        {"model": ["net.encoder.requires_grad_(True)"], "wrapped": ["encoder_before = net.encoder.weight.detach().clone()"]},
        effect=['effect(not torch.equal(encoder_before, net.encoder.weight), "the encoder moved")'],
        tensors=("encoder.weight", "encoder.bias"),
        env={"HOLTER_FROZEN": "encoder.*"},
    )  # fmt: skip


def lost_table(d: Draw) -> Injected:
    value = d.rng.choice(("0.0", "1.0"))
    return Injected("the table of frequencies was lost in loading", {"model": [f"net.inv_freq.fill_({value})"]}, effect=['effect(bool((net.inv_freq == net.inv_freq[0]).all()), "the table is constant")'], tensors=("inv_freq",), magnitude=value)  # fmt: skip


# Nothing, or the wrong thing, is learning.


def _keep(name: str) -> str:
    return f"held = {_get(name)}.detach().clone()"


def _still(name: str) -> list[str]:
    return [f'effect(torch.equal(held, {_get(name)}), "{name} did not change")']


def stale_optimizer(d: Draw) -> Injected:
    is_whole = d.rng.random() < 0.5
    name = d.weight()
    parameters = (
        "copy.deepcopy(net).parameters()"
        if is_whole
        else f'[p if n != "{name}" else nn.Parameter(p.detach().clone()) for n, p in net.named_parameters()]'
    )
    names = d.model.trained if is_whole else (name,)
    return Injected("the optimizer holds tensors that are no longer the model's", {"wrapped": [_keep(name)]}, {"parameters": parameters}, _still(name), tensors=names)  # fmt: skip


def frozen_in_optimizer(d: Draw) -> Injected:
    name = d.model.weights[-1]
    return Injected("the optimizer holds frozen parameters only", {"wrapped": [_keep(name)]}, {"parameters": "[p for p in net.parameters() if not p.requires_grad]"}, _still(name))  # fmt: skip


def detached(d: Draw) -> Injected:
    layer, prefixes = d.rng.choice(d.model.cuts)
    names = _under(d.model.trained, prefixes)
    points = d.install(f'holter.testing.detach_output(net.get_submodule("{layer}"))')
    points["clipped"] = _last(f'effect({_get(names[0])}.grad is None or not {_get(names[0])}.grad.any(), "{names[0]} gets no gradient")')  # fmt: skip
    return Injected(f"the output of {layer} is detached", points, base_replaced={"ddp": "find_unused_parameters=True"}, tensors=names)  # fmt: skip


def never_cleared(d: Draw) -> Injected:
    sound = "" if d.when.kind == "start" else f"if step < {d.begin}:\n    ZERO_GRAD"
    points = {"cleared": _last(f'effect(bool({_get(d.model.weights[-1])}.grad.any()), "gradients are there before the step\'s first pass")')}  # fmt: skip
    return Injected("gradients are not cleared", points, {"zero_grad": sound or "pass"})


def lost_updates(d: Draw) -> Injected:
    name = d.weight()
    lines = (_keep(name), f"holter.testing.lose_updates(optimizer, {_get(name)})")
    return Injected(f"updates of {name} are lost", d.install(*lines), effect=_still(name), tensors=(name,))


def group_without_rate(d: Draw) -> Injected:
    name = d.weight()
    groups = f'[{{"params": [{_get(name)}], "lr": 0.0, "weight_decay": 0.0}}, {{"params": [p for n, p in net.named_parameters() if n != "{name}" and p.requires_grad]}}]'  # fmt: skip
    return Injected(f"the parameter group of {name} has rate zero", {"wrapped": [_keep(name)]}, {"parameters": groups}, _still(name), tensors=(name,))  # fmt: skip


def stuck_schedule(d: Draw) -> Injected:
    name = d.weight()
    lines = (_keep(name), "for group in optimizer.param_groups:", '    group["lr"] = 0.0')
    return Injected("the learning rate stays at zero", d.install(*lines), effect=_still(name))


def narrow_weights(d: Draw) -> Injected:
    name = d.weight()
    points = {"model": ["net.to(torch.bfloat16)"], "clipped": _last(_keep(name)), "stepped": _last(f'effect(float((held != {_get(name)}).float().mean()) < 0.2, "few elements of {name} change in a step")')}  # fmt: skip
    return Injected("weights in bfloat16, rate 1e-6", points, base_replaced={"rate": "1e-6"}, magnitude="rate 1e-6")


def always_inf(d: Draw) -> Injected:
    name = d.weight()
    return Injected("a gradient overflows in every step", d.install(f'{_get(name)}.register_hook(lambda g: g * float("inf"))'), effect=['effect(scaler.get_scale() < 1e-3, "the scale has collapsed")'])  # fmt: skip


def summed_micro_batches(d: Draw) -> Injected:
    del d
    return Injected("micro-batches are summed, and their number changes", replaced={"divide": ""}, base_replaced={"parts": "(2, 8)[step // 10 % 2]"}, effect=['effect(True, "the loss is not divided")'])  # fmt: skip


def dead_layer(d: Draw) -> Injected:
    layer, act = {"mlp": ("first", "act1"), "tied": ("body", "act")}[d.model.name]
    points = d.install(f"net.{layer}.bias.data.fill_(-1e4)")
    points["wrapped"] = [*points.get("wrapped", []), "alive = []", f"net.{act}.register_forward_hook(lambda _, __, out: alive.append(bool(out.any())))"]  # fmt: skip
    return Injected(f"{layer} is pushed below zero for all inputs", points, effect=['effect(not alive[-1], "the layer gives only zeros")'], tensors=_under(d.model.trained, (f"{layer}.",)), modules=(layer, act))  # fmt: skip


def still_average(d: Draw) -> Injected:
    how = d.rng.choice(("never", "away", "rounded"))
    update = {
        "never": "pass",
        "away": "kept.lerp_(live, -0.05)",
        "rounded": "kept.copy_(kept.bfloat16().lerp(live.bfloat16(), 0.0005))",
    }[how]
    if d.when.kind == "from":
        update = f"kept.lerp_(live, 0.05) if step < {d.begin} else {update if how != 'never' else 'None'}"
    check = {"never": "<", "away": ">", "rounded": "<"}[how]
    name = d.weight()
    points = {"wrapped": [f"begun = {_get(name)}.detach().clone()"]}
    moved, live = f'(average.get_parameter("{name}") - begun).norm()', f"({_get(name)} - begun).norm()"
    return Injected(f"the average: {how}", points, {"ema": update}, [f'effect(bool({moved} {check} {live}), "the average does not follow")'], magnitude=how)  # fmt: skip


def flat_loss(d: Draw) -> Injected:
    line = d.rng.choice(("loss = loss.clamp(min=100.0)", "loss = loss * 0.0"))
    points = {"loss": d.guard(line), "clipped": _last(f'effect(not {_get(d.model.weights[-1])}.grad.any(), "gradients are exactly zero")')}  # fmt: skip
    return Injected("the loss is flat", points, magnitude=line)


def evaluation_mode(d: Draw) -> Injected:
    on_one = d.rng.random() < 0.5
    points = d.install("net.eval()", ranks=on_one)
    effect = ['effect(not net.training, "the model is in evaluation mode")']
    return Injected("the model is trained in evaluation mode" + (" on one rank" if on_one else ""), points, effect=[f"if {d.rank_is_culprit}:", f"    {effect[0]}"] if on_one else effect, ranks="culprits" if on_one else "none", modules=("norm", "dropout", ""))  # fmt: skip


# Precision.


def other_dtype(d: Draw) -> Injected:
    line = f"net.inv_freq = net.inv_freq.to(torch.{d.rng.choice(('bfloat16', 'float64'))})"
    effect = f'effect(net.inv_freq.dtype != torch.float32, "the dtype changed")'  # noqa: F541
    return Injected("one rank's table has another dtype", {"wrapped": d.guard(line, step=False, ranks=True)}, base_replaced={"ddp": "broadcast_buffers=False"}, effect=[f"if {d.rank_is_culprit}:", f"    {effect}"], tensors=("inv_freq",), ranks="culprits")  # fmt: skip


def changed_dtype(d: Draw) -> Injected:
    dtype = d.rng.choice(("bfloat16", "float64"))
    also = {"buffer_precision_loss": "the table is too narrow from here on"} if dtype == "bfloat16" else {}
    return Injected(f"a table becomes {dtype} in mid-run", d.install(f"net.inv_freq = net.inv_freq.to(torch.{dtype})"), base_replaced={"ddp": "broadcast_buffers=False"}, effect=['effect(net.inv_freq.dtype != torch.float32, "the dtype changed")'], tensors=("inv_freq",), also=also)  # fmt: skip


def rounded_weights(d: Draw) -> Injected:
    names, dtype, on_one = d.tensors_or_all(), d.rng.choice(("bfloat16", "float16")), d.rng.random() < 0.3
    line = f"holter.testing.round_trip({d.group(names)}, torch.{dtype})"
    points = {"stepped": d.guard(line, ranks=on_one)}
    check = (
        f'effect(torch.equal({_get(names[0])}, {_get(names[0])}.to(torch.{dtype}).float()), "{names[0]} is rounded")'
    )
    effect = _differ(*names) if on_one else [check]
    return Injected(f"weights pass through {dtype}", points, effect=effect, tensors=names, ranks="culprits" if on_one else "none", magnitude=dtype)  # fmt: skip


def no_scaler(d: Draw) -> Injected:
    name = d.model.weights[0]
    points = {"clipped": _last(f'effect(float(({_get(name)}.grad.abs() < 1e-7).float().mean()) > 0.5, "most of {name}\'s gradient is lost")')}  # fmt: skip
    return Injected("fp16 without a loss scaler", points, {"scaler": "enabled=False"}, base_points={"loss": ["loss = loss * 1e-6"]}, magnitude="loss x 1e-6")  # fmt: skip


def overflow(d: Draw) -> Injected:
    layer = d.rng.choice({"mlp": ("first", "second", "head"), "vit": ("block.up", "block.down", "head"), "gpt": ("blocks.0.up", "blocks.1.down", "head"), "policy": ("head",)}[d.model.name])  # fmt: skip
    factor = d.rng.choice((1e5, 1e6))
    points = d.install(f"{_get(layer + '.weight')}.data.mul_({factor:g})")
    points["loss"] = [f"if step == {d.begin}:", '    effect(not bool(torch.isfinite(loss)), "the loss is not finite")']
    return Injected(f"{layer} passes float16's range", points, modules=(layer,), tensors=(f"{layer}.weight",), ranks="all", magnitude=f"x {factor:g}")  # fmt: skip


def narrow_table(_: Draw) -> Injected:
    return Injected("frequencies are held in bfloat16", {"model": ["net.inv_freq = net.inv_freq.bfloat16()"]}, effect=['effect(net.inv_freq.dtype == torch.bfloat16, "the table is bfloat16")'], tensors=("inv_freq",))  # fmt: skip


def outside_autocast(d: Draw) -> Injected:
    layer = d.rng.choice([name.removesuffix(".weight") for name in d.model.weights if "embedding" not in name])
    lines = (f'holter.testing.leave_autocast(net.get_submodule("{layer}"))',)
    points = d.install(*lines, ranks=True)
    points["wrapped"] = [*points.get("wrapped", []), "seen = set()", f'net.get_submodule("{layer}").register_forward_hook(lambda _, __, out: seen.add(out.dtype))']  # fmt: skip
    effect = [f"if {d.rank_is_culprit}:", '    effect(torch.float32 in seen, "the layer gives float32")']
    # What has no dtype of its own gives on what it gets.
    after = {"first": ("act1",), "second": ("act2", "dropout")}.get(layer, ())
    return Injected(f"{layer} leaves autocast on one rank", points, effect=effect, modules=(layer, *after), tensors=_under(d.model.trained, (f"{layer}.",)))  # fmt: skip


# Numbers that are not numbers, and losses.


def nonfinite_batch(d: Draw) -> Injected:
    value = d.rng.choice(("nan", "inf"))
    lines = d.guard("x = x.clone()", f'x.view(-1)[{d.rng.randrange(16)}] = float("{value}")', 'effect(not x.isfinite().all(), "the batch is not finite")', ranks=True)  # fmt: skip
    return Injected(f"a batch holds {value}", {"batch": lines}, ranks="culprits", magnitude=value)


def nonfinite_layer(d: Draw) -> Injected:
    layer = d.rng.choice(d.model.layers)
    points = {"step": d.guard(f'holter.testing.spoil_output(net.get_submodule("{layer}"))', ranks=True)}
    effect = [
        f"if {d.rank_is_culprit}:",
        '    effect(not all(math.isfinite(value) for value in losses), "a loss is not finite")',
    ]
    return Injected(f"{layer} makes a NaN", points, effect=effect, modules=(layer,), tensors=_under(d.model.trained, (f"{layer}.",)), ranks="culprits")  # fmt: skip


def nonfinite_gradient(d: Draw) -> Injected:
    layer, value = d.rng.choice(d.model.layers), d.rng.choice(("nan", "inf"))
    names = _under(d.model.trained, (f"{layer}.",))
    points = {
        "step": d.guard(f'holter.testing.spoil_gradient(net.get_submodule("{layer}"), float("{value}"))', ranks=True)
    }
    points["reduced"] = d.guard(f'effect(not all(p.grad.isfinite().all() for p in {d.group(names)}), "a gradient is not finite")')  # fmt: skip
    return Injected(f"the gradient into {layer} is {value}", points, modules=(layer,), tensors=names, ranks="culprits")


def nonfinite_loss(d: Draw) -> Injected:
    on_one = d.rng.random() < 0.5
    line = d.rng.choice(
        ("loss = loss + 0.0 * torch.log(torch.zeros(()))", "loss = loss * (torch.zeros(()) / torch.zeros(()))")
    )
    lines = d.guard(line, 'effect(not bool(torch.isfinite(loss)), "the loss is not finite")', ranks=on_one)
    return Injected("the script's own loss makes a NaN", {"loss": lines}, ranks="culprits" if on_one else "all")


def growing_gradients(d: Draw) -> Injected:
    base = d.rng.choice((1.3, 1.6, 2.0))
    line = f"holter.testing.scale_gradients(net.parameters(), {base} ** min(step - {d.begin}, 30))"
    return Injected("gradients grow from step to step", {"reduced": d.guard(line)}, effect=[f'effect({base} > 1, "by {base} a step")'], magnitude=f"x {base} a step")  # fmt: skip


def tiny_gradients(d: Draw) -> Injected:
    name = d.weight()
    return Injected(f"the gradient of {name} vanishes", {**d.install(f"{_get(name)}.register_hook(lambda g: g * 1e-12)"), "clipped": _last(f'effect(float({_get(name)}.grad.norm()) < 1e-9, "the norm is tiny")')}, tensors=(name,), modules=(name.rpartition(".")[0],))  # fmt: skip


def one_large_gradient(d: Draw) -> Injected:
    name, factor = d.weight(), d.rng.choice((1000, 10_000))
    return Injected(f"the gradient of {name} is {factor} times its own", d.install(f"{_get(name)}.register_hook(lambda g: g * {factor}.0)"), effect=['effect(True, "a hook multiplies it")'], tensors=(name,), modules=(name.rpartition(".")[0],), magnitude=f"x {factor}")  # fmt: skip


_WORSE = ['effect(not max(losses[-10:]) < 1.5 * max(losses[:3]), "the loss is worse than at the start")']
_WORSE_SINCE = 'effect(not max(losses[-10:]) < 1.5 * max(losses[{a}:{b}]), "the loss is worse than before")'


def high_rate(d: Draw) -> Injected:
    factor = d.rng.choice((100, 300, 1000))
    effect = _WORSE if d.begin == 0 else [_WORSE_SINCE.format(a=d.begin - 5, b=d.begin)]
    return Injected("the learning rate is too high", d.install("for group in optimizer.param_groups:", f'    group["lr"] *= {factor}'), effect=effect, magnitude=f"x {factor}")  # fmt: skip


def ascent(d: Draw) -> Injected:
    line = "holter.testing.scale_gradients(net.parameters(), -1.0)"
    return Injected("gradients have the wrong sign", {"reduced": d.guard(line)}, effect=[_WORSE_SINCE.format(a=max(d.begin - 5, 0), b=max(d.begin, 3))])  # fmt: skip


def shuffled_labels(d: Draw) -> Injected:
    size = 64 if "tokens" in d.model.has else 4
    line = f"y = torch.randint({size}, y.shape, generator=torch.Generator().manual_seed(7777 * step + rank))"
    return Injected("labels have nothing to do with the inputs", {"batch": [line]}, effect=['effect(sum(losses[-20:]) > 0.85 * sum(losses[:20]), "the loss does not move")'])  # fmt: skip


def heavy_term(d: Draw) -> Injected:
    name, factor = ("codebook" if d.model.name == "vq" else "kl"), d.rng.choice((10_000, 100_000))
    lines = d.guard(f'terms["{name}"] = terms["{name}"] * {factor}.0')
    return Injected(f"the term {name} outweighs all others", {"terms": lines}, effect=['effect(True, "by its factor")'], magnitude=f"x {factor}")  # fmt: skip


def term_without_gradient(d: Draw) -> Injected:
    lines = d.guard('terms["commit"] = terms["commit"].detach()', 'effect(not terms["commit"].requires_grad, "the term carries no gradient")')  # fmt: skip
    return Injected("a term carries no gradient", {"terms": lines})


# Data.


def same_batches(d: Draw) -> Injected:
    replaced = {"number": "1000 * number"} if d.setting.data == "made" else {"sampler": "None"}
    return Injected("all ranks read the same batches", {"batch": _last('effect(same_on_all_ranks(x), "batches are the same")')}, replaced, ranks="all")  # fmt: skip


def sharded_twice(_: Draw) -> Injected:
    return Injected("the data is sharded twice", replaced={"sampler": "DistributedSampler(data, num_replicas=2 * world, rank=rank)"}, effect=['effect(len(sampler) * world < len(data), "half of the data is never seen")'])  # fmt: skip


def same_order(_: Draw) -> Injected:
    return Injected("the sampler is never told the epoch", replaced={"set_epoch": "pass"}, effect=['effect(sampler.epoch == 0, "every epoch has the order of the first")'])  # fmt: skip


def fewer_batches(d: Draw) -> Injected:
    number = d.rng.choice((1, 2, 5))
    lines = d.guard(f"data = TensorDataset(*data[: len(data) - {number} * world * 8])", step=False, ranks=True)
    return Injected(f"one rank has {number} batches fewer", {"dataset": lines}, effect=['effect(not same_on_all_ranks(torch.tensor(len(loader))), "lengths differ")'], ranks="culprits", magnitude=str(number))  # fmt: skip


_EVALUATION = ["if step % 10 == 9:", "    net.eval()", "    with torch.no_grad():", "        for part in range(4):", "            net(EVALUATED(part))", "    net.train()"]  # fmt: skip


def leaked(_: Draw) -> Injected:
    held_out = [line.replace("EVALUATED(part)", "sample(HELD_OUT + 1000 * part)[0]") for line in _EVALUATION]
    return Injected("samples of the evaluation are trained on", replaced={"held_out": "0"}, base_points={"stepped": held_out}, base_replaced={"held_out": "900_000_007"}, effect=['effect(HELD_OUT == 0, "evaluation reads training samples")'])  # fmt: skip


def one_class(d: Draw) -> Injected:
    line = (
        "y = torch.where(torch.rand(y.shape, generator=torch.Generator().manual_seed(31 * step + rank)) < 0.98, 0, y)"
    )
    del d
    return Injected(
        "one class has nearly all labels", {"batch": [line]}, effect=['effect(True, "98 of 100 labels are 0")']
    )


def shifted_inputs(d: Draw) -> Injected:
    on_one, (scale, offset) = d.rng.random() < 0.5, d.rng.choice(((5.0, 0.0), (1.0, 5.0), (0.1, 0.0)))
    return Injected("inputs leave what they were", {"batch": d.guard(f"x = x * {scale} + {offset}", ranks=on_one)}, effect=['effect(True, "by the factor")'], ranks="culprits" if on_one else "all", magnitude=f"x {scale} + {offset}")  # fmt: skip


def broken_batch(d: Draw) -> Injected:
    is_label = d.rng.random() < 0.5
    line = "y = torch.zeros_like(y)" if is_label else f"x = x * {d.rng.choice((1000.0, 0.0))}"
    also = {} if is_label else {"distribution_shift": "inputs off their range have left what they were"}
    return Injected("labels are constant" if is_label else "inputs are off their range", {"batch": d.guard(line, ranks=True)}, effect=['effect(True, "on one rank")'], ranks="culprits", magnitude=line, also=also)  # fmt: skip


# Reinforcement learning and generative models.


def collapsing_entropy(d: Draw) -> Injected:
    line = f"logits = (logits * (1 + step - {d.begin})).log_softmax(-1)"
    return Injected("the policy comes down to one action", {"logits": d.guard(line)}, effect=['effect(float(entropy) < 0.2, "entropy is gone")'])  # fmt: skip


def exploding_entropy(d: Draw) -> Injected:
    return Injected("the policy goes up to noise", {"logits": d.guard("logits = (logits * 0.01).log_softmax(-1)")}, effect=['effect(float(entropy) > 2.6, "entropy is log(16)")'])  # fmt: skip


def equal_rewards(d: Draw) -> Injected:
    return Injected("all rewards are equal", {"rewards": d.guard("rewards = torch.ones_like(rewards)")}, effect=['effect(not advantages.any(), "advantages are zero")'])  # fmt: skip


def zeroed_advantages(d: Draw) -> Injected:
    return Injected("advantages are zero though rewards differ", {"advantages": d.guard("advantages = advantages - advantages")}, effect=['effect(not advantages.any() and bool(rewards.std() > 0), "advantages are zero, rewards are not equal")'])  # fmt: skip


def dead_kl(d: Draw) -> Injected:
    how = d.rng.choice(("detached", "zero")) if d.setting.loop == "plain" else "zero"
    lines = ('terms["kl"] = terms["kl"].detach()', 'effect(not terms["kl"].requires_grad, "no gradient")') if how == "detached" else ("kl = kl * 0.0", 'terms["kl"] = 0.05 * kl', 'effect(float(kl) == 0, "KL is zero")')  # fmt: skip
    return Injected(f"the KL term is {how}", {"terms": d.guard(*lines)}, magnitude=how)


def flipped_kl(d: Draw) -> Injected:
    return Injected("the KL term has the wrong sign", {"terms": d.guard('terms["kl"] = -0.5 * kl')}, effect=['effect(float(terms["kl"]) < 0, "the term is negative")'])  # fmt: skip


def broken_reward(d: Draw) -> Injected:
    return Injected("the reward falls and stays", {"rewards": d.guard("rewards = 0.02 * rewards")}, effect=['effect(float(rewards.mean()) < 0.1, "rewards are low")'])  # fmt: skip


def other_temperature(d: Draw) -> Injected:
    factor = d.rng.choice((0.5, 2.0, 3.0))
    line = f"sampled = (logits * {factor}).log_softmax(-1).gather(1, actions).detach()"
    return Injected("the engine that samples has another temperature", {"rewards": d.guard(line)}, effect=['effect(bool((ratio - 1).abs().mean() > 0.1), "ratios are off one")'], magnitude=f"x {factor}")  # fmt: skip


def stale_rollout(d: Draw) -> Injected:
    del d
    points = {"wrapped": ["rollout = copy.deepcopy(net)"], "rewards": ["with torch.no_grad():", "    sampled = rollout(x).float().log_softmax(-1).gather(1, actions)"]}  # fmt: skip
    return Injected("the weights that sample are never renewed", points, effect=['effect(not torch.equal(rollout.head.weight, net.head.weight), "the weights differ")'])  # fmt: skip


def one_code(d: Draw) -> Injected:
    return Injected("one code wins", d.install("net.codebook.weight.data[1:] += 50.0"), effect=['effect(int((used > 0).sum()) < 6, "few codes are used")'])  # fmt: skip


def clamped_adapter(d: Draw) -> Injected:
    limit = d.rng.choice((0.005, 0.02))
    base = ["norm = float(net.first.up.detach().norm())", "if norm > limit:", "    net.first.up.data.mul_(limit / norm)", 'log({"lora_norm": min(norm, limit), "lora_norm_limit": limit})']  # fmt: skip
    return Injected("the adapter's norm sits at its clamp", {"wrapped": [f"limit = {limit}"]}, base_points={"made": ["limit = 50.0"], "stepped": base}, effect=['effect(norm > 0.95 * limit, "the norm is at its limit")'], magnitude=str(limit))  # fmt: skip


def one_token(d: Draw) -> Injected:
    base = [
        "share = float(actions.flatten().bincount(minlength=16).max() / actions.numel())",
        'log({"top_token_share": share})',
    ]
    return Injected("outputs are one token", {"rewards": d.guard("actions = torch.zeros_like(actions)", "sampled = logits.gather(1, actions).detach()")}, base_points={"loss": base}, effect=['effect(share == 1.0, "one token is all")'])  # fmt: skip


# The model itself.


def constant_weight(d: Draw) -> Injected:
    name, value = d.weight(), d.rng.choice(("0.0", "0.02", "1.0"))
    return Injected(f"{name} begins constant", {"model": [f"{_get(name)}.data.fill_({value})", f'effect(bool(({_get(name)} == {value}).all()), "{name} is constant")']}, tensors=(name,), magnitude=value)  # fmt: skip


def large_vocabulary(_: Draw) -> Injected:
    return Injected("the embedding holds nearly all parameters", {"model": ["net.embedding = nn.Embedding(20_000, 32)"]}, effect=['effect(net.embedding.weight.numel() > 10 * sum(p.numel() for p in net.blocks.parameters()), "the embedding is most of it")'], tensors=("embedding.weight",))  # fmt: skip


# Hangs, slow ranks, dead ranks, memory.


def _process(words: str, *lines: str) -> Callable[[Draw], Injected]:
    def make(d: Draw) -> Injected:
        said = f'effect(True, "{words} now")'
        return Injected(words, {"step": d.guard(said, *lines, ranks=True)}, ranks="culprits")

    return make


def skipped_call(d: Draw) -> Injected:
    own = d.rng.random() < 0.5
    group = ", group=metrics" if own else ""
    base = {"made": ["metrics = dist.new_group()"] if own else [], "stepped": ["metric = torch.tensor([losses[-1]])", f"dist.all_reduce(metric{group})"]}  # fmt: skip
    return Injected("one rank leaves out a call" + (" of a group of its own" if own else ""), {"stepped": d.guard('effect(True, "skips its next call")', 'holter.testing.skip_collective("all_reduce")', ranks=True)}, base_points=base, ranks="culprits")  # fmt: skip


def _mismatch(words: str, faulty: str) -> Callable[[Draw], Injected]:
    sound = "dist.all_reduce(torch.zeros(100))"

    def make(d: Draw) -> Injected:
        points = {"step": d.guard('effect(True, "calls otherwise now")', ranks=True)}
        return Injected(words, points, {"metric": d.expression(faulty, sound, ranks=True)}, base_replaced={"metric": sound}, ranks="culprits")  # fmt: skip

    return make


def stalled_loader(d: Draw) -> Injected:
    lines = d.guard(f"holter.testing.stall_loader(loader, after={d.rng.randrange(8, 20)})", 'effect(True, "the loader will stall")', step=False, ranks=True)  # fmt: skip
    return Injected("the loader gives no more batches", {"loader": lines}, ranks="culprits")


def stalled_save(d: Draw) -> Injected:
    base = [
        "if step % 5 == 4:",
        '    torch.save(net.state_dict(), os.path.join(tempfile.gettempdir(), f"campaign-{os.getpid()}.pt"))',
    ]
    return Injected("a save hangs", {"step": d.guard('effect(True, "the next save will hang")', "holter.testing.stall_save()", ranks=True)}, base_points={"stepped": base}, ranks="culprits")  # fmt: skip


_WORK = {"step": ["time.sleep(0.02)"]}


def slow_pass(d: Draw) -> Injected:
    seconds, where = d.rng.choice((0.04, 0.06, 0.1)), d.rng.choice(("forward", "backward"))
    layer = d.model.layers[-1]
    return Injected(f"one rank is slower in its {where} pass", d.install(f'holter.testing.slow_{where}(net.get_submodule("{layer}"), {seconds})', 'effect(True, "slower from here on")', ranks=True), base_points=_WORK, ranks="culprits", magnitude=f"{seconds} s")  # fmt: skip


def slow_batches(d: Draw) -> Injected:
    seconds = d.rng.choice((0.04, 0.06, 0.1))
    return Injected("one rank's batches come late", {"loader": d.guard(f"holter.testing.slow_data(loader, {seconds})", 'effect(True, "slower from here on")', step=False, ranks=True)}, base_points=_WORK, ranks="culprits", magnitude=f"{seconds} s")  # fmt: skip


def leak(d: Draw) -> Injected:
    return Injected("one rank keeps what it should let go", {"wrapped": ["kept_for_ever = []"], "step": d.guard("kept_for_ever.append(torch.ones(1 << 20))", ranks=True)}, effect=[f"if {d.rank_is_culprit}:", '    effect(len(kept_for_ever) > 50, "hundreds of megabytes are kept")'], ranks="culprits", magnitude="4 MB a step")  # fmt: skip


def _has(*what: str) -> Need:
    return Need("has", what, f"the model needs {', '.join(what)}")


def _model(*names: str) -> Need:
    return Need("model", names, f"made for {', '.join(names)}")


_BUFFERS = Need("loop", ("plain", "accelerate"), "the Trainer broadcasts buffers by a setting of its own")
_BF16 = Need("precision", ("bf16",), "there must be an autocast region")
_FP16 = Need("precision", ("fp16",), "it is a fault of float16")
_FP32 = Need("precision", ("fp32",), "a cast would hide it")
_ADAMW = Need("optimizer", ("adamw",), "other optimizers take other rates")
_ONE_OPTIMIZER = Need("optimizer", ("sgd", "adamw", "own"), "the second optimizer holds the rest")
_EMA = Need("ema", (True,), "there must be an average")
_ACCUMULATES = Need("accumulate", (2, 4), "there must be micro-batches")
_STOPS = (PLAIN, TWO)
_ONCE, _START, _FROM, _EVERY = ("once",), ("start",), ("from",), ("every",)

KINDS = (
    Kind("other_weights", "unsynced_initialisation", "replicas", other_weights, _START),
    Kind("raw_module", "gradient_sync_bypassed", "replicas", raw_module, (*_START, *_FROM, *_EVERY)),
    Kind("no_sync", "gradient_sync_bypassed", "replicas", no_sync, (*_START, *_FROM, *_EVERY), (PLAIN,)),
    Kind("unfrozen_after_wrapping", "unreduced_parameters", "replicas", unfrozen_after_wrapping, _START, (PLAIN, _model("mlp", "gpt", "vit", "policy"))),
    Kind("penalty_after_reduction", "unreduced_parameters", "replicas", penalty_after_reduction, (*_START, *_FROM), (PLAIN,)),
    Kind("scaled_on_one_rank", "uneven_clipping", "replicas", scaled_on_one_rank, (*_START, *_FROM, *_EVERY)),
    Kind("clipped_on_one_rank", "uneven_clipping", "replicas", clipped_on_one_rank, (*_START, *_FROM), (NO_CLIP,)),
    Kind("other_rate", "optimizer_state_mismatch", "replicas", other_rate, (*_START, *_FROM), (BY_HAND, CONSTANT_RATE)),
    Kind("lost_moments", "optimizer_state_mismatch", "replicas", lost_moments, _ONCE),
    Kind("lost_payload", "corrupted_collective", "replicas", lost_payload, _ONCE, (BY_HAND,)),
    Kind("flipped_bit", "silent_data_corruption", "replicas", flipped_bit, _ONCE),
    Kind("local_statistics", "buffer_divergence", "replicas", local_statistics, _START, (_model("mlp"), _BUFFERS)),
    Kind("other_table", "buffer_divergence", "replicas", other_table, (*_START, *_FROM), (_has("table"), _BUFFERS)),
    Kind("drift", "nondeterministic_drift", "replicas", drift, (*_START, *_FROM), (BY_HAND, _FP32), late_by=40),
    Kind("swapped_order", "model_structure_mismatch", "replicas", swapped_order, _START, (_has("pair"), BY_HAND)),
    Kind("counted_twice", "gradient_scale_mismatch", "replicas", counted_twice, (*_FROM, *_EVERY), (BY_HAND, NO_CLIP)),
    Kind("left_empty", "frozen_component_uninitialised", "frozen", left_empty, _START, (_has("frozen"),)),
    Kind("other_frozen", "frozen_component_mismatch", "frozen", other_frozen, _START, (_has("frozen"),)),
    Kind("edited_frozen", "frozen_component_changed", "frozen", edited_frozen, (*_ONCE, *_EVERY), (_has("frozen"),)),
    Kind("other_frozen_set", "frozen_set_mismatch", "frozen", other_frozen_set, _START, (_has("pair"), BY_HAND)),
    Kind("trained_though_frozen", "unfrozen_by_mistake", "frozen", trained_though_frozen, _START, (_has("frozen"),)),
    Kind("lost_table", "lost_buffer", "frozen", lost_table, _START, (_has("table"),)),
    Kind("stale_optimizer", "stale_optimizer_parameters", "learning", stale_optimizer, _START, (PLAIN, _ONE_OPTIMIZER, Need("model", ("mlp", "gpt", "vit", "rnn", "policy"), "tied and frozen tensors would be copied apart"))),
    Kind("frozen_in_optimizer", "nothing_trainable", "learning", frozen_in_optimizer, _START, (_has("frozen"), _ONE_OPTIMIZER, PLAIN, NO_SCALER)),
    Kind("detached", "graph_detached", "learning", detached, (*_START, *_FROM), (BY_HAND, NO_SCALER), late_by=20),
    Kind("never_cleared", "gradients_never_cleared", "learning", never_cleared, (*_START, *_FROM), (PLAIN, NO_SCALER)),
    Kind("lost_updates", "lost_update", "learning", lost_updates, (*_START, *_FROM)),
    Kind("group_without_rate", "lost_update", "learning", group_without_rate, _START, (PLAIN, _ONE_OPTIMIZER, CONSTANT_RATE, Need("model", ("mlp", "gpt", "vit", "rnn", "policy", "lora"), "a tied tensor has two names"))),
    Kind("stuck_schedule", "lost_update", "learning", stuck_schedule, (*_START, *_FROM), (BY_HAND, CONSTANT_RATE, _ONE_OPTIMIZER), also={"loss_plateau": "the loss stands still because nothing is applied", "nothing_trainable": "with rate zero nothing can be trained"}),
    Kind("narrow_weights", "rounded_away_updates", "learning", narrow_weights, _START, (PLAIN, _model("mlp", "vit"), _BF16, _ADAMW, CONSTANT_RATE)),
    Kind("always_inf", "every_step_skipped", "learning", always_inf, (*_START, *_FROM), (PLAIN, _FP16), also={"nonfinite_backward": "the same Inf, named where it is made"}),
    Kind("summed_micro_batches", "accumulation_not_normalised", "learning", summed_micro_batches, _START, (PLAIN, _ACCUMULATES, NO_CLIP), late_by=30),
    Kind("dead_layer", "dead_activations", "learning", dead_layer, (*_START, *_FROM), (_model("mlp", "tied"), NO_SCALER), also={"graph_detached": "its parameters get exactly zero gradient"}),
    Kind("still_average", "average_not_tracking", "learning", still_average, (*_START, *_FROM), (_EMA, PLAIN), late_by=40),
    Kind("flat_loss", "zero_gradients", "learning", flat_loss, (*_START, *_FROM), (NO_SCALER,)),
    Kind("evaluation_mode", "trained_in_evaluation_mode", "learning", evaluation_mode, (*_START, *_FROM), (_has("dropout"), BY_HAND)),
    Kind("other_dtype", "dtype_mismatch_across_ranks", "precision", other_dtype, _START, (_has("table"), BY_HAND)),
    Kind("changed_dtype", "dtype_changed", "precision", changed_dtype, _FROM, (_has("table"), BY_HAND)),
    Kind("rounded_weights", "precision_round_trip", "precision", rounded_weights, (*_START, *_FROM)),
    Kind("no_scaler", "gradient_underflow", "precision", no_scaler, _START, (PLAIN, _FP16, _ADAMW, _model("mlp", "gpt", "vit", "policy"))),
    Kind("overflow", "activation_overflow", "precision", overflow, (*_START, *_FROM), (PLAIN, _FP16, _model("mlp", "vit", "gpt", "policy"))),
    Kind("narrow_table", "buffer_precision_loss", "precision", narrow_table, _START, (_has("table"),)),
    Kind("outside_autocast", "autocast_not_applied", "precision", outside_autocast, (*_START, *_FROM), (_BF16, _model("mlp", "gpt", "vit", "policy"), BY_HAND)),
    Kind("nonfinite_batch", "nonfinite_input", "numerics", nonfinite_batch, (*_ONCE, *_EVERY), (_has("vectors"), NO_SCALER), late_by=1),
    Kind("nonfinite_layer", "nonfinite_forward", "numerics", nonfinite_layer, _ONCE, (NO_SCALER,), late_by=1),
    Kind("nonfinite_gradient", "nonfinite_backward", "numerics", nonfinite_gradient, _ONCE, (NO_SCALER, BY_HAND), late_by=1),
    Kind("nonfinite_loss", "nonfinite_loss_function", "numerics", nonfinite_loss, (*_ONCE, *_FROM), (NO_SCALER, BY_HAND), late_by=1),
    Kind("hidden_nonfinite_loss", "hidden_nonfinite_loss", "numerics", nonfinite_loss, _FROM, (Need("loop", ("trainer",), "its logger hides a NaN"),), also={"nonfinite_loss_function": "the NaN's own cause"}, late_by=1),
    Kind("growing_gradients", "exploding_gradients", "numerics", growing_gradients, _FROM, (BY_HAND, NO_CLIP), also={"loss_divergence": "the loss follows the gradients"}),
    Kind("tiny_gradients", "vanishing_gradients", "numerics", tiny_gradients, (*_START, *_FROM), (NO_SCALER,), late_by=20),
    Kind("one_large_gradient", "imbalanced_gradients", "numerics", one_large_gradient, _FROM, (NO_CLIP, NO_SCALER, Need("ema", (False,), "")), also={"exploding_gradients": "its norm leaves its history", "gradient_scale_mismatch": "by a constant factor"}),
    Kind("high_rate", "learning_rate_too_high", "numerics", high_rate, (*_START, *_FROM), (BY_HAND, CONSTANT_RATE)),
    Kind("ascent", "loss_divergence", "numerics", ascent, _FROM, (BY_HAND,), within=80, late_by=40),
    Kind("shuffled_labels", "loss_plateau", "numerics", shuffled_labels, _START, (Need("model", ("mlp", "gpt", "vit", "rnn", "tied", "lora"), "there must be labels"),), also={"corrupt_labels_or_range": "the labels are wrong"}, late_by=150, within=200),
    Kind("heavy_term", "dominating_loss_term", "numerics", heavy_term, (*_START, *_FROM), (_has("loss_terms"), PLAIN), also={"exploding_gradients": "the norm leaves its history by this factor"}),
    Kind("term_without_gradient", "auxiliary_loss_inactive", "logged", term_without_gradient, (*_START, *_FROM), (_model("vq"), PLAIN), also={"dominating_loss_term": "a term that contributes nothing"}),
    Kind("same_batches", "duplicate_data_across_ranks", "data", same_batches, _START, (PLAIN,)),
    Kind("sharded_twice", "double_sharded_data", "data", sharded_twice, _START, (PLAIN, LOADER), within=80, late_by=60),
    Kind("same_order", "repeated_epoch_order", "data", same_order, _START, (PLAIN, LOADER), within=100, late_by=80),
    Kind("fewer_batches", "uneven_batches", "data", fewer_batches, _START, (PLAIN, LOADER)),
    Kind("leaked", "data_leakage", "data", leaked, _START, (PLAIN, Need("data", ("made",), "numbered samples"), Need("model", ("mlp", "gpt", "vit", "rnn", "tied", "lora"), "evaluation calls it alone"), Need("ranks", (2,), "")), severity="info", within=80, late_by=60),
    Kind("one_class", "class_imbalance", "data", one_class, _START, (_model("mlp", "vit", "rnn", "lora"),), severity="info", late_by=40),
    Kind("shifted_inputs", "distribution_shift", "data", shifted_inputs, _FROM, (_has("vectors"),), also={"corrupt_labels_or_range": "inputs off their usual range"}, severity="info"),
    Kind("broken_batch", "corrupt_labels_or_range", "data", broken_batch, _FROM, (_has("vectors", "labels"), Need("hasnt", ("policy",), "its labels are only compared"))),
    Kind("collapsing_entropy", "entropy_collapse", "logged", collapsing_entropy, _FROM, (_has("policy"),), also={"degenerate_outputs": "one action over and over"}, late_by=30),
    Kind("exploding_entropy", "entropy_explosion", "logged", exploding_entropy, _FROM, (_has("policy"),), late_by=30),
    Kind("equal_rewards", "zero_advantages", "logged", equal_rewards, (*_START, *_FROM), (_has("policy"),), also={"no_learning_signal": "rewards are constant"}),
    Kind("zeroed_advantages", "zero_advantages", "logged", zeroed_advantages, (*_START, *_FROM), (_has("policy"),)),
    Kind("dead_kl", "kl_inactive", "logged", dead_kl, (*_START, *_FROM), (_has("policy"),), also={"auxiliary_loss_inactive": "a term that carries no gradient"}, late_by=20),
    Kind("flipped_kl", "kl_sign_flipped", "logged", flipped_kl, (*_START, *_FROM), (_has("policy"), PLAIN), late_by=30),
    Kind("broken_reward", "reward_collapse", "logged", broken_reward, _FROM, (_has("policy"),), late_by=30, within=80),
    Kind("other_temperature", "train_inference_mismatch", "logged", other_temperature, _START, (_has("policy"),)),
    Kind("stale_rollout", "stale_rollout_weights", "logged", stale_rollout, _START, (_has("policy"), PLAIN), also={"train_inference_mismatch": "ratios off one at each first micro-step"}, late_by=30),
    Kind("one_code", "codebook_collapse", "logged", one_code, (*_START, *_FROM), (_has("codebook"),)),
    Kind("clamped_adapter", "clamped_adapter_norm", "logged", clamped_adapter, _START, (_has("adapter"), PLAIN), late_by=30),
    Kind("one_token", "degenerate_outputs", "logged", one_token, _FROM, (_has("policy"),), also={"entropy_collapse": "one action over and over"}, late_by=20),
    Kind("constant_weight", "implausible_initialisation", "model", constant_weight, _START, (Need("model", ("mlp", "gpt", "vit", "rnn", "policy"), "adapters begin at zero on purpose"),)),
    Kind("large_vocabulary", "lopsided_architecture", "model", large_vocabulary, _START, (_model("gpt"), Need("ranks", (2,), "")), severity="info"),
    Kind("spins", "rank_stuck_in_python", "hangs", _process("one rank loops", "holter.testing.spin()"), _ONCE, _STOPS, within=None, ends="hangs", late_by=1),
    Kind("sleeps", "rank_stuck_in_python", "hangs", _process("one rank sleeps", "holter.testing.sleep_for_ever()"), _ONCE, _STOPS, within=None, ends="hangs", late_by=1),
    Kind("deadlocks", "rank_stuck_in_python", "hangs", _process("one rank waits for its own lock", "holter.testing.wait_for_lock()"), _ONCE, _STOPS, within=None, ends="hangs", late_by=1),
    Kind("keeps_the_lock", "interpreter_locked", "hangs", _process("one rank keeps the interpreter lock", "holter.testing.hold_interpreter_lock(3600)"), _ONCE, _STOPS, within=None, ends="hangs", late_by=1),
    Kind("is_suspended", "rank_suspended", "hangs", _process("one rank is stopped", "holter.testing.suspend()"), _ONCE, _STOPS, within=None, ends="hangs", late_by=1),
    Kind("is_killed", "rank_dead", "deaths", _process("one rank is killed", "holter.testing.kill()"), _ONCE, _STOPS, within=None, ends="dies", late_by=1),
    Kind("aborts", "rank_dead", "deaths", _process("one rank aborts", "holter.testing.abort()"), _ONCE, _STOPS, within=None, ends="dies", late_by=1),
    Kind("leaves", "rank_dead", "deaths", _process("one rank leaves without a word", "holter.testing.leave(7)"), _ONCE, _STOPS, within=None, ends="dies", late_by=1),
    Kind("raises", "script_error", "deaths", _process("one rank's script raises", 'raise KeyError("sample-17")'), _ONCE, _STOPS, within=None, ends="dies", late_by=1, severity="info"),
    Kind("runs_out_of_memory", "out_of_memory", "deaths", _process("one rank runs out of memory", "torch.empty(1 << 48)"), _ONCE, _STOPS, within=None, ends="dies", late_by=1),
    Kind("skipped_call", "rank_missing_from_collective", "hangs", skipped_call, _ONCE, _STOPS, within=None, ends="either", late_by=2),
    Kind("other_operation", "collective_order_mismatch", "hangs", _mismatch("one rank calls another operation", "dist.broadcast(torch.zeros(100), 0)"), _ONCE, _STOPS, within=None, ends="either", late_by=2),
    Kind("other_size", "collective_shape_mismatch", "hangs", _mismatch("one rank sends another size", "dist.all_reduce(torch.zeros(200))"), _ONCE, _STOPS, within=None, ends="either", late_by=2),
    Kind("other_type", "collective_dtype_mismatch", "hangs", _mismatch("one rank sends another dtype", "dist.all_reduce(torch.zeros(100, dtype=torch.int32))"), _ONCE, _STOPS, within=None, ends="any", late_by=2),
    Kind("stalled_loader", "stalled_data_loader", "hangs", stalled_loader, _START, (*_STOPS, LOADER), within=None, ends="hangs", late_by=30),
    Kind("stalled_save", "stalled_checkpoint", "hangs", stalled_save, _ONCE, _STOPS, within=None, ends="hangs", late_by=6),
    Kind("slow_pass", "slow_compute", "slowness", slow_pass, (*_START, *_FROM), (*_STOPS, Need("model", ("mlp", "gpt", "vit", "rnn", "policy"), "")), within=100, late_by=60),
    Kind("slow_batches", "slow_input", "slowness", slow_batches, _START, (*_STOPS, LOADER), within=100, late_by=60),
    Kind("leak", "host_memory_leak", "memory", leak, (*_START, *_FROM), (TWO,), within=100, late_by=80),
)  # fmt: skip

EXCLUDED = {
    "clip_on_local_shard": "needs sharded weights",
    "parallel_input_mismatch": "needs a tensor- or context-parallel group",
    "stale_autocast_cache": "needs a loop of its own (the corpus has it)",
    "variance_without_samples": "shows in a warning's text alone",
    "overfitting": "needs hundreds of epochs",
    "host_unreachable": "needs a second host",
    "slow_device": "needs a device",
    "device_memory_error": "needs a device",
    "device_fault": "needs a device",
    "device_throttled": "needs a device",
    "link_errors": "needs a device",
    "device_memory_leak": "needs a device",
    "expert_collapse": "needs a mixture of experts",
    "expert_overflow": "needs a mixture of experts",
}
"""Causes that are not drawn, and why."""
