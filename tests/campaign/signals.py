"""Numbers that are not numbers, losses, data, what scripts log, the model itself."""

from tests.campaign.grammar import RATES, Draw, Injected, Kind, Need
from tests.campaign.lines import (
    BY_HAND,
    CONSTANT_RATE,
    EVERY,
    FROM,
    LOADER,
    NO_CLIP,
    NO_SCALER,
    ONCE,
    PLAIN,
    START,
    get,
    has,
    joined,
    last,
    measured,
    model,
    on_culprits,
    under,
)

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
    return Injected(f"{layer} makes a NaN", points, effect=effect, modules=(layer,), tensors=under(d.model.trained, (f"{layer}.",)), ranks="culprits")  # fmt: skip


def nonfinite_gradient(d: Draw) -> Injected:
    layer, value = d.rng.choice(d.model.layers), d.rng.choice(("nan", "inf"))
    names = under(d.model.trained, (f"{layer}.",))
    points = {
        "step": d.guard(f'holter.testing.spoil_gradient(net.get_submodule("{layer}"), float("{value}"))', ranks=True)
    }
    points["reduced"] = d.guard(f'effect(not all(p.grad.isfinite().all() for p in {d.group(names)}), "a gradient is not finite")')  # fmt: skip
    return Injected(f"the gradient into {layer} is {value}", points, modules=(layer,), tensors=names, ranks="culprits")


def nonfinite_loss(d: Draw) -> Injected:
    on_one = d.rng.random() < 0.5
    line = d.rng.choice(
        (
            "loss = loss + 0.0 * torch.log(torch.zeros(()))",
            "loss = loss * (torch.zeros(()) / torch.zeros(()))",
            "loss = loss + torch.sqrt(loss.detach() * 0 - 1.0)",
            "loss = loss * torch.exp(loss.detach() * 0 + 1000.0)",
        )
    )
    lines = d.guard(line, 'effect(not bool(torch.isfinite(loss)), "the loss is not finite")', ranks=on_one)
    return Injected("the script's own loss makes a NaN", {"loss": lines}, ranks="culprits" if on_one else "all")


def growing_gradients(d: Draw) -> Injected:
    base = d.rng.choice((1.3, 1.6, 2.0))
    line = f"holter.testing.scale_gradients(net.parameters(), {base} ** min(step - {d.begin}, 30))"
    points = joined(
        {"reduced": d.guard(line)}, measured(d, "reduced", f"float({get(d.model.weights[-1])}.grad.norm())")
    )
    effect = ['effect(not max(measured[True]) < 20 * typical(measured[False]), "norms leave their history")']
    return Injected("gradients grow from step to step", points, effect=effect, magnitude=f"x {base} a step")


def tiny_gradients(d: Draw) -> Injected:
    name = d.weight()
    return Injected(f"the gradient of {name} vanishes", {**d.install(f"{get(name)}.register_hook(lambda g: g * 1e-12)"), "clipped": last(f'effect(float({get(name)}.grad.norm()) < 1e-9, "the norm is tiny")')}, tensors=(name,), modules=(name.rpartition(".")[0],))  # fmt: skip


def one_large_gradient(d: Draw) -> Injected:
    name, factor = d.weight(), d.rng.choice((1000, 10_000))
    points = joined(d.install(f"{get(name)}.register_hook(lambda g: g * {factor}.0)"), measured(d, "clipped", f"float({get(name)}.grad.norm())"))  # fmt: skip
    effect = ['effect(not max(measured[True]) < 50 * typical(measured[False]), "its norm leaves its history")']
    return Injected(f"the gradient of {name} is {factor} times its own", points, effect=effect, tensors=(name,), modules=(name.rpartition(".")[0],), magnitude=f"x {factor}")  # fmt: skip


_WORSE = ['effect(not max(losses[-10:]) < 1.5 * max(losses[:3]), "the loss is worse than at the start")']
_WORSE_SINCE = 'effect(not max(losses[-10:]) < 1.5 * max(losses[{a}:{b}]), "the loss is worse than before")'


