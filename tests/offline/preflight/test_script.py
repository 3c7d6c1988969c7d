"""Traps in a training script, and beside each what looks like it and is sound."""

import pytest

from holter.offline.preflight.script import look

TRAPS = {
    "a barrier of the first rank": ("barrier", "if rank == 0:\n    save()\n    dist.barrier()\n"),
    "an early return": ("barrier", "def f(rank):\n    if rank != 0:\n        return\n    torch.distributed.all_reduce(x)\n"),
    "through a helper": ("barrier", "def sync():\n    dist.barrier()\nif dist.get_rank() == 0:\n    sync()\n"),
    "through two helpers": ("barrier", "def a():\n    dist.barrier()\ndef b():\n    a()\nif rank == 0:\n    b()\n"),
    "wait_for_everyone": ("barrier", "if accelerator.is_main_process:\n    accelerator.save_model(m, 'x')\n    accelerator.wait_for_everyone()\n"),
    "save_state of the main process": ("barrier", "if accelerator.is_main_process:\n    accelerator.save_state('x')\n"),
    "in one line": ("barrier", "rank == 0 and dist.barrier()\n"),
    "an expression": ("barrier", "y = dist.all_gather_object(a, b) if is_master else None\n"),
    "the environment": ("barrier", "if int(os.environ['RANK']) == 0:\n    dist.broadcast(x, 0)\n"),
    "in a loop": ("barrier", "for step in range(9):\n    if rank == 0 and step % 2 == 0:\n        dist.barrier()\n"),
    "a decorated function": ("barrier", "@accelerator.on_main_process\ndef f():\n    accelerator.wait_for_everyone()\n"),
    "a method": ("barrier", "class T:\n    def f(self):\n        if self.rank == 0:\n            dist.all_reduce(self.x)\n"),
    "only the else": ("barrier", "if rank == 0:\n    pass\nelse:\n    dist.barrier()\n"),
    "an epoch's order": ("set_epoch", "s = DistributedSampler(d)\nfor epoch in range(10):\n    for b in DataLoader(d, sampler=s):\n        pass\n"),
    "an epoch's order in a while": ("set_epoch", "s = DistributedSampler(d, shuffle=True)\nepoch = 0\nwhile epoch < 3:\n    epoch += 1\n"),
    "nothing prepared": ("prepare", "a = Accelerator()\nm = M()\no = torch.optim.SGD(m.parameters(), lr=1)\no.step()\n"),
    "the optimizer is left out": ("prepare", "a = Accelerator()\no = torch.optim.AdamW(m.parameters())\nm = a.prepare(m)\nfor b in l:\n    a.backward(m(b))\n    o.step()\n"),
    "the loader is left out": ("prepare", "a = Accelerator()\nl = DataLoader(d)\no = torch.optim.SGD(p)\nm, o = a.prepare(m, o)\nfor i, b in enumerate(l):\n    a.backward(m(b))\n    o.step()\n"),
    "past the accelerator": ("prepare", "a = Accelerator()\nm, o, l = a.prepare(m, o, l)\nfor b in l:\n    loss = m(b)\n    loss.backward()\n    o.step()\n"),
    "nothing wrapped": ("wrapper", "dist.init_process_group('gloo')\nm = M()\nfor b in l:\n    m(b).backward()\n    o.step()\n"),
    "frozen late": ("frozen", "m = M()\nm = DDP(m)\nfor p in m.module.encoder.parameters():\n    p.requires_grad = False\n"),
    "frozen late by its method": ("frozen", "m = DistributedDataParallel(net)\nnet.encoder.requires_grad_(False)\n"),
    "unfrozen late": ("frozen", "self.model = FSDP(self.model)\nself.model.head.requires_grad_(True)\n"),
    "a head that is made late": ("frozen", "fully_shard(model)\nmodel.head = nn.Linear(4, 4)\n"),
    "an optimizer before fully_shard": ("optimizer before", "model = M()\nopt = torch.optim.AdamW(model.parameters(), lr=1e-3)\nfor layer in model.layers:\n    fully_shard(layer)\nfully_shard(model)\n"),
    "an optimizer before FSDP": ("optimizer before", "def main():\n    net = M()\n    opt = AdamW([{'params': net.parameters()}])\n    net = FSDP(net)\n"),
    "an optimizer before tensor parallelism": ("optimizer before", "opt = optim.SGD(params=self.model.parameters(), lr=1)\nself.model = parallelize_module(self.model, mesh, plan)\n"),
    "an optimizer before adapters": ("optimizer before", "o = AdamW(p for p in m.parameters() if p.requires_grad)\nm = get_peft_model(m, config)\n"),
    "an optimizer before other weights": ("optimizer before", "o = AdamW(m.parameters())\nm.load_state_dict(s, assign=True)\n"),
    "an optimizer before new embeddings": ("optimizer before", "o = AdamW(m.parameters())\nm.resize_token_embeddings(9)\n"),
    "clipped while scaled": ("scaled clipping", "s = torch.amp.GradScaler()\ns.scale(loss).backward()\ntorch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)\ns.step(o)\n"),
    "never back to training": ("evaluation mode", "o = SGD(m.parameters())\nfor e in range(9):\n    for b in l:\n        m(b).backward()\n        o.step()\n    m.eval()\n    check(m)\n"),
    "one checkpoint": ("rotation", "args = TrainingArguments('x', save_total_limit=1)\n"),
}  # fmt: skip
SOUND = {
    "all ranks": "dist.barrier()\nif rank == 0:\n    save()\n",
    "both sides": "if rank == 0:\n    dist.broadcast(x, 0)\nelse:\n    dist.broadcast(y, 0)\n",
    "the download": "if local_rank not in [-1, 0]:\n    dist.barrier()\ndownload()\nif local_rank == 0:\n    dist.barrier()\n",
    "the download, the other way": "if rank != 0:\n    dist.barrier()\nx = load()\nif rank == 0:\n    dist.barrier()\n",
    "several ranks at all": "if world_size > 1:\n    dist.barrier()\nif dist.is_initialized():\n    dist.all_reduce(x)\n",
    "a group of its own": "if rank in members:\n    dist.all_reduce(x, group=group)\n",
    "messages between two": "if rank == 0:\n    dist.send(x, 1)\nelif rank == 1:\n    dist.recv(x, 0)\n",
    "a return for everybody": "def f(x):\n    if x is None:\n        return\n    dist.barrier()\n",
    "a dictionary that gathers": "if rank == 0:\n    x = torch.gather(y, 0, z)\n    functools.reduce(f, y)\n",
    "logging": "if rank == 0:\n    print(loss)\n    wandb.log({'loss': loss})\n",
    "main_process_first": "with accelerator.main_process_first():\n    data = data.map(f)\n",
    "set_epoch is called": "s = DistributedSampler(d)\nfor epoch in range(10):\n    s.set_epoch(epoch)\n",
    "an evaluation's sampler": "s = DistributedSampler(d, shuffle=False)\nfor epoch in range(10):\n    pass\n",
    "one epoch": "s = DistributedSampler(d)\nfor epoch in range(1):\n    pass\n",
    "steps and no epochs": "s = DistributedSampler(d)\nfor step in range(1000):\n    pass\n",
    "all prepared": "a = Accelerator()\nl = DataLoader(d)\no = torch.optim.SGD(p)\nm, o, l = a.prepare(m, o, l)\nfor b in l:\n    a.backward(m(b))\n    o.step()\n",
    "prepared as a list": "a = Accelerator()\no = torch.optim.SGD(p)\nm, o = a.prepare(*[m, o])\no.step()\n",
    "prepared one by one": "a = Accelerator()\no = torch.optim.SGD(p)\no = a.prepare_optimizer(o)\nm = a.prepare_model(m)\no.step()\n",
    "an evaluation's loader": "a = Accelerator()\nv = DataLoader(d)\nm, o, l = a.prepare(m, o, l)\nfor b in v:\n    m(b)\n",
    "gradients reduced by hand": "dist.init_process_group('gloo')\nloss.backward()\nfor p in m.parameters():\n    dist.all_reduce(p.grad)\no.step()\n",
    "frozen in time": "for p in m.encoder.parameters():\n    p.requires_grad = False\nm = DDP(m)\n",
    "another model": "m = DDP(m)\nteacher = T()\nteacher.requires_grad_(False)\nfor p in teacher.parameters():\n    p.requires_grad = False\n",
    "an optimizer after sharding": "model = M()\nfully_shard(model)\nopt = torch.optim.AdamW(model.parameters(), lr=1e-3)\n",
    "an optimizer that is built again": "opt = AdamW(m.parameters())\nm = FSDP(m)\nopt = AdamW(m.parameters())\n",
    "an optimizer before DDP": "m = M()\nopt = AdamW(m.parameters())\nm = DDP(m)\n",
    "an optimizer of another model": "opt = AdamW(critic.parameters())\nfully_shard(actor)\n",
    "an optimizer in a function of its own": "def build(model):\n    return AdamW(model.parameters())\ndef main():\n    model = M()\n    fully_shard(model)\n    o = build(model)\n",
    "weights that are copied": "o = AdamW(m.parameters())\nm.load_state_dict(s)\nm.to('cpu')\n",
    "clipped after unscaling": "s = torch.amp.GradScaler()\ns.scale(loss).backward()\ns.unscale_(o)\ntorch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)\ns.step(o)\n",
    "back to training": "o = SGD(m.parameters())\nfor e in range(9):\n    m.train()\n    for b in l:\n        m(b).backward()\n        o.step()\n    m.eval()\n    check(m)\n",
    "evaluated at the end": "o = SGD(m.parameters())\nfor b in l:\n    m(b).backward()\n    o.step()\nm.eval()\ncheck(m)\n",
    "a teacher that is only asked": "t.eval()\no = SGD(m.parameters())\nfor b in l:\n    (m(b) - t(b)).backward()\n    o.step()\n",
    "three checkpoints": "args = TrainingArguments('x', save_total_limit=3)\n",
    "no training": "import torch\nprint(torch.ones(3))\n",
}  # fmt: skip


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_found(name):
    check, text = TRAPS[name]
    found = look(text, "train.py")
    assert any(one.check.startswith(check) and one.line > 0 and one.do for one in found), found


