"""ZeRO by DeepSpeed's own `initialize`, on gloo ranks, with a fault if one is named."""

from typing import Any

import deepspeed
import deepspeed.ops
import torch
from mesh_runs import Job, Net, batch, parse, train
from torch import nn
from torch.nn.functional import cross_entropy

# Compiled at first use for a minute, and used by inference alone.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class ZeroJob(Job):
    """One stage of ZeRO."""

    def build(self) -> nn.Module:
        """The model, one matrix frozen; with what the case puts into a buffer before the engine takes it."""
        model = Net(self.told.blocks)
        model.blocks[0].gate.requires_grad_(requires_grad=False)
        return model

    def optimize(self, held: list[nn.Parameter]) -> Any:
        """The engine's own, around the one that was asked for."""
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.told.accumulate,
            "zero_optimization": {"stage": int(self.told.kind)},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 5.0,
        }
        inner = super().optimize(held)
        self.engine, zero, _, _ = deepspeed.initialize(model=self.model, optimizer=inner, config=config)
        return zero

    def step(self, step: int) -> None:
        """One step."""
        for place in range(self.told.accumulate):
            tokens, labels = batch(self.part, step + 5000 * place)
            self.engine.backward(cross_entropy(self.engine(tokens).flatten(0, 1), labels.flatten()))
            self.engine.step()


if __name__ == "__main__":
    options = parse(("1", "2", "3"))
    deepspeed.init_distributed("gloo")
    torch.manual_seed(7)
    train(ZeroJob, options)
