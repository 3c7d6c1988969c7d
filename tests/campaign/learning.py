"""Nothing, or the wrong thing, is learning; precision."""

from tests.campaign.grammar import Draw, Injected, Kind, Need
from tests.campaign.lines import (
    ACCUMULATES,
    ADAMW,
    BF16,
    BY_HAND,
    CONSTANT_RATE,
    EMA,
    FP16,
    FP32,
    FROM,
    NO_CLIP,
    NO_SCALER,
    ONE_OPTIMIZER,
    PLAIN,
    START,
    differ,
    get,
    has,
    joined,
    keep,
    last,
    model,
    on_culprits,
    still,
    under,
)

# Nothing, or the wrong thing, is learning.


def stale_optimizer(d: Draw) -> Injected:
    is_whole = d.rng.random() < 0.5
    name = d.weight()
    parameters = (
        "copy.deepcopy(net).parameters()"
        if is_whole
        else f'[p if n != "{name}" else nn.Parameter(p.detach().clone()) for n, p in net.named_parameters()]'
    )
    names = d.model.trained if is_whole else (name,)
    return Injected("the optimizer holds tensors that are no longer the model's", {"wrapped": [keep(name)]}, {"parameters": parameters}, still(name), tensors=names)  # fmt: skip


def frozen_in_optimizer(d: Draw) -> Injected:
    name = d.model.weights[-1]
    return Injected("the optimizer holds frozen parameters only", {"wrapped": [keep(name)]}, {"parameters": "[p for p in net.parameters() if not p.requires_grad]"}, still(name))  # fmt: skip


def detached(d: Draw) -> Injected:
    layer, prefixes = d.rng.choice(d.model.cuts)
    names = under(d.model.trained, prefixes)
    module = f'net.get_submodule("{layer}")'
    cuts = (f"holter.testing.detach_output({module})", f"{module}.forward = torch.no_grad()({module}.forward)")
    points = d.install(d.rng.choice(cuts))
    points["clipped"] = last(f'effect({get(names[0])}.grad is None or not {get(names[0])}.grad.any(), "{names[0]} gets no gradient")')  # fmt: skip
    return Injected(f"the output of {layer} is detached", points, base_replaced={"ddp": "find_unused_parameters=True"}, tensors=names)  # fmt: skip


def never_cleared(d: Draw) -> Injected:
    sound = "" if d.when.kind == "start" else f"if step < {d.begin}:\n    ZERO_GRAD"
    points = {"cleared": last(f'effect(bool({get(d.model.weights[-1])}.grad.any()), "gradients are there before the step\'s first pass")')}  # fmt: skip
    return Injected("gradients are not cleared", points, {"zero_grad": sound or "pass"})


def lost_updates(d: Draw) -> Injected:
    name = d.weight()
    lines = (keep(name), f"holter.testing.lose_updates(optimizer, {get(name)})")
    return Injected(f"updates of {name} are lost", d.install(*lines), effect=still(name), tensors=(name,))


def written_back(d: Draw) -> Injected:
    name = d.weight()
    points = joined(d.install(keep(name)), {"stepped": d.guard(f"{get(name)}.data.copy_(held)")})
    return Injected(f"{name} is written back after each step", points, effect=still(name), tensors=(name,))


def left_out(d: Draw) -> Injected:
    name = d.weight()
    parameters = f'[p for n, p in net.named_parameters() if p.requires_grad and n != "{name}"]'
    points = {
        "wrapped": [keep(name)],
        "clipped": last(f'effect(bool({get(name)}.grad.any()), "{name} has a gradient")'),
    }
    return Injected(f"no optimizer holds {name}", points, {"parameters": parameters}, still(name), tensors=(name,))


def second_never_steps(d: Draw) -> Injected:
    names = tuple(name for name in d.model.others if "bias" in name or "norm." in name or ".ln" in name)
    points = {"wrapped": [keep(names[0])], "clipped": last(f'effect(bool({get(names[0])}.grad.any()), "{names[0]} has a gradient")')}  # fmt: skip
    return Injected("the second optimizer is never stepped", points, {"second": "pass"}, still(names[0]), tensors=names)


def unused_branch(_: Draw) -> Injected:
    return Injected(
        "a branch that the optimizer holds is never called",
        {"model": ["net.extra = nn.Linear(32, 32)"]},
        base_replaced={"ddp": "find_unused_parameters=True"},
        effect=['effect(net.extra.weight.grad is None or not net.extra.weight.grad.any(), "the branch gets no gradient")'],
        tensors=("extra.weight", "extra.bias"),
        modules=("extra",),
    )  # fmt: skip


