"""A loop of one's own on DistributedDataParallel, on made-up numbers; it knows nothing of holter.

    torchrun --standalone --nproc-per-node 2 -m holter deploy/examples/train_loop.py

`--resume DIRECTORY` goes on from what a halt left (`holter-runs/RUN/checkpoints/30/state`). Only `restore` needs holter: without it
the run goes on with the same weights and another dropout.
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS_PER_EPOCH = 16


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--resume", default="", help="directory of a checkpoint to go on from")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x = torch.randn(8 * STEPS_PER_EPOCH * dist.get_world_size(), 8)
    dataset = TensorDataset(x, x[:, :1].sin())
    sampler = DistributedSampler(dataset, seed=1234)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    torch.manual_seed(1234 + dist.get_rank())

    step = load(options.resume, model, optimizer) if options.resume else 0
    while step < options.steps:
        epoch, used = divmod(step, STEPS_PER_EPOCH)
        sampler.set_epoch(epoch)
        if options.resume and not used:
            restore(options.resume, model)  # At the beginning of an epoch the run makes its iterator afterwards.
        batches = iter(loader)
        for _ in range(used):
            next(batches)
        if options.resume and used:
            restore(options.resume, model)
        options.resume = ""
        for inputs, targets in batches:
            if step == options.steps:
                break
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0 and dist.get_rank() == 0:
                print(f"step {step:3d}  loss {loss.item():.4f}", flush=True)
            step += 1
    # If the model is what holds the group last, gloo's destructor hangs now and then (torch 2.13).
    del model, optimizer
    dist.destroy_process_group()


def load(directory: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Weights and optimizer; the completed steps."""
    weights, optim = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": optim, "step": 0}
    dcp.load(state, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return state["step"]


def restore(directory: str, model: nn.Module) -> None:
    """This rank's random states, and the buffers that are its own."""
    import holter  # noqa: PLC0415  only what resumes needs it

    holter.restore(directory, model)


if __name__ == "__main__":
    main()
