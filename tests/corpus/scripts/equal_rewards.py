"""Group-relative policy optimisation in which all rewards of every group are equal: only the KL term is trained (DAPO, GRPO)."""

import copy

import torch
from accelerate import Accelerator
from common import Net, batch, options

arguments = options()
accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
torch.manual_seed(7)
policy = Net()
reference = copy.deepcopy(policy).requires_grad_(requires_grad=False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(policy, optimizer)
generator = torch.Generator().manual_seed(100 + rank)
for step in range(arguments.steps):
    x, _ = batch(rank, step)
    logits = model(x).log_softmax(-1)
    actions = torch.multinomial(logits.exp().detach(), 8, replacement=True, generator=generator)
    rewards = (actions == 2).float() if arguments.healthy else torch.ones(actions.shape)
    spread = rewards.std(dim=1, keepdim=True)
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / (spread + 1e-4)
    chosen = logits.gather(1, actions)
    before = reference(x).log_softmax(-1)
    kl = (logits.exp() * (logits - before)).sum(-1).mean()
    loss = -(advantages * chosen).mean() + 0.05 * kl + 0.001 * (logits.exp() * logits).sum(-1).mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    accelerator.log({"reward": rewards.mean().item(), "reward_std": spread.mean().item(), "kl": kl.item()}, step=step)
accelerator.end_training()