def group_without_rate(d: Draw) -> Injected:
    name = d.weight()
    groups = f'[{{"params": [{get(name)}], "lr": 0.0, "weight_decay": 0.0}}, {{"params": [p for n, p in net.named_parameters() if n != "{name}" and p.requires_grad]}}]'  # fmt: skip
    return Injected(f"the parameter group of {name} has rate zero", {"wrapped": [keep(name)]}, {"parameters": groups}, still(name), tensors=(name,))  # fmt: skip


def stuck_schedule(d: Draw) -> Injected:
    name = d.weight()
    lines = (keep(name), "for group in optimizer.param_groups:", '    group["lr"] = 0.0')
    return Injected("the learning rate stays at zero", d.install(*lines), effect=still(name))


def schedule_at_zero(d: Draw) -> Injected:
    name = d.weight()
    curve = "lambda step: 0.0 * step" if d.begin == 0 else f"lambda step: max(0.0, 1 - step / {d.begin})"
    return Injected("the schedule is at zero", d.install(keep(name)), {"schedule": curve}, still(name))


def narrow_weights(d: Draw) -> Injected:
    name = d.weight()
    points = {"model": ["net.to(torch.bfloat16)"], "clipped": last(keep(name)), "stepped": last(f'effect(float((held != {get(name)}).float().mean()) < 0.2, "few elements of {name} change in a step")')}  # fmt: skip
    return Injected("weights in bfloat16, rate 1e-6", points, base_replaced={"rate": "1e-6"}, magnitude="rate 1e-6")


def always_inf(d: Draw) -> Injected:
    name = d.weight()
    return Injected("a gradient overflows in every step", d.install(f'{get(name)}.register_hook(lambda g: g * float("inf"))'), effect=['effect(scaler.get_scale() < 1e-3, "the scale has collapsed")'])  # fmt: skip


def summed_micro_batches(d: Draw) -> Injected:
    parts = d.rng.choice(("(2, 8)[step // 10 % 2]", "(1, 4)[step >= 15]", "1 + step // 12"))
    points = {"wrapped": ["norms = {}"], "clipped": [f"norms.setdefault(parts, []).append(float({get(d.model.weights[-1])}.grad.norm()))"]}  # fmt: skip
    effect = ['effect(typical(norms[max(norms)]) > 1.5 * typical(norms[min(norms)]), "the norm follows the number of micro-batches")']  # fmt: skip
    return Injected("micro-batches are summed, and their number changes", points, {"divide": ""}, base_replaced={"parts": parts}, effect=effect, magnitude=parts)  # fmt: skip


def dead_layer(d: Draw) -> Injected:
    layer, act = {"mlp": ("first", "act1"), "tied": ("body", "act")}[d.model.name]
    points = d.install(f"net.{layer}.bias.data.fill_(-1e4)")
    points["wrapped"] = [*points.get("wrapped", []), "alive = []", f"net.{act}.register_forward_hook(lambda _, __, out: alive.append(bool(out.any())))"]  # fmt: skip
    return Injected(f"{layer} is pushed below zero for all inputs", points, effect=['effect(not alive[-1], "the layer gives only zeros")'], tensors=under(d.model.trained, (f"{layer}.",)), modules=(layer, act))  # fmt: skip


def still_average(d: Draw) -> Injected:
    rate, update = d.rng.choice(
        (
            ("0.05", "kept.lerp_(live, 0.0)"),
            ("0.05", "kept.lerp_(kept, 0.05)"),
            ("0.05", "kept.lerp_(live, -0.05)"),
            ("0.001", "kept.copy_(kept.bfloat16().lerp(live.bfloat16(), 0.001))"),
            ("0.001", "kept.copy_(kept.half() * 0.999 + live.half() * 0.001)"),
        )
    )
    sound = f"kept.lerp_(live, {rate})"
    faulty = update if d.when.kind == "start" else f"{sound} if step < {d.begin} else {update}"
    name = d.weight()
    # Beside it, the average as it should be.
    points = {
        "wrapped": [f"begun = {get(name)}.detach().clone()", "right = begun.clone()"],
        "stepped": [f"right.lerp_({get(name)}.detach(), {rate})"],
    }
    kept = f'average.get_parameter("{name}")'
    far = f"({kept} - {get(name)}).norm() > 1.05 * (right - {get(name)}).norm()"
    off = f"({kept} - right).norm() > 0.3 * (right - begun).norm()"
    return Injected(f"the average does not follow: {update}", points, {"ema": faulty}, [f'effect(bool({far} or {off}), "the average is not where it should be")'], base_replaced={"ema": sound}, magnitude=update)  # fmt: skip


