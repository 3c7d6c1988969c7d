"""Ranks that should be equal are not; frozen components."""

from tests.campaign.grammar import Draw, Injected, Kind, Need
from tests.campaign.lines import (
    ADAMW,
    BUFFERS,
    BY_HAND,
    CONSTANT_RATE,
    EVERY,
    FP16,
    FP32,
    FROM,
    NO_CLIP,
    NO_SCALER,
    ONCE,
    PLAIN,
    START,
    differ,
    get,
    has,
    joined,
    measured,
    model,
    under,
)

# Ranks that should be equal are not.


def other_weights(d: Draw) -> Injected:
    names, scale = d.tensors_or_all(), d.rng.choice((1e-4, 1e-2, 1.0))
    lines = d.guard(
        f"holter.testing.perturb({d.group(names)}, scale={scale}, seed={d.rng.randrange(99)})", step=False, ranks=True
    )
    return Injected(f"rank {d.culprits[0]} begins with other weights", {"wrapped": lines}, effect=differ(*names), tensors=names, magnitude=f"{scale:g} of the weights' size")  # fmt: skip


def raw_module(d: Draw) -> Injected:
    return Injected(
        "the raw module is called instead of its wrapper",
        replaced={"model": d.expression("net", "model")},
        effect=differ(*d.model.weights),
        tensors=d.model.trained,
    )


def no_sync(d: Draw) -> Injected:
    return Injected(
        "the stepping micro-batch is not reduced",
        {"batch": d.guard("model.require_backward_grad_sync = False")},
        base_points={"batch": ["model.require_backward_grad_sync = True"]} if d.setting.accumulate == 1 else {},
        effect=differ(*d.model.weights),
        tensors=d.model.trained,
    )


def unfrozen_after_wrapping(d: Draw) -> Injected:
    layer = d.rng.choice([name.rpartition(".")[0] for name in d.model.weights])
    names = under(d.model.trained, (f"{layer}.",))
    return Injected(
        f"{layer} is frozen when the wrapper is made, and trained",
        {"model": [f'net.get_submodule("{layer}").requires_grad_(False)'], "ddp": [f'net.get_submodule("{layer}").requires_grad_(True)']},
        effect=differ(*names),
        tensors=names,
    )  # fmt: skip


def penalty_after_reduction(d: Draw) -> Injected:
    name = d.weight()
    line = f"(loss.detach() * {get(name)}.square().mean()).backward()"
    return Injected(
        "a penalty with each rank's own weight is added after the reduction",
        {"reduced": d.guard(line)},
        effect=differ(name),
        tensors=(name,),
    )


def scaled_on_one_rank(d: Draw) -> Injected:
    names, factor = d.tensors_or_all(), d.rng.choice((0.1, 0.5, 0.9, 2.0))
    group = d.group(names)
    by_hand = (
        [f"holter.testing.scale_gradients({group}, {factor})"],
        [f"torch._foreach_mul_([p.grad for p in {group} if p.grad is not None], {factor})"],
        [f"for p in {group}:", f"    p.grad = None if p.grad is None else p.grad * {factor}"],
        [f"for p in {group}:", "    if p.grad is not None:", f"        p.grad.data /= {1 / factor:g}"],
    )
    lines = d.guard(*d.rng.choice(by_hand), ranks=True)
    return Injected("one rank scales its reduced gradients", {"clipped": lines}, effect=differ(*names), tensors=names, ranks="culprits", magnitude=f"x {factor}")  # fmt: skip


def own_factor(d: Draw) -> Injected:
    line = d.rng.choice(("own = 1.0 / (1.0 + losses[-1])", "own = min(1.0, 0.5 / losses[-1])"))
    lines = d.guard(line, "for p in net.parameters():", "    if p.grad is not None:", "        p.grad.mul_(own)")
    return Injected("each rank scales the reduced gradients by its own loss", {"clipped": lines}, effect=differ(*d.model.weights), tensors=d.model.trained, ranks="all", magnitude=line)  # fmt: skip


def backward_after_reduction(d: Draw) -> Injected:
    line = f"({d.rng.choice((0.01, 0.1))} * net(x).float().square().mean()).backward()"
    return Injected(
        "a second pass backward adds each rank's own gradients after the reduction",
        {"reduced": d.guard(line)},
        effect=differ(*d.model.weights),
        tensors=d.model.trained,
        also={"unreduced_parameters": "these gradients are in no reduction"},
    )


