"""What to do after the fix of each cause: a small and a thorough fix, what to watch or test, how to roll back, and where the pattern is documented.

One table, so that it can be read from end to end. For a cause that is not in it, the aftercare follows from its entry: the
alert on its own name, and how to roll back from its damage.
"""

from dataclasses import dataclass

import msgspec

from holter.faults.family import CauseEntry
from holter.records import Fix


@dataclass(frozen=True)
class Aftercare:
    """The aftercare of one cause."""

    small: str
    """The fix that gets the run going again."""
    thorough: str
    """The fix that keeps it from happening again."""
    prevent: str
    """A setting, an alert or a test that prevents or notices it."""
    sources: tuple[str, ...] = ()
    """Where the pattern is documented: issues, papers, pages."""


_DDP = "PyTorch: DistributedDataParallel, https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html"
_AMP = "PyTorch: automatic mixed precision examples, https://docs.pytorch.org/docs/stable/notes/amp_examples.html"
_MIXED = "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740"
_SDC = "Dixit et al., Silent Data Corruptions at Scale, arXiv:2102.11245"
_META = "PyTorch: torch.nn.Module.to_empty, https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html"
_CHECKPOINT = "PyTorch: torch.utils.checkpoint (use_reentrant), https://docs.pytorch.org/docs/stable/checkpoint.html"
_RANDOM = "PyTorch: reproducibility, https://docs.pytorch.org/docs/stable/notes/randomness.html"
_RECORDER = "PyTorch: Flight Recorder, https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html"
_PALM = "Chowdhery et al., PaLM (loss spikes), arXiv:2204.02311"
_FREEZE = "PyTorch: locally disabling gradient computation, https://docs.pytorch.org/docs/stable/notes/autograd.html"

