"""Whether the final weights of two runs of train_gpt.py are the same, bit for bit.

    python deploy/examples/same_bits.py never-stopped resumed

The arguments are what `--save` was given; ends with 1 when a single bit differs.
"""

import sys

import torch


def main() -> int:
    """Compare, rank by rank."""
    first, second = sys.argv[1:3]
    num_parted = 0
    for rank in range(2):
        ours, theirs = (torch.load(f"{name}.{rank}", weights_only=True) for name in (first, second))
        for name, tensor in ours["model"].items():
            is_same = torch.equal(tensor.view(torch.uint8), theirs["model"][name].view(torch.uint8))
            num_parted += not is_same
        print(f"rank {rank}: {len(ours['model'])} tensors compared, {num_parted} differ")
    print("bit for bit the same" if not num_parted else "NOT the same")
    return int(num_parted > 0)


if __name__ == "__main__":
    sys.exit(main())