def high_rate(d: Draw) -> Injected:
    factor = d.rng.choice((100, 300, 1000))
    effect = _WORSE if d.begin == 0 else [_WORSE_SINCE.format(a=d.begin - 5, b=d.begin)]
    return Injected("the learning rate is too high", d.install("for group in optimizer.param_groups:", f'    group["lr"] *= {factor}'), effect=effect, magnitude=f"x {factor}")  # fmt: skip


def high_rate_set(d: Draw) -> Injected:
    factor = d.rng.choice((100, 300, 1000))
    rate = float(RATES[d.setting.optimizer])
    effect = ['effect(not sum(losses[-10:]) / 10 < losses[0], "the loss is no better than at the first step")']
    return Injected("the learning rate is set too high", replaced={"rate": f"{rate * factor:g}"}, effect=effect, magnitude=f"x {factor}")  # fmt: skip


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
    points = joined({"terms": lines}, measured(d, "terms", f'float(terms["{name}"]) / sum(abs(float(term)) for term in terms.values())'))  # fmt: skip
    effect = ['effect(typical(measured[True]) > 0.95, "the term is nearly the whole loss")']
    return Injected(f"the term {name} outweighs all others", points, effect=effect, magnitude=f"x {factor}")


def term_without_gradient(d: Draw) -> Injected:
    lines = d.guard('terms["commit"] = terms["commit"].detach()', 'effect(not terms["commit"].requires_grad, "the term carries no gradient")')  # fmt: skip
    return Injected("a term carries no gradient", {"terms": lines})


def penalty_without_gradient(d: Draw) -> Injected:
    name, sound = d.rng.choice(("penalty", "l2", "aux", "smoothness")), "sum(p.square().sum() for p in net.parameters() if p.requires_grad)"  # fmt: skip
    base = {"loss": [f'terms = {{"task": loss, "{name}": 1e-3 * {sound}}}', "loss = sum(terms.values())"], "stepped": ['log({"loss_terms": terms})']}  # fmt: skip
    cut = d.rng.choice((f'terms["{name}"].detach()', f"1e-3 * {sound.replace('p.square()', 'p.data.square()')}", f'torch.tensor(terms["{name}"].item())'))  # fmt: skip
    lines = d.guard(f'terms["{name}"] = {cut}', "loss = sum(terms.values())", f'effect(not terms["{name}"].requires_grad and float(terms["{name}"]) > 0, "the penalty carries no gradient")')  # fmt: skip
    return Injected(f"the term {name} carries no gradient", {"loss": lines}, base_points=base, magnitude=cut)


# Data.


def same_batches(d: Draw) -> Injected:
    sampler = d.rng.choice(("None", "DistributedSampler(data, num_replicas=world, rank=0)"))
    replaced = {"number": "1000 * number"} if d.setting.data == "made" else {"sampler": sampler}
    return Injected("all ranks read the same batches", {"batch": last('effect(same_on_all_ranks(x), "batches are the same")')}, replaced, ranks="all")  # fmt: skip


def sharded_twice(d: Draw) -> Injected:
    points = {"dataset": ["whole = len(data)"], "wrapped": ["rows, fetched = set(), []"], "batch": ["fetched.append(step)", "if len(fetched) <= len(loader):", "    rows.update(x.flatten(1).double().sum(1).tolist())"]}  # fmt: skip
    if d.rng.random() < 0.5:
        replaced = {"sampler": "DistributedSampler(data, num_replicas=2 * world, rank=rank)"}
    else:
        points["dataset"].append("data = TensorDataset(*data[rank::world])")
        replaced = {}
    effect = ['effect(len(rows) * world < 0.6 * whole, "a pass over the loader does not see the data")']
    return Injected("the data is sharded twice", points, replaced, effect)


def same_order(_: Draw) -> Injected:
    points = {"wrapped": ["orders = []"], "batch": ["orders.append(float(x.double().sum()))"]}
    effect = ['effect(len(orders) > len(loader) and orders[0] == orders[len(loader)], "the second epoch begins as the first")']  # fmt: skip
    return Injected("the sampler is never told the epoch", points, {"set_epoch": "pass"}, effect)