def clipped_on_one_rank(d: Draw) -> Injected:
    limit = d.rng.choice((0.01, 0.05))
    lines = d.guard(f"torch.nn.utils.clip_grad_norm_(net.parameters(), {limit})", ranks=True)
    return Injected("one rank clips, the others do not", {"clipped": lines}, effect=differ(*d.model.weights), tensors=d.model.trained, ranks="culprits", magnitude=f"norm {limit}")  # fmt: skip


def other_rate(d: Draw) -> Injected:
    factor = d.rng.choice((0.1, 0.5, 2.0, 10.0))
    lines = ["for group in optimizer.param_groups:", f'    group["lr"] *= {factor}']
    effect = differ(*d.model.weights)
    return Injected("one rank has another learning rate", d.install(*lines, ranks=True), effect=effect, ranks="culprits", magnitude=f"x {factor}")  # fmt: skip


def lost_moments(d: Draw) -> Injected:
    change = d.rng.choice(("value.zero_()", "value.mul_(3.0)", "holter.testing.perturb(value, scale=1.0, seed=5)"))
    lines = d.guard("for state in optimizer.state.values():", "    for value in state.values():", "        if torch.is_tensor(value) and value.dim():", f"            {change}", ranks=True)  # fmt: skip
    return Injected("one rank's optimizer has other moments", {"step": lines}, effect=differ(*d.model.weights), ranks="culprits", magnitude=change)  # fmt: skip


def other_count(d: Draw) -> Injected:
    lines = d.guard("for state in optimizer.state.values():", f'    state["step"] += {d.rng.choice((-10, 50, 1000))}', ranks=True)  # fmt: skip
    return Injected(
        "one rank's optimizer counts other steps", {"step": lines}, effect=differ(*d.model.weights), ranks="culprits"
    )


def other_scale(d: Draw) -> Injected:
    scale = d.rng.choice((256.0, 8192.0))
    return Injected(
        "one rank's loss scale is another",
        replaced={"scaler": f"init_scale={scale} if {d.rank_is_culprit} else 65536.0"},
        effect=differ(*d.model.weights),
        ranks="culprits",
        magnitude=f"{scale:g}",
        also={"uneven_clipping": "unscaling multiplies its gradients by another factor"},
    )


def flipped_moment(d: Draw) -> Injected:
    name, bit = d.weight(), d.rng.choice((24, 25, 26))
    lines = d.guard(
        f"moment = next(v for v in optimizer.state[{get(name)}].values() if torch.is_tensor(v) and v.dim())",
        f"holter.testing.flip_bit(moment, index={d.rng.randrange(12)}, bit={bit})",
        ranks=True,
    )
    return Injected(f"bit {bit} of a moment flips on one rank", {"step": lines}, effect=differ(name), tensors=(name,), ranks="culprits", magnitude=f"bit {bit}", also={"optimizer_state_mismatch": "a moment differs between ranks"})  # fmt: skip


def lost_payload(d: Draw) -> Injected:
    names = d.tensors_or_all()
    how = d.rng.choice(("lost", "garbled"))
    line = (
        f"holter.testing.scale_gradients({d.group(names)}, 0.0)"
        if how == "lost"
        else f"holter.testing.perturb([p.grad for p in {d.group(names)}], scale=0.5)"
    )
    return Injected(f"a reduction's result is {how} on one rank", {"reduced": d.guard(line, ranks=True)}, effect=differ(*names), ranks="culprits", magnitude=how)  # fmt: skip


def flipped_bit(d: Draw) -> Injected:
    name, bit = d.weight(), d.rng.choice((12, 16, 20, 22, 24))
    line = f"holter.testing.flip_bit({get(name)}.data, index={d.rng.randrange(12)}, bit={bit})"
    return Injected(f"bit {bit} of a weight flips on one rank", {"step": d.guard(line, ranks=True)}, effect=differ(name), tensors=(name,), ranks="culprits", magnitude=f"bit {bit}")  # fmt: skip


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
    return Injected("a reduction whose order is not fixed: gradients differ by rounding", {"reduced": d.guard(line, ranks=True)}, effect=differ(*d.model.weights), tensors=d.model.trained)  # fmt: skip


def swapped_order(d: Draw) -> Injected:
    order = '{name: net._modules[name] for name in ("encoder", "norm", "second", "first", "act1", "act2", "dropout", "head")}'
    return Injected(
        "one rank registers two layers of one shape the other way round",
        {"model": d.guard(f"net._modules = {order}", step=False, ranks=True)},
        effect=['effect(not same_on_all_ranks(net.first.weight), "first is reduced into second")'],
        tensors=under(d.model.trained, ("first.", "second.")),
        ranks="culprits",
    )


