"""FSDP2 (`fully_shard`) in a loop of one's own, on made-up numbers; it knows nothing of holter.

    torchrun --standalone --nproc-per-node 2 -m holter deploy/examples/train_fsdp.py

`--resume DIRECTORY` goes on from what a halt left (`holter-runs/RUN/checkpoints/30/state`).
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--resume", default="", help="directory of a checkpoint to go on from")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = load(options.resume, model, optimizer) if options.resume else 0

    for step in range(first, options.steps):
        seed = step * dist.get_world_size() + dist.get_rank()
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
        loss = nn.functional.mse_loss(model(x), x[:, :1].sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


def load(directory: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Weights and optimizer, of which each rank reads its shards; the completed steps."""
    weights, optim = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": optim, "step": 0}
    dcp.load(state, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return state["step"]


if __name__ == "__main__":
    main()
