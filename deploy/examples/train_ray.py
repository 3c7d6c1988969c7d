"""Ray Train's TorchTrainer on made-up numbers: Ray starts the workers itself, so that holter comes by environment.

    HOLTER=1 python deploy/examples/train_ray.py

The run directory lies where Ray's workers work unless HOLTER_RUN_DIR says where; each worker is a rank.
"""

import argparse
import os

import ray
import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(options: dict[str, int]) -> None:
    """What each worker does; Ray has set the process group up."""
    torch.manual_seed(1234)
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x = torch.randn(2048, 8)
    dataset = TensorDataset(x, x[:, :1].sin())
    loader = ray.train.torch.prepare_data_loader(DataLoader(dataset, batch_size=8, shuffle=True))
    step = 0
    while step < options["steps"]:
        for inputs, targets in loader:
            if step == options["steps"]:
                break
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
    ray.train.report({"loss": loss.item()})


def main() -> None:
    """Two workers on this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    settings = {name: value for name, value in os.environ.items() if name.startswith("HOLTER")}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True, runtime_env={"env_vars": settings})
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"steps": options.steps},
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=False),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