def counted_twice(d: Draw) -> Injected:
    names, factor = d.tensors_or_all(), d.rng.choice((4, 8, 64))
    also = {"exploding_gradients": "the norm leaves its history by this factor"}
    if len(names) == 1:
        also["imbalanced_gradients"] = "one module's norm leaves its peers'"
    line = f"holter.testing.scale_gradients({d.group(names)}, {factor}.0)"
    points = joined({"reduced": d.guard(line)}, measured(d, "reduced", f"float({get(names[0])}.grad.norm())"))
    effect = [f'effect(typical(measured[True]) > {factor / 2} * typical(measured[False]), "norms are {factor} times larger")']  # fmt: skip
    return Injected("gradients are summed where they should be averaged", points, effect=effect, tensors=names, magnitude=f"x {factor}", also=also)  # fmt: skip


# Frozen components.


_FROZEN = {"mlp": "encoder", "gpt": "embedding", "vit": "patches", "rnn": "inlet"}
"""Of models that train everything: the layer that is frozen for a fault of this family."""


def _frozen_layer(d: Draw) -> tuple[str, tuple[str, ...], dict[str, list[str]]]:
    """The layer, its tensors, and the lines that freeze it in the twin too."""
    if d.model.frozen:
        layer = d.rng.choice(("encoder", "first.layer", "second.layer"))
        return layer, under(d.model.frozen, (f"{layer}.",)), {}
    layer = _FROZEN[d.model.name]
    return layer, under(d.model.trained, (f"{layer}.",)), {"model": [f"net.{layer}.requires_grad_(False)"]}


def _frozen_differ(layer: str) -> list[str]:
    return [f'effect(not same_on_all_ranks({get(layer + ".weight")}), "{layer} differs between ranks")']


def left_empty(d: Draw) -> Injected:
    layer, names, base = _frozen_layer(d)
    value = d.rng.choice(("0.0", "1e-40", 'float("nan")'))
    lines = d.guard(
        f'for p in net.get_submodule("{layer}").parameters():', f"    p.data.fill_({value})", step=False, ranks=True
    )
    return Injected(f"{layer} holds what to_empty left on one rank", {"wrapped": lines}, base_points=base, effect=_frozen_differ(layer), tensors=names, ranks="culprits", magnitude=value)  # fmt: skip


def other_frozen(d: Draw) -> Injected:
    layer, names, base = _frozen_layer(d)
    scale = d.rng.choice((1e-3, 0.1))
    lines = d.guard(
        f'holter.testing.perturb(net.get_submodule("{layer}").parameters(), scale={scale})', step=False, ranks=True
    )
    return Injected(f"frozen {layer} is another on one rank", {"wrapped": lines}, base_points=base, effect=_frozen_differ(layer), tensors=names, ranks="culprits", magnitude=f"{scale:g}")  # fmt: skip


def edited_frozen(d: Draw) -> Injected:
    _, names, base = _frozen_layer(d)
    name = d.rng.choice(names)
    edit = d.rng.choice(
        (
            f"holter.testing.perturb({get(name)}, scale={d.rng.choice((1e-4, 0.01))}, seed=3)",
            f"{get(name)}.data.mul_(1.01)",
            f'net.load_state_dict({{**net.state_dict(), "{name}": {get(name)} + 0.001}})',
            f"{get(name)}.data = {get(name)}.data.roll(1, 0)",
        )
    )
    points = {"wrapped": [f"frozen_before = {get(name)}.detach().clone()"], "step": d.guard(edit)}
    return Injected(f"frozen {name} is edited on all ranks", points, base_points=base, effect=[f'effect(not torch.equal(frozen_before, {get(name)}), "{name} moved")'], tensors=(name,), magnitude=edit)  # fmt: skip


def other_frozen_set(d: Draw) -> Injected:
    line = f'net.get_submodule("first" if {d.rank_is_culprit} else "second").requires_grad_(False)'
    return Injected("ranks freeze different layers of one shape", {"model": [line]}, effect=['effect(not same_on_all_ranks(net.first.weight), "first differs between ranks")'], tensors=under(d.model.trained, ("first.", "second.")), ranks="culprits")  # fmt: skip


def trained_though_frozen(d: Draw) -> Injected:
    layer, names, base = _frozen_layer(d)
    return Injected(
        f"{layer} is declared frozen, and trained",
        {"model": [f"net.{layer}.requires_grad_(True)"], "wrapped": [f"layer_before = {get(f'{layer}.weight')}.detach().clone()"]},
        base_points=base,
        effect=[f'effect(not torch.equal(layer_before, {get(f"{layer}.weight")}), "{layer} moved")'],
        tensors=names,
        env={"HOLTER_FROZEN": f"{layer}.*"},
    )  # fmt: skip


