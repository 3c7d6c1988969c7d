"""What: every kind of fault, as lines of a script, by family; what cannot be injected says why."""

from tests.campaign import learning, replicas, signals, stops

KINDS = (*replicas.KINDS, *learning.KINDS, *signals.KINDS, *stops.KINDS)

EXCLUDED = {
    "clip_on_local_shard": "needs sharded weights",
    "parallel_input_mismatch": "needs a tensor- or context-parallel group",
    "stale_autocast_cache": "needs a loop of its own (the corpus has it)",
    "variance_without_samples": "shows in a warning's text alone",
    "overfitting": "needs hundreds of epochs",
    "host_unreachable": "needs a second host",
    "slow_device": "needs a device",
    "device_memory_error": "needs a device",
    "device_fault": "needs a device",
    "device_throttled": "needs a device",
    "link_errors": "needs a device",
    "device_memory_leak": "needs a device",
    "expert_collapse": "needs a mixture of experts",
    "expert_overflow": "needs a mixture of experts",
    "wrong_reference": "needs a second pretrained model",
    "wrong_weights_loaded": "needs parts of a model in files of their own",
}
"""Causes that are not drawn, and why."""