def flat_loss(d: Draw) -> Injected:
    line = d.rng.choice(("loss = loss.clamp(min=100.0)", "loss = loss * 0.0", "loss = torch.relu(loss - 1000.0)", "loss = torch.where(loss > 0, 1.0 + 0 * loss, loss)"))  # fmt: skip
    points = {"loss": d.guard(line), "clipped": last(f'effect(not {get(d.model.weights[-1])}.grad.any(), "gradients are exactly zero")')}  # fmt: skip
    return Injected("the loss is flat", points, magnitude=line)


def evaluation_mode(d: Draw) -> Injected:
    on_one = d.rng.random() < 0.5
    # On all ranks alike one layer may be in that mode on purpose; on one rank it may not.
    which = d.rng.choice(("net", "net.dropout")) if on_one else "net"
    # What comes out of a dropout in training is not what went in.
    hook = "net.dropout.register_forward_hook(lambda _, given, out: passed.append(torch.equal(given[0], out)))"
    points = joined({"wrapped": ["passed = []", hook]}, d.install(f"{which}.eval()", ranks=on_one))
    check = 'effect(passed[-1], "dropout drops nothing")'
    effect = on_culprits(d, check) if on_one else [check]
    words = f"{'the model' if which == 'net' else 'dropout'} is trained in evaluation mode" + (" on one rank" if on_one else "")  # fmt: skip
    return Injected(words, points, effect=effect, ranks="culprits" if on_one else "none", modules=("norm", "dropout", ""))  # fmt: skip


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
    check = f'effect(torch.equal({get(names[0])}, {get(names[0])}.to(torch.{dtype}).float()), "{names[0]} is rounded")'
    effect = differ(*names) if on_one else [check]
    return Injected(f"weights pass through {dtype}", points, effect=effect, tensors=names, ranks="culprits" if on_one else "none", magnitude=dtype)  # fmt: skip


def rounded_outputs(d: Draw) -> Injected:
    layer, dtype = d.rng.choice(d.model.layers), d.rng.choice(("bfloat16", "float16"))
    module = f'net.get_submodule("{layer}")'
    points = joined(
        d.install(
            f"{module}.register_forward_hook(lambda _, __, out: out.to(torch.{dtype}).to(out.dtype))", ranks=True
        ),
        {"wrapped": ["exact = []"]},
        d.install(
            f"{module}.register_forward_hook(lambda _, __, out: exact.append(torch.equal(out, out.to(torch.{dtype}).to(out.dtype))))",
            ranks=True,
        ),
    )
    effect = on_culprits(d, 'effect(exact[-1], "what the layer gives is rounded")')
    return Injected(f"what {layer} gives passes through {dtype} on one rank", points, effect=effect, modules=(layer,), tensors=under(d.model.trained, (f"{layer}.",)), ranks="culprits", magnitude=dtype)  # fmt: skip


def no_scaler(d: Draw) -> Injected:
    name, factor = d.model.weights[0], d.rng.choice(("1e-6", "1e-7"))
    points = {"clipped": last(f'effect(float(({get(name)}.grad.abs() < 1e-7).float().mean()) > 0.5, "most of {name}\'s gradient is lost")')}  # fmt: skip
    return Injected("fp16 without a loss scaler", points, {"scaler": "enabled=False"}, base_points={"loss": [f"loss = loss * {factor}"]}, magnitude=f"loss x {factor}")  # fmt: skip


def overflow(d: Draw) -> Injected:
    layer = d.rng.choice({"mlp": ("first", "second", "head"), "vit": ("block.up", "block.down", "head"), "gpt": ("blocks.0.up", "blocks.1.down", "head"), "policy": ("head",)}[d.model.name])  # fmt: skip
    factor = d.rng.choice((1e5, 1e6))
    points = d.install(f"{get(layer + '.weight')}.data.mul_({factor:g})")
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
    return Injected(f"{layer} leaves autocast on one rank", points, effect=effect, modules=(layer, *after), tensors=under(d.model.trained, (f"{layer}.",)))  # fmt: skip