TABLE: dict[str, Aftercare] = {
    "nonfinite_input": Aftercare("Leave the bad sample out and resume.", "Validate samples when they are written, and refuse a batch that is not finite before it reaches the model, on all ranks alike.", "A test of the data set: `torch.isfinite` over every float field of every shard."),
    "nonfinite_forward": Aftercare("Run the named module in fp32.", "Bound what feeds it: normalise its input, add an epsilon to the division, root or logarithm, clamp logits.", "A unit test of the module with inputs of 10 and 100 times the usual size, in the dtype of the run.", (_MIXED,)),
    "nonfinite_backward": Aftercare("Add an epsilon where the derivative is infinite (sqrt at 0, log at 0, norm of a zero vector).", "Replace the operation by one whose derivative is bounded, e.g. `torch.where` on the input and on the output.", "`torch.autograd.gradcheck` of the custom function at its edges; one step under `set_detect_anomaly(True)` in the tests.", ("PyTorch: anomaly detection, https://docs.pytorch.org/docs/stable/autograd.html#anomaly-detection", "PyTorch issue: torch.where passes NaN of the branch not taken, https://github.com/pytorch/pytorch/issues/68425")),
    "activation_overflow": Aftercare("Run the named module in fp32.", "Train in bf16, or scale the residual branch down so that activations stay a decade below the limit.", "Log the largest activation of the named module; alert at a tenth of 65504.", (_MIXED,)),
    "hidden_nonfinite_loss": Aftercare("`logging_nan_inf_filter=False`.", "Find the NaN that the filter hid, as its own cause.", "Log the raw loss beside the smoothed one.", ("transformers: TrainingArguments.logging_nan_inf_filter, https://huggingface.co/docs/transformers/main_classes/trainer",)),
    "nonfinite_loss_function": Aftercare("Add an epsilon to the logarithm or the division in the loss.", "Compute the loss from logits (`cross_entropy`, `logsumexp`), in fp32.", "A test of the loss at 0, at 1 and for an empty mask."),
    "learning_rate_too_high": Aftercare("A third of the rate, from the last healthy checkpoint.", "A warm-up and a schedule that were tried on a short run: three rates, the largest that stays stable, halved.", "Plot `scheduler.get_last_lr()` over the whole run before it starts; keep clipping on.", ("Goyal et al., Accurate, Large Minibatch SGD (warm-up), arXiv:1706.02677",)),
    "exploding_gradients": Aftercare("Clip the norm at two or three times its usual size.", "Find the batch or module behind it; normalise before the named module, or lower its initial scale.", "Log the norm before clipping, and how often it is clipped.", ("Pascanu et al., On the difficulty of training recurrent neural networks, arXiv:1211.5063",)),
    "vanishing_gradients": Aftercare("A residual path or a normalisation around the named modules.", "An initialisation that keeps variance through depth, checked layer by layer.", "A test that the norms of the first and last layer lie within a factor of a thousand after one step.", ("Glorot and Bengio, Understanding the difficulty of training deep feedforward neural networks, AISTATS 2010",)),
    "imbalanced_gradients": Aftercare("A rate of its own for the named module.", "The same initial scale and normalisation as its peers.", "Log norms by module."),
    "loss_divergence": Aftercare("Go back before the onset, with half the rate.", "Compare rate, norm and data of the steps before it, and change the one that moved first.", "Keep several checkpoints, and an alert on this cause.", (_PALM,)),
    "loss_plateau": Aftercare("One batch, learnt by heart: that tells data from model.", "Check, in this order: what is trainable, gradients, rate, labels, the loss itself.", "A test that 200 steps on one batch bring the loss near zero."),
    "overfitting": Aftercare("Stop at the best evaluation.", "More or augmented data, weight decay or dropout, a smaller model: one at a time.", "Evaluate often enough to see the turn, and keep the best checkpoint (`load_best_model_at_end`)."),
    "dominating_loss_term": Aftercare("Weigh the terms so that they begin alike.", "One reduction for all terms (mean), weights as settings, logged.", "Log each term with `watch.log(loss_terms={...})`."),
    "frozen_set_mismatch": Aftercare("Freeze by one list of names on all ranks.", "One function that freezes, called before wrapping, without a branch on the rank.", "Declare what is frozen: HOLTER_FROZEN."),
    "frozen_component_uninitialised": Aftercare("Broadcast the component from a rank that has it.", "Load after `to_empty` on every rank, and check that no key is missing.", "A test that loads with `strict=True` and compares one checksum on all ranks.", (_META,)),
    "frozen_component_mismatch": Aftercare("Broadcast it from rank 0.", "Pin the revision, and load it from one place.", "Compare checksums of frozen weights at start."),
    "frozen_component_changed": Aftercare("Give the optimizer only what requires gradients.", "Freeze before the optimizer is built; put batch norms of the frozen part in evaluation mode.", "HOLTER_FROZEN names it: a change is found at its step.", (_FREEZE,)),
    "unfrozen_by_mistake": Aftercare("`requires_grad_(False)` on the named parameters, before the optimizer.", "Freeze last, after every loader and adapter.", "A test of the number of trainable parameters."),
    "stale_optimizer_parameters": Aftercare("Build the optimizer after wrapping.", "One function that builds model, wrapper and optimizer in this order.", "A test that one step changes a weight of the model that is saved.", ("PyTorch: FSDP, the optimizer must be built after wrapping, https://docs.pytorch.org/docs/stable/fsdp.html",)),
    "nothing_trainable": Aftercare("Load the adapter trainable (`is_trainable=True`).", "Assert that the optimizer has trainable parameters before the first step.", "A test of the number of trainable parameters.", ("PEFT: PeftModel.from_pretrained(is_trainable), https://huggingface.co/docs/peft/package_reference/peft_model",)),
    "graph_detached": Aftercare("`use_reentrant=False`, or `enable_input_require_grads()`.", "Take `detach`, `no_grad`, `.data` and `.item()` out of the path from the named modules to the loss.", "A test that every trainable parameter has a gradient after one backward pass.", (_CHECKPOINT, _FREEZE)),
    "dead_activations": Aftercare("A leaky activation, or a lower rate.", "Initialise and normalise so that the named layer's inputs are centred.", "Log the share of zeros of its output.", ("Lu et al., Dying ReLU and Initialization, arXiv:1903.06733",)),
    "gradients_never_cleared": Aftercare("`optimizer.zero_grad()` once a step.", "One training step function that clears, computes and steps.", "A test that two equal steps have equal gradient norms at a rate of zero."),
    "lost_update": Aftercare("Take out what writes the old values back.", "One owner of the weights: no copies restored in the loop.", "A test that one step changes every trainable tensor.", ("PyTorch: per-parameter options of optimizers, https://docs.pytorch.org/docs/stable/optim.html",)),
    "rounded_away_updates": Aftercare("fp32 weights in the optimizer, bf16 under autocast.", "Mixed precision by the framework, or stochastic rounding.", "Log the share of elements that a step changes.", (_MIXED,)),
    "every_step_skipped": Aftercare("Scaler off for one batch, to see the NaN.", "Train in bf16, which needs no scaler.", "Alert on a loss scale below 1.", (_AMP,)),
    "accumulation_not_normalised": Aftercare("Divide the loss by the number of micro-batches.", "Divide by the number of tokens or samples of the whole step, over all ranks.", "A test that one batch and the same batch in four pieces give the same gradient.", ("Hugging Face: Fixing gradient accumulation, https://huggingface.co/blog/gradient_accumulation",)),
    "average_not_tracking": Aftercare("Update the copy right after each step.", "`torch.optim.swa_utils.AveragedModel`, in fp32.", "Log the copy's distance: `watch.log(ema=copy)`.", ("PyTorch: AveragedModel, https://docs.pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema",)),
    "zero_gradients": Aftercare("Take out the clamp, floor or saturated function before the loss.", "A loss that has a slope wherever the model can be.", "A test that the gradient norm of the first step is above zero.", (_FREEZE,)),
    "trained_in_evaluation_mode": Aftercare("`model.train()` before the loop.", "Set the mode where the phase begins: in the training and the evaluation function.", "Assert `model.training` in the training step."),
    "precision_round_trip": Aftercare("Take out the cast that writes the tensor.", "One dtype for what is stored, another for what is computed, by autocast.", "A test that saving and loading keeps every bit."),
    "dtype_changed": Aftercare("Undo the cast after evaluation or export.", "Cast a copy for export, never the live model.", "Assert the dtype at the start of each epoch."),
    "gradient_underflow": Aftercare("A GradScaler.", "bf16, with fp32 weights.", "Log the share of zeros in gradients.", (_MIXED, _AMP)),
    "buffer_precision_loss": Aftercare("Assign the buffer anew in fp32.", "Exclude it from casts by its module (`_keep_in_fp32_modules`, a custom `_apply`).", "A test that positions beyond 2048 have different encodings.", ("transformers: LlamaRotaryEmbedding, wrong cache value when the model is cast to half precision, https://github.com/huggingface/transformers/issues/25681",)),
    "lost_buffer": Aftercare("Compute it anew after loading.", "Make it persistent, or compute it in `reset_parameters`.", "A test that a model built on `meta` and loaded equals one built plainly.", (_META,)),
    "stale_autocast_cache": Aftercare("Leave the autocast region before weights are swapped.", "`cache_enabled=False` where two sets of weights run in one region.", "A test that the KL of two different models is above zero.", ("PyTorch: torch.autocast (cache_enabled), https://docs.pytorch.org/docs/stable/amp.html",)),
    "autocast_not_applied": Aftercare("Open the region around the call itself.", "One context for the forward pass, on all ranks.", "Assert the output's dtype in a test."),
    "unsynced_initialisation": Aftercare("`init_sync=True`, or broadcast once.", "One seed before the model is built, another afterwards for data.", "Compare one checksum of the weights at step 0 (holter does).", (_DDP,)),
    "gradient_sync_bypassed": Aftercare("Call the wrapper.", "Keep no name for the inner module in the training loop; `no_sync` only around micro-batches that do not step.", "A test on two ranks: equal weights after one step.", (_DDP,)),
    "unreduced_parameters": Aftercare("`find_unused_parameters=True`, for now.", "Freeze and unfreeze before wrapping; take unused layers out of the model.", "A test that after one step no trainable parameter has `grad is None`.", (_DDP, "PyTorch issue: Expected to have finished reduction in the prior iteration, https://github.com/pytorch/pytorch/issues/43259")),
    "uneven_clipping": Aftercare("Clip on all ranks.", "No condition on the rank between backward and step.", "A test on two ranks: equal norms after clipping."),
    "wrong_weights_loaded": Aftercare("Load the right file on the named rank and start again.", "One function that maps names of the whole model to the rank's own, used for saving and for loading.", "A test that saves and loads on all ranks and compares the first loss."),
    "clip_on_local_shard": Aftercare("Clip by the wrapper's own function.", "One helper for clipping that knows the sharding.", "A test that two shards and one rank clip alike.", ("PyTorch: FullyShardedDataParallel.clip_grad_norm_, https://docs.pytorch.org/docs/stable/fsdp.html",)),
    "optimizer_state_mismatch": Aftercare("Load the optimizer's state on every rank.", "Save and load it by the framework; step the schedule on all ranks.", "Compare rate and step count after a resume.", ("PyTorch: distributed checkpoint, https://docs.pytorch.org/docs/stable/distributed.checkpoint.html",)),
    "corrupted_collective": Aftercare("Another host for the named rank.", "Test links and memory of that host before it comes back.", "A burn-in of hosts before a long run; alert on this cause.", (_SDC, "Grattafiori et al., The Llama 3 Herd of Models (section on reliability), arXiv:2407.21783")),
    "silent_data_corruption": Aftercare("Take the host out.", "Run its vendor's memory and compute tests, and replace what fails.", "Compare replicas all the time (holter does); a burn-in before a long run.", (_SDC, "Hochschild et al., Cores that don't count, HotOS 2021")),
    "nondeterministic_drift": Aftercare("Reduce by `all_reduce`.", "Deterministic algorithms where replicas compute the same.", "`torch.use_deterministic_algorithms(True)` in a test.", (_RANDOM,)),
    "buffer_divergence": Aftercare("`broadcast_buffers=True`.", "SyncBatchNorm, or a normalisation without running statistics.", "Declare what may differ: HOLTER_LOCAL_BUFFERS.", (_DDP,)),
    "model_structure_mismatch": Aftercare("One config on all ranks.", "Build the model from a config that rank 0 broadcasts.", "Compare names and shapes at start (holter does)."),
    "gradient_scale_mismatch": Aftercare("Divide by the size of the group.", "One place that says mean or sum for each axis of the mesh.", "A test that one rank and two give the same gradient.", ("pytorch: Wrong-size gradients in Expert Parallel MoE, https://github.com/pytorch/pytorch/issues/160285", "torchtitan: Grad norm inconsistency when DDP / HSDP is applied, https://github.com/pytorch/torchtitan/issues/2318")),
    "parallel_input_mismatch": Aftercare("Broadcast the batch within the group.", "Shard data by the data-parallel axis alone; one seed a group.", "Compare the batch's checksum within the group.", ("PyTorch: Tensor Parallelism (inputs are replicated unless a style says otherwise), https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html",)),
    "dtype_mismatch_across_ranks": Aftercare("Name the dtype where the model is built.", "One config on all ranks; no fallback by device.", "Compare dtypes at start (holter does)."),
    "duplicate_data_across_ranks": Aftercare("A DistributedSampler.", "Let the framework prepare the loader.", "A test on two ranks: no sample twice in an epoch.", ("PyTorch: DistributedSampler, https://docs.pytorch.org/docs/stable/data.html",)),
    "double_sharded_data": Aftercare("Remove one of the two.", "Let the framework shard, and nobody else.", "A test that an epoch sees every sample."),
    "repeated_epoch_order": Aftercare("`set_epoch(epoch)`.", "A loader that does it by itself.", "`holter doctor --script train.py`; a test that two epochs differ.", ("PyTorch: DistributedSampler.set_epoch, https://docs.pytorch.org/docs/stable/data.html",)),
    "uneven_batches": Aftercare("`drop_last=True`.", "`Join`, or a sampler that pads.", "A test with a data set whose size no number of ranks divides.", ("PyTorch: distributed training with uneven inputs, https://docs.pytorch.org/tutorials/advanced/generic_join.html",)),
    "data_leakage": Aftercare("Take the shared samples out of the evaluation.", "Split by a hash of the sample, before augmentation.", "A test that no hash is in both sets.", ("Kapoor and Narayanan, Leakage and the Reproducibility Crisis in ML-based Science, arXiv:2207.07048",)),
    "class_imbalance": Aftercare("Weights of classes in the loss.", "Balanced sampling, and a metric by class.", "Log the metric of the rarest class.", ("Buda et al., A systematic study of the class imbalance problem, arXiv:1710.05381",)),
    "distribution_shift": Aftercare("Look at the batches of the named step.", "Normalise by statistics of the training set, kept with the model.", "Log mean and spread of inputs; alert on this cause.", ("Rabanser et al., Failing Loudly: An Empirical Study of Methods for Detecting Dataset Shift, arXiv:1810.11953",)),
    "corrupt_labels_or_range": Aftercare("Leave the bad samples out.", "Validate range and type when data are written.", "A test of the data set: labels within range, inputs normalised.", ("PyTorch: NLLLoss takes class indices from 0 to C-1, https://docs.pytorch.org/docs/stable/generated/torch.nn.NLLLoss.html", "Northcutt et al., Pervasive Label Errors in Test Sets, arXiv:2103.14749")),
    "lopsided_architecture": Aftercare("Tie input and output embeddings.", "A smaller vocabulary, or more layers, until the layers hold most parameters.", "Print the shares of parameters in the tests of the model's config."),
    "implausible_initialisation": Aftercare("Initialise the named tensors.", "One `reset_parameters` for every module, called after `to_empty`.", "A test that no weight of more than one element is constant.", (_META, "He et al., Delving Deep into Rectifiers, arXiv:1502.01852")),
    "variance_without_samples": Aftercare("`correction=0`, or skip the reduction where there is one sample.", "A batch or group size that is never one; `drop_last=True`.", "`-W error` in the tests: the warning is an error there."),
    "zero_advantages": Aftercare("Leave out groups whose rewards are all equal.", "Prompts of mixed difficulty, more samples a group.", "Log the share of such groups.", ("Yu et al., DAPO (dynamic sampling), arXiv:2503.14476",)),
    "codebook_collapse": Aftercare("Restart dead codes from the batch.", "An EMA codebook, started by k-means, with a lower commitment weight.", "`watch.log(codebook_usage=...)`.", ("van den Oord et al., Neural Discrete Representation Learning, arXiv:1711.00937",)),
    "entropy_collapse": Aftercare("An entropy bonus, from an earlier checkpoint.", "A KL term, clip-higher, more diverse prompts.", "`watch.log(entropy=..., vocabulary=...)`.", ("Cui et al., The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, arXiv:2505.22617",)),
    "entropy_explosion": Aftercare("Lower the entropy bonus.", "Anneal it, with a KL term.", "`watch.log(entropy=..., vocabulary=...)`."),
    "kl_inactive": Aftercare("Load the reference model on its own, frozen.", "A test of the term's gradient.", "A test that two different models have a KL above zero, with a gradient.", ("Schulman, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html",)),
    "kl_sign_flipped": Aftercare("Turn the sign.", "One function for the penalty, used in loss or reward, not in both.", "A test that the penalty grows with the distance."),
    "wrong_reference": Aftercare("Copy the policy before the first step.", "One function that makes both models.", "A test that the KL of a batch before the first update is zero."),
    "reward_collapse": Aftercare("Go back before the named step, with half the rate.", "A KL term, rewards normalised, the reward model checked on fresh samples.", "Log reward, KL and length together.", ("Gao et al., Scaling Laws for Reward Model Overoptimization, arXiv:2210.10760",)),
    "train_inference_mismatch": Aftercare("Compute old log-probabilities by the trainer.", "One precision and one implementation in both engines, or a correction by truncated importance sampling.", "`watch.log(ratio=...)`: ones at the first micro-step."),
    "stale_rollout_weights": Aftercare("Push all weights again.", "Compare a fingerprint after each push, and refuse to sample on a mismatch.", "A test that a pushed weight is found in the sampler, bit for bit.", ("vLLM: RLHF with weights that are pushed to a server, https://docs.vllm.ai/en/latest/examples/rl/rlhf_http_nccl/",)),
    "auxiliary_loss_inactive": Aftercare("Compute the term outside of `no_grad`.", "Build the sum of terms in one place, none detached.", "A test that each term has a gradient.", ("Fedus et al., Switch Transformers (load balancing), arXiv:2101.03961",)),
    "expert_collapse": Aftercare("Raise the balancing term.", "Noise in the router, or balancing by bias.", "Log the counts of experts.", ("Shazeer et al., Outrageously Large Neural Networks, arXiv:1701.06538",)),
    "expert_overflow": Aftercare("A larger capacity factor.", "Balance the router, or route without dropping.", "Log the dropped share.", ("Fedus et al., Switch Transformers, arXiv:2101.03961",)),
    "clamped_adapter_norm": Aftercare("Raise the limit.", "A larger rank, or a lower rate.", "Log the norm beside its limit."),
    "degenerate_outputs": Aftercare("Read ten samples; unmask the end token.", "Check labels, masks and padding of one batch by hand.", "A test that decodes a training batch and shows what is in the loss."),
    "no_learning_signal": Aftercare("Print prompt, completion and reward of one group.", "A reward with degrees, completions that can end.", "Log the spread of rewards and the share of truncated completions.", ("Yu et al., DAPO, arXiv:2503.14476",)),
    "rank_suspended": Aftercare("`kill -CONT PID`.", "Keep debuggers and freezers away from ranks.", "Alert on this cause."),
    "host_unreachable": Aftercare("Restart without the host.", "Find whether power, kernel or network ended it.", "Health checks of hosts before a job takes them."),
    "interpreter_locked": Aftercare("Run the call in a process of its own.", "Release the lock in the native code.", "Alert on this cause; a timeout around native calls."),
    "stalled_data_loader": Aftercare("`num_workers=0`, to see the error.", "A timeout of the loader, local copies of remote data, no locks held over fork.", "`DataLoader(timeout=...)`.", ("PyTorch: multiprocessing best practices, https://docs.pytorch.org/docs/stable/notes/multiprocessing.html",)),
    "stalled_checkpoint": Aftercare("Another target, after a test write.", "Asynchronous checkpoints, to a disk that was measured.", "`holter doctor` measures the disk; alert on this cause."),
    "rank_stuck_in_python": Aftercare("End the loop or the wait that the stack shows.", "A timeout for every wait of the script.", "A test that runs the step with the data that made it hang."),
    "rank_missing_from_collective": Aftercare("Move the call out of the condition on the rank.", "No collective under a condition that ranks can see differently; agree on it by a broadcast.", "`holter doctor --script train.py`; a test on two ranks.", (_RECORDER, "PyTorch: collective communication, https://docs.pytorch.org/docs/stable/distributed.html")),
    "rank_dead": Aftercare("Restart from the last checkpoint.", "What the kernel's log or the exit code names, mended.", "Keep `dmesg` of all hosts; alert on this cause."),
    "collective_order_mismatch": Aftercare("The same order on all ranks.", "Iterate over sorted names, never over sets or a rank's own dictionary.", "A test on two ranks with the condition that made them differ.", (_RECORDER,)),
    "collective_shape_mismatch": Aftercare("Pad to one shape.", "Agree on sizes first (`all_gather` of the lengths).", "A test with uneven batches on two ranks.", (_RECORDER,)),
    "collective_dtype_mismatch": Aftercare("Cast before the call.", "Name the dtype where the tensor is made, on all ranks.", "A test on two ranks that compares dtypes."),
    "slow_compute": Aftercare("End what else runs on that host.", "The same hardware, clocks and binding on all ranks.", "Alert on `holter_collective_lag_seconds`."),
    "slow_input": Aftercare("More workers.", "Decode ahead of time, read from local disks.", "Log the time spent waiting for data."),
    "slow_device": Aftercare("Another device.", "Cooling, power limit, firmware.", "Alert on `holter_device_*`."),
    "script_error": Aftercare("Mend the line that the traceback names.", "A test that runs that line with the data of that step.", "Two steps of the whole script in the tests: `holter doctor --launch -- …`."),
    "out_of_memory": Aftercare("A smaller batch with accumulation, or activation checkpointing.", "Measure the peak on the longest sample, and leave a tenth free.", "A test step with the longest sample; alert on memory.", ("PyTorch: understanding CUDA memory usage, https://docs.pytorch.org/docs/stable/torch_cuda_memory.html",)),
    "device_fault": Aftercare("Take the device out.", "What the vendor's page says of this Xid.", "Alert on `holter_device_*`.", ("NVIDIA: Xid errors, https://docs.nvidia.com/deploy/xid-errors/",)),
    "device_memory_error": Aftercare("Reset or replace the device.", "A remap, verified by the vendor's test.", "Alert on ECC counters.", ("NVIDIA: GPU memory error management, https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/",)),
    "device_throttled": Aftercare("Another host for this rank.", "Cooling, supply, and one power limit on all devices.", "Alert on `holter_device_throttled`."),
    "link_errors": Aftercare("Another host.", "Cables, switches and firmware, one at a time.", "Alert on the link's counters."),
    "device_memory_leak": Aftercare("Restart from a checkpoint now and then.", "Find what is kept: losses with graphs, lists of outputs, hooks.", "A test that memory after 20 and after 200 steps is equal."),
    "host_memory_leak": Aftercare("Restart workers each epoch.", "Find what grows: caches, lists, Python objects copied by workers.", "Alert on resident memory.", ("PyTorch: DataLoader memory grows with Python objects, https://github.com/pytorch/pytorch/issues/13246",)),
}  # fmt: skip
_DAMAGED = "Undo the change and start again from the newest healthy checkpoint (`holter checkpoint list RUN`): what was trained since is not to be kept."
_SOUND = "Undo the change and resume from the latest checkpoint: this cause spoils no weights, so nothing is lost."


def sources_of(cause: str) -> tuple[str, ...]:
    """Return where a pattern of this cause is documented; holter's own page on the cause if nothing else is known."""
    known = TABLE.get(cause)
    return known.sources if known and known.sources else (f"holter explain {cause}",)


def complete(entry: CauseEntry) -> Fix:
    """Return the cause's fix with its alternatives, what prevents the next occurrence, and how to roll back."""
    known = TABLE.get(entry.cause)
    alert = f'From now on: alert on holter_incident_open{{cause="{entry.cause}"}}'
    return msgspec.structs.replace(
        entry.fix,
        alternatives=(f"Small: {known.small}", f"Thorough: {known.thorough}")
        if known
        else (f"Small: {entry.fix.do}", f"Thorough: {entry.fix.otherwise}"),
        prevent=f"{known.prevent} {alert}." if known else f"{alert}.",
        roll_back=_DAMAGED if entry.damage else _SOUND,
    )