@pytest.mark.parametrize("name", SOUND)
def test_what_only_looks_like_one_is_silent(name):
    assert [] == look(SOUND[name], "train.py")


def test_a_file_that_is_no_python_is_one_line():
    (found,) = look("def f(:\n", "train.py")
    assert ("failed", 1) == (found.outcome, found.line)
    assert 1 == len(look("\0", "train.py"))


MET_LATER = {
    "a name for the condition": "main = rank == 0\nif main:\n    dist.barrier()\n",
    "a match": "match rank:\n    case 0:\n        dist.barrier()\n    case _:\n        pass\n",
    "as often as the rank": "for i in range(rank):\n    dist.barrier()\n",
    "a shard's state": "if dist.get_rank() == 0:\n    torch.save(get_model_state_dict(model), 'x')\n",
    "a sharded optimizer's state": "if rank == 0:\n    optimizer.consolidate_state_dict()\n",
    "frozen after prepare": "a = Accelerator()\nmodel, o, l = a.prepare(model, o, l)\nmodel.encoder.requires_grad_(False)\n",
    "not the first": "if not dist.get_rank():\n    dist.barrier()\n",
    "parameters in a variable": "params = [p for p in model.parameters() if p.requires_grad]\nopt = torch.optim.AdamW(params)\nfully_shard(model)\n",
    "a named parameter": "model = DDP(model)\nfor name, p in model.named_parameters():\n    p.requires_grad_(False)\n",
}
"""Traps that were thought of after the first look was written; of thirteen such, seven were found at once."""


@pytest.mark.parametrize("name", MET_LATER)
def test_a_trap_that_was_met_later_is_found(name):
    assert look(MET_LATER[name], "train.py")


def test_a_match_whose_cases_call_the_same_is_silent():
    assert [] == look(
        "match rank:\n    case 0:\n        dist.barrier()\n    case _:\n        dist.barrier()\n", "train.py"
    )