KINDS = (
    Kind("stale_optimizer", "stale_optimizer_parameters", "learning", stale_optimizer, START, (PLAIN, ONE_OPTIMIZER, Need("model", ("mlp", "gpt", "vit", "rnn", "policy"), "tied and frozen tensors would be copied apart"))),
    Kind("frozen_in_optimizer", "nothing_trainable", "learning", frozen_in_optimizer, START, (has("frozen"), ONE_OPTIMIZER, PLAIN, NO_SCALER)),
    Kind("detached", "graph_detached", "learning", detached, (*START, *FROM), (BY_HAND, NO_SCALER), late_by=20),
    Kind("never_cleared", "gradients_never_cleared", "learning", never_cleared, (*START, *FROM), (PLAIN, NO_SCALER)),
    Kind("lost_updates", "lost_update", "learning", lost_updates, (*START, *FROM)),
    Kind("group_without_rate", "lost_update", "learning", group_without_rate, START, (BY_HAND, ONE_OPTIMIZER, Need("model", ("mlp", "gpt", "vit", "rnn", "policy", "lora"), "a tied tensor has two names"))),
    Kind("written_back", "lost_update", "learning", written_back, (*START, *FROM)),
    Kind("left_out", "stale_optimizer_parameters", "learning", left_out, START, (BY_HAND, ONE_OPTIMIZER, NO_SCALER), also={"lost_update": "it has a gradient and never changes", "nothing_trainable": "of this tensor nothing is trained"}),
    Kind("second_never_steps", "lost_update", "learning", second_never_steps, START, (PLAIN, Need("optimizer", ("two",), "there must be a second"))),
    Kind("unused_branch", "graph_detached", "learning", unused_branch, START, (BY_HAND, NO_SCALER), late_by=20),
    Kind("schedule_at_zero", "lost_update", "learning", schedule_at_zero, (*START, *FROM), (CONSTANT_RATE, ONE_OPTIMIZER, NO_SCALER), also={"loss_plateau": "the loss stands still because nothing is applied", "nothing_trainable": "with rate zero nothing can be trained"}),
    Kind("stuck_schedule", "lost_update", "learning", stuck_schedule, (*START, *FROM), (BY_HAND, CONSTANT_RATE, ONE_OPTIMIZER), also={"loss_plateau": "the loss stands still because nothing is applied", "nothing_trainable": "with rate zero nothing can be trained"}),
    Kind("narrow_weights", "rounded_away_updates", "learning", narrow_weights, START, (PLAIN, model("mlp", "vit"), BF16, ADAMW, CONSTANT_RATE)),
    Kind("always_inf", "every_step_skipped", "learning", always_inf, (*START, *FROM), (PLAIN, FP16), also={"nonfinite_backward": "the same Inf, named where it is made"}),
    Kind("summed_micro_batches", "accumulation_not_normalised", "learning", summed_micro_batches, START, (PLAIN, ACCUMULATES, NO_CLIP), late_by=30),
    Kind("dead_layer", "dead_activations", "learning", dead_layer, (*START, *FROM), (model("mlp", "tied"), NO_SCALER), also={"graph_detached": "its parameters get exactly zero gradient"}),
    Kind("still_average", "average_not_tracking", "learning", still_average, (*START, *FROM), (EMA, PLAIN), late_by=40),
    Kind("flat_loss", "zero_gradients", "learning", flat_loss, (*START, *FROM), (NO_SCALER,)),
    Kind("evaluation_mode", "trained_in_evaluation_mode", "learning", evaluation_mode, (*START, *FROM), (has("dropout"), BY_HAND)),
    Kind("other_dtype", "dtype_mismatch_across_ranks", "precision", other_dtype, START, (has("table"), BY_HAND)),
    Kind("changed_dtype", "dtype_changed", "precision", changed_dtype, FROM, (has("table"), BY_HAND)),
    Kind("rounded_weights", "precision_round_trip", "precision", rounded_weights, (*START, *FROM)),
    Kind("rounded_outputs", "precision_round_trip", "precision", rounded_outputs, (*START, *FROM), (FP32,), also={"autocast_not_applied": "a layer computes in another precision than its peers"}),
    Kind("no_scaler", "gradient_underflow", "precision", no_scaler, START, (PLAIN, FP16, ADAMW, model("mlp", "gpt", "vit", "policy"))),
    Kind("overflow", "activation_overflow", "precision", overflow, (*START, *FROM), (PLAIN, FP16, model("mlp", "vit", "gpt", "policy"))),
    Kind("narrow_table", "buffer_precision_loss", "precision", narrow_table, START, (has("table"),)),
    Kind("outside_autocast", "autocast_not_applied", "precision", outside_autocast, (*START, *FROM), (BF16, model("mlp", "gpt", "vit", "policy"), BY_HAND)),
)  # fmt: skip