def lost_table(d: Draw) -> Injected:
    value = d.rng.choice(("0.0", "1.0"))
    return Injected("the table of frequencies was lost in loading", {"model": [f"net.inv_freq.fill_({value})"]}, effect=['effect(bool((net.inv_freq == net.inv_freq[0]).all()), "the table is constant")'], tensors=("inv_freq",), magnitude=value)  # fmt: skip


KINDS = (
    Kind("other_weights", "unsynced_initialisation", "replicas", other_weights, START),
    Kind("raw_module", "gradient_sync_bypassed", "replicas", raw_module, (*START, *FROM, *EVERY)),
    Kind("no_sync", "gradient_sync_bypassed", "replicas", no_sync, (*START, *FROM, *EVERY), (PLAIN,)),
    Kind("unfrozen_after_wrapping", "unreduced_parameters", "replicas", unfrozen_after_wrapping, START, (PLAIN, model("mlp", "gpt", "vit", "policy"))),
    Kind("penalty_after_reduction", "unreduced_parameters", "replicas", penalty_after_reduction, (*START, *FROM, *EVERY), (PLAIN,)),
    Kind("scaled_on_one_rank", "uneven_clipping", "replicas", scaled_on_one_rank, (*START, *FROM, *EVERY)),
    Kind("own_factor", "uneven_clipping", "replicas", own_factor, (*START, *FROM)),
    Kind("backward_after_reduction", "gradient_sync_bypassed", "replicas", backward_after_reduction, (*START, *FROM, *EVERY), (PLAIN, NO_SCALER, Need("hasnt", ("codebook",), "it gives several tensors"))),
    Kind("clipped_on_one_rank", "uneven_clipping", "replicas", clipped_on_one_rank, (*START, *FROM), (NO_CLIP,)),
    Kind("other_rate", "optimizer_state_mismatch", "replicas", other_rate, (*START, *FROM), (BY_HAND, CONSTANT_RATE)),
    Kind("lost_moments", "optimizer_state_mismatch", "replicas", lost_moments, ONCE),
    Kind("other_count", "optimizer_state_mismatch", "replicas", other_count, ONCE, (ADAMW,)),
    Kind("other_scale", "optimizer_state_mismatch", "replicas", other_scale, START, (PLAIN, FP16)),
    Kind("lost_payload", "corrupted_collective", "replicas", lost_payload, ONCE, (BY_HAND,)),
    Kind("flipped_bit", "silent_data_corruption", "replicas", flipped_bit, ONCE),
    Kind("flipped_moment", "silent_data_corruption", "replicas", flipped_moment, ONCE),
    Kind("local_statistics", "buffer_divergence", "replicas", local_statistics, START, (model("mlp"), BUFFERS)),
    Kind("other_table", "buffer_divergence", "replicas", other_table, (*START, *FROM), (has("table"), BUFFERS)),
    Kind("drift", "nondeterministic_drift", "replicas", drift, (*START, *FROM), (BY_HAND, FP32), late_by=40),
    Kind("swapped_order", "model_structure_mismatch", "replicas", swapped_order, START, (has("pair"), BY_HAND)),
    Kind("counted_twice", "gradient_scale_mismatch", "replicas", counted_twice, (*FROM, *EVERY), (BY_HAND, NO_CLIP)),
    Kind("left_empty", "frozen_component_uninitialised", "frozen", left_empty, START, (model("lora", "mlp", "gpt", "vit", "rnn"),)),
    Kind("other_frozen", "frozen_component_mismatch", "frozen", other_frozen, START, (model("lora", "mlp", "gpt", "vit", "rnn"),)),
    Kind("edited_frozen", "frozen_component_changed", "frozen", edited_frozen, (*ONCE, *EVERY), (model("lora", "mlp", "gpt", "vit", "rnn"),)),
    Kind("other_frozen_set", "frozen_set_mismatch", "frozen", other_frozen_set, START, (has("pair"), BY_HAND)),
    Kind("trained_though_frozen", "unfrozen_by_mistake", "frozen", trained_though_frozen, START, (model("lora", "mlp", "gpt", "vit", "rnn"),)),
    Kind("lost_table", "lost_buffer", "frozen", lost_table, START, (has("table"),)),
)  # fmt: skip