def fewer_batches(d: Draw) -> Injected:
    number = d.rng.choice((1, 2, 5))
    lines = d.guard(
        f"data = TensorDataset(*data[: len(data) - {number} * world * len(sample(0)[0])])", step=False, ranks=True
    )
    return Injected(f"one rank has {number} batches fewer", {"dataset": lines}, effect=['effect(not same_on_all_ranks(torch.tensor(len(loader))), "lengths differ")'], ranks="culprits", magnitude=str(number))  # fmt: skip


_EVALUATION = ["if step % 10 == 9:", "    net.eval()", "    with torch.no_grad():", "        for part in range(4):", "            net(EVALUATED(part))", "    net.train()"]  # fmt: skip


def leaked(_: Draw) -> Injected:
    held_out = [line.replace("EVALUATED(part)", "sample(HELD_OUT + 1000 * part)[0]") for line in _EVALUATION]
    points = {"wrapped": ["trained = set()"], "batch": ["trained.add(float(x.double().sum()))"]}
    effect = ["if rank == 0:", '    effect(all(float(sample(HELD_OUT + 1000 * part)[0].double().sum()) in trained for part in range(4)), "what is evaluated was trained on")']  # fmt: skip
    return Injected("samples of the evaluation are trained on", points, {"held_out": "0"}, effect, base_points={"stepped": held_out}, base_replaced={"held_out": "900_000_007"})  # fmt: skip


def one_class(d: Draw) -> Injected:
    share, label = d.rng.choice((0.97, 0.99)), d.rng.randrange(4)
    line = f"y = torch.where(torch.rand(y.shape, generator=torch.Generator().manual_seed(31 * step + rank)) < {share}, {label}, y)"
    points = {"wrapped": ["labels = []"], "batch": [line, "labels.extend(y.tolist())"]}
    effect = [f'effect(labels.count({label}) > 0.95 * len(labels), "one class has nearly all labels")']
    return Injected("one class has nearly all labels", points, effect=effect, magnitude=str(share))


def shifted_inputs(d: Draw) -> Injected:
    on_one, (scale, offset) = d.rng.random() < 0.5, d.rng.choice(((5.0, 0.0), (1.0, 5.0), (0.1, 0.0)))
    points = joined({"batch": d.guard(f"x = x * {scale} + {offset}", ranks=on_one)}, measured(d, "batch", "float(x.square().mean().sqrt())"))  # fmt: skip
    check = 'effect(not 0.5 < typical(measured[True]) / typical(measured[False]) < 2, "inputs have another size")'
    return Injected("inputs leave what they were", points, effect=on_culprits(d, check) if on_one else [check], ranks="culprits" if on_one else "all", magnitude=f"x {scale} + {offset}")  # fmt: skip


def other_vocabulary(d: Draw) -> Injected:
    on_one, size = d.rng.random() < 0.5, d.rng.choice((2, 6))
    points = joined({"batch": d.guard(f"x, y = x % {size}, y % {size}", ranks=on_one)}, measured(d, "batch", "len(x.unique())"))  # fmt: skip
    check = f'effect(typical(measured[True]) <= {size} < typical(measured[False]), "few tokens are left")'
    return Injected("texts have another vocabulary", points, effect=on_culprits(d, check) if on_one else [check], ranks="culprits" if on_one else "all", magnitude=f"{size} tokens")  # fmt: skip


def broken_batch(d: Draw) -> Injected:
    is_label = d.rng.random() < 0.5
    line = (
        d.rng.choice(("y = torch.zeros_like(y)", "y = torch.full_like(y, 3)"))
        if is_label
        else f"x = x * {d.rng.choice((1000.0, 0.0))}"
    )
    value = "float(len(y.unique()))" if is_label else "float(x.abs().max())"
    points = joined({"batch": d.guard(line, ranks=True)}, measured(d, "batch", value))
    check = "max(measured[True]) == 1 < typical(measured[False])" if is_label else "not 0.01 < typical(measured[True]) / typical(measured[False]) < 100"  # fmt: skip
    effect = on_culprits(d, f'effect({check}, "the batches are not what they were")')
    also = {} if is_label else {"distribution_shift": "inputs off their range have left what they were"}
    return Injected("labels are constant" if is_label else "inputs are off their range", points, effect=effect, ranks="culprits", magnitude=line, also=also)  # fmt: skip


