"""The seed that an iterator of a DataLoader draws, where a run is resumed within a pass: the halted run drew it long ago.

    halted run    iter(loader) draws a seed   step 28   step 29   step 30 …        state when step 30 began: S
    resumed       load_state   iter(loader) draws a seed            step 30 …      S only if what was loaded lies a seed before S

So a framework that resumes in this order is given the state from before that seed, for every loader that has no generator of its own. At the
beginning of a pass the run has drawn its seed after S, and S is what is loaded.
"""

from typing import TYPE_CHECKING

import torch

from holter.frameworks.saving import twister

if TYPE_CHECKING:
    from holter.rank.context import Context
    from holter.rank.undo.rewind import Rewound

AT_STEP = "torch_at_step"
"""Under this name a file of random states has S as well, for those who set it when the loader has drawn."""


def num_ahead(context: "Context", rewound: "Rewound") -> int:
    """How many seeds a resumed loop draws from torch's generator before the step, that the halted run did not draw after it began."""
    feeding = context.data.under_way(context.undo.rewind.fed_by)
    drawn = [seeds for loader, seeds in feeding if loader.generator is None]
    own = set(twister.seeds(rewound.torch_state, len(drawn)))
    return sum(own.isdisjoint(seeds) for seeds in drawn)


def as_loaded(state: torch.Tensor, num_seeds: int) -> dict[str, torch.Tensor]:
    """What torch has in a file in accelerate's shape: what is loaded, and S where that is another."""
    before = twister.before_seeds(state, num_seeds) if num_seeds else None
    return {"torch_manual_seed": state} if before is None else {"torch_manual_seed": before, AT_STEP: state}
