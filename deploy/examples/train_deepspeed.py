"""DeepSpeed ZeRO-2 through accelerate, on made-up numbers; it knows nothing of holter.

    DS_ACCELERATOR=cpu torchrun --standalone --nproc-per-node 2 -m holter deploy/examples/train_deepspeed.py

`--stage 3` shards the parameters too. `--resume DIRECTORY` goes on from what `accelerator.save_state` or a halt wrote there.
"""

import argparse

import deepspeed.ops
import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.utils import set_seed
from torch import nn

# Used by inference alone, and compiled for a minute at its first use on a CPU.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--resume", default="", help="directory of a checkpoint to go on from")
    options = parser.parse_args()

    plugin = DeepSpeedPlugin(zero_stage=options.stage, gradient_clipping=1.0)
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    # There is no loader to tell it from.
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 8
    set_seed(1234)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    if options.resume:
        accelerator.load_state(options.resume)

    for step in range(model.global_steps, options.steps):
        seed = step * accelerator.num_processes + accelerator.process_index
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
        loss = nn.functional.mse_loss(model(x), x[:, :1].sin())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            accelerator.print(f"step {step:3d}  loss {loss.item():.4f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