# Reinforcement learning and generative models.


def collapsing_entropy(d: Draw) -> Injected:
    line = f"logits = (logits * (1 + step - {d.begin})).log_softmax(-1)"
    return Injected("the policy comes down to one action", {"logits": d.guard(line)}, effect=['effect(float(entropy) < 0.2, "entropy is gone")'])  # fmt: skip


def exploding_entropy(d: Draw) -> Injected:
    return Injected("the policy goes up to noise", {"logits": d.guard("logits = (logits * 0.01).log_softmax(-1)")}, effect=['effect(float(entropy) > 2.6, "entropy is log(16)")'])  # fmt: skip


def equal_rewards(d: Draw) -> Injected:
    return Injected("all rewards are equal", {"rewards": d.guard("rewards = torch.ones_like(rewards)")}, effect=['effect(not advantages.any(), "advantages are zero")'])  # fmt: skip


def no_rewards(d: Draw) -> Injected:
    value = d.rng.choice(("0.0", "-1.0"))
    return Injected("the reward function gives one number", {"rewards": d.guard(f"rewards = torch.full_like(rewards, {value})")}, effect=['effect(not bool(rewards.std() > 0) and not advantages.any(), "there is nothing to learn from")'], magnitude=value)  # fmt: skip


def zeroed_advantages(d: Draw) -> Injected:
    return Injected("advantages are zero though rewards differ", {"advantages": d.guard(d.rng.choice(("advantages = advantages - advantages", "advantages = advantages.round(decimals=-2)", "advantages = torch.zeros_like(rewards)")))}, effect=['effect(not advantages.any() and bool(rewards.std() > 0), "advantages are zero, rewards are not equal")'])  # fmt: skip


def dead_kl(d: Draw) -> Injected:
    how = d.rng.choice(("detached", "zero")) if d.setting.loop == "plain" else "zero"
    lines = ('terms["kl"] = terms["kl"].detach()', 'effect(not terms["kl"].requires_grad, "no gradient")') if how == "detached" else ("kl = kl * 0.0", 'terms["kl"] = 0.05 * kl', 'effect(float(kl) == 0, "KL is zero")')  # fmt: skip
    return Injected(f"the KL term is {how}", {"terms": d.guard(*lines)}, magnitude=how)


def flipped_kl(d: Draw) -> Injected:
    return Injected("the KL term has the wrong sign", {"terms": d.guard('terms["kl"] = -0.5 * kl')}, effect=['effect(float(terms["kl"]) < 0, "the term is negative")'])  # fmt: skip


def following_reference(d: Draw) -> Injected:
    lines = d.guard("reference.load_state_dict(net.state_dict())")
    points = {"wrapped": ["first_head = net.head.weight.detach().clone()"], "stepped": lines}
    return Injected("the reference is renewed after each step", points, effect=['effect(abs(float(kl)) < 1e-6 and not torch.equal(first_head, net.head.weight), "KL is zero though the policy moves")'])  # fmt: skip


def broken_reward(d: Draw) -> Injected:
    return Injected("the reward falls and stays", {"rewards": d.guard("rewards = 0.02 * rewards")}, effect=['effect(float(rewards.mean()) < 0.1, "rewards are low")'])  # fmt: skip


def other_temperature(d: Draw) -> Injected:
    factor = d.rng.choice((0.5, 2.0, 3.0))
    line = f"sampled = (logits * {factor}).log_softmax(-1).gather(1, actions).detach()"
    dtype = d.rng.choice(("float32", "bfloat16", "float16"))
    base = {"terms": [f"ratio = ratio.detach().to(torch.{dtype})"]} if dtype != "float32" else {}
    return Injected("the engine that samples has another temperature", {"rewards": d.guard(line)}, effect=['effect(bool((ratio - 1).abs().mean() > 0.1), "ratios are off one")'], base_points=base, magnitude=f"x {factor}, {dtype}")  # fmt: skip


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
    return Injected(f"{name} begins constant", {"model": [f"{get(name)}.data.fill_({value})", f'effect(bool(({get(name)} == {value}).all()), "{name} is constant")']}, tensors=(name,), magnitude=value)  # fmt: skip


def large_vocabulary(_: Draw) -> Injected:
    return Injected("the embedding holds nearly all parameters", {"model": ["net.embedding = nn.Embedding(20_000, 32)"]}, effect=['effect(net.embedding.weight.numel() > 10 * sum(p.numel() for p in net.blocks.parameters()), "the embedding is most of it")'], tensors=("embedding.weight",))  # fmt: skip


KINDS = (
    Kind("nonfinite_batch", "nonfinite_input", "numerics", nonfinite_batch, (*ONCE, *EVERY), (has("vectors"), NO_SCALER), late_by=1, one_culprit=False),
    Kind("nonfinite_layer", "nonfinite_forward", "numerics", nonfinite_layer, ONCE, (NO_SCALER,), late_by=1, one_culprit=False),
    Kind("nonfinite_gradient", "nonfinite_backward", "numerics", nonfinite_gradient, ONCE, (NO_SCALER, BY_HAND), late_by=1, one_culprit=False),
    Kind("nonfinite_loss", "nonfinite_loss_function", "numerics", nonfinite_loss, (*ONCE, *FROM), (NO_SCALER, BY_HAND), late_by=1),
    Kind("hidden_nonfinite_loss", "hidden_nonfinite_loss", "numerics", nonfinite_loss, FROM, (Need("loop", ("trainer",), "its logger hides a NaN"),), also={"nonfinite_loss_function": "the NaN's own cause"}, late_by=1),
    Kind("growing_gradients", "exploding_gradients", "numerics", growing_gradients, FROM, (BY_HAND, NO_CLIP), also={"loss_divergence": "the loss follows the gradients"}),
    Kind("tiny_gradients", "vanishing_gradients", "numerics", tiny_gradients, (*START, *FROM), (NO_SCALER,), late_by=20),
    Kind("one_large_gradient", "imbalanced_gradients", "numerics", one_large_gradient, FROM, (NO_CLIP, NO_SCALER, Need("ema", (False,), "")), also={"exploding_gradients": "its norm leaves its history", "gradient_scale_mismatch": "by a constant factor"}),
    Kind("high_rate", "learning_rate_too_high", "numerics", high_rate, (*START, *FROM), (BY_HAND, CONSTANT_RATE)),
    Kind("high_rate_set", "learning_rate_too_high", "numerics", high_rate_set, START, (Need("hasnt", ("policy",), "its loss says nothing"),)),
    Kind("ascent", "loss_divergence", "numerics", ascent, FROM, (BY_HAND,), within=80, late_by=40),
    Kind("shuffled_labels", "loss_plateau", "numerics", shuffled_labels, START, (Need("model", ("mlp", "gpt", "vit", "rnn", "lora"), "there must be labels, and a loss that begins at chance"),), also={"corrupt_labels_or_range": "the labels are wrong"}, late_by=150, within=200),
    Kind("heavy_term", "dominating_loss_term", "numerics", heavy_term, (*START, *FROM), (has("loss_terms"), PLAIN), also={"exploding_gradients": "the norm leaves its history by this factor"}),
    Kind("term_without_gradient", "auxiliary_loss_inactive", "logged", term_without_gradient, (*START, *FROM), (model("vq"), PLAIN), also={"dominating_loss_term": "a term that contributes nothing"}),
    Kind("penalty_without_gradient", "auxiliary_loss_inactive", "logged", penalty_without_gradient, (*START, *FROM), (PLAIN, Need("hasnt", ("logs",), "it has terms of its own")), also={"dominating_loss_term": "a term that contributes nothing"}),
    Kind("same_batches", "duplicate_data_across_ranks", "data", same_batches, START, (BY_HAND,)),
    Kind("sharded_twice", "double_sharded_data", "data", sharded_twice, START, (PLAIN, LOADER), within=80, late_by=60),
    Kind("same_order", "repeated_epoch_order", "data", same_order, START, (PLAIN, LOADER), within=100, late_by=80),
    Kind("fewer_batches", "uneven_batches", "data", fewer_batches, START, (PLAIN, LOADER)),
    Kind("leaked", "data_leakage", "data", leaked, START, (PLAIN, Need("data", ("made",), "numbered samples"), Need("model", ("mlp", "gpt", "vit", "rnn", "tied", "lora"), "evaluation calls it alone"), Need("ranks", (2,), "")), severity="info", within=80, late_by=60),
    Kind("one_class", "class_imbalance", "data", one_class, START, (model("mlp", "vit", "rnn", "lora"),), severity="info", late_by=40),
    Kind("shifted_inputs", "distribution_shift", "data", shifted_inputs, FROM, (has("vectors"),), also={"corrupt_labels_or_range": "inputs off their usual range"}, severity="info", one_culprit=False),
    Kind("other_vocabulary", "distribution_shift", "data", other_vocabulary, FROM, (has("tokens"),), also={"corrupt_labels_or_range": "tokens off their usual range"}, severity="info", one_culprit=False),
    Kind("broken_batch", "corrupt_labels_or_range", "data", broken_batch, FROM, (has("vectors", "labels"), Need("hasnt", ("policy",), "its labels are only compared"))),
    Kind("collapsing_entropy", "entropy_collapse", "logged", collapsing_entropy, FROM, (has("policy"),), also={"degenerate_outputs": "one action over and over"}, late_by=30),
    Kind("exploding_entropy", "entropy_explosion", "logged", exploding_entropy, FROM, (has("policy"),), late_by=30),
    Kind("equal_rewards", "zero_advantages", "logged", equal_rewards, (*START, *FROM), (has("policy"),), also={"no_learning_signal": "rewards are constant"}),
    Kind("no_rewards", "no_learning_signal", "logged", no_rewards, (*START, *FROM), (has("policy"),), also={"zero_advantages": "no group has a spread", "reward_collapse": "rewards fell and stay"}),
    Kind("zeroed_advantages", "zero_advantages", "logged", zeroed_advantages, (*START, *FROM), (has("policy"),)),
    Kind("dead_kl", "kl_inactive", "logged", dead_kl, (*START, *FROM), (has("policy"),), also={"auxiliary_loss_inactive": "a term that carries no gradient"}, late_by=20),
    Kind("following_reference", "kl_inactive", "logged", following_reference, (*START, *FROM), (has("policy"), BY_HAND), late_by=20),
    Kind("flipped_kl", "kl_sign_flipped", "logged", flipped_kl, (*START, *FROM), (has("policy"), PLAIN), late_by=30),
    Kind("broken_reward", "reward_collapse", "logged", broken_reward, FROM, (has("policy"),), late_by=30, within=80),
    Kind("other_temperature", "train_inference_mismatch", "logged", other_temperature, START, (has("policy"),)),
    Kind("stale_rollout", "stale_rollout_weights", "logged", stale_rollout, START, (has("policy"), PLAIN), also={"train_inference_mismatch": "ratios off one at each first micro-step"}, late_by=30),
    Kind("one_code", "codebook_collapse", "logged", one_code, (*START, *FROM), (has("codebook"),)),
    Kind("clamped_adapter", "clamped_adapter_norm", "logged", clamped_adapter, START, (has("adapter"), PLAIN), late_by=30),
    Kind("one_token", "degenerate_outputs", "logged", one_token, FROM, (has("policy"),), also={"entropy_collapse": "one action over and over"}, late_by=20),
    Kind("constant_weight", "implausible_initialisation", "model", constant_weight, START, (Need("model", ("mlp", "gpt", "vit", "rnn", "policy"), "adapters begin at zero on purpose"),)),
    Kind("large_vocabulary", "lopsided_architecture", "model", large_vocabulary, START, (model("gpt"), Need("ranks", (2,), "")), severity="info"),
)  # fmt: skip
