"""What only the script knows: reinforcement learning and generative models."""

from holter.faults.family import CauseEntry, Consequence, Damage, DetectorEntry, Family, Row, Stage
from holter.faults.logged.adapter_norm import AdapterNorm
from holter.faults.logged.codebook_usage import CodebookUsage
from holter.faults.logged.importance_ratio import ImportanceRatio
from holter.faults.logged.inactive_terms import InactiveTerms
from holter.faults.logged.kl_term import KlTerm
from holter.faults.logged.learning_signal import LearningSignal
from holter.faults.logged.output_variety import OutputVariety
from holter.faults.logged.policy_entropy import PolicyEntropy
from holter.faults.logged.reward_spread import RewardSpread
from holter.faults.logged.reward_trend import RewardTrend
from holter.faults.logged.rollout_weights import RolloutWeights
from holter.records import Fix

_NO_GROUPS = "rewards by group (`watch.log(rewards=...)`): only a summary of them was logged"
_NO_VOCABULARY = "the size of the vocabulary (`watch.log(vocabulary=...)`)"
_NO_TERM = "the KL term as it enters the loss (`watch.log(loss_terms={'kl': ...})`): a script without one may log a zero in its place"
_NO_SIZE = "the size of the codebook (`watch.log(codebook_size=...)`)"

_CAST_ALONE = "the importance ratios (`watch.log(ratio=...)`): another dtype alone is how most engines generate"

ZERO_ADVANTAGES = CauseEntry(
    cause="zero_advantages",
    happened="All advantages are zero, so that only the KL term is trained.",
    mechanism=(
        "The advantage of a sample is its reward less its group's mean, divided by the group's deviation. With equal rewards it is zero for "
        "all, and the policy's gradient with it. What is left is the pull toward the reference: the policy forgets what it had learnt while "
        "the loss is small and steady."
    ),
    would_refute="Rewards or advantages within a group differ.",
    refuting_fact="has_spread",
    is_refuted_by=True,
    rows=(
        Row("reward_spread", 0.95, "observation", seen=("is_lost_after_rewards",)),
        Row("reward_spread", 0.95, "observation", seen=("has_no_spread", "is_counted"), absent=("has_spread",)),
        Row("reward_spread", 0.90, "observation", seen=("has_no_spread",), absent=("has_spread",)),
        Row("reward_spread", 0.50, "inference", missing=_NO_GROUPS),
    ),
    fix=Fix(
        do=(
            "Print prompt, completions and rewards of one group. All right: the task is solved, stop or take harder prompts. All wrong: take "
            "easier prompts, more samples a group, or partial credit. All equal although completions differ: the reward function cannot "
            "read them (a parser that fails, a format that is never met, a clip or a rounding). Rewards that differ and advantages of zero: the code "
            "between the two (the wrong dimension is averaged, groups of one, an integer dtype, a mask). Drop groups without spread and draw others "
            "in their place (dynamic sampling)."
        ),
        changes="Which samples are trained on, or how they are rewarded; rewards before and after are not comparable.",
        does_not_fix="Drift toward the reference in the steps since: if the policy had been better before, go back to a checkpoint from before this step.",
        expect="The share of groups without spread falls well below one, and the reward's deviation is above zero at every log.",
        verify="`rewards.std(dim=-1)` is above zero for at least some groups of each step, and this incident is not opened again.",
        otherwise="If completions within a group are equal, it is sampling that collapsed: temperature 0, one seed for all samples, or an entropy near zero.",
    ),
)  # fmt: skip

CODEBOOK_COLLAPSE = CauseEntry(
    cause="codebook_collapse",
    happened="The quantiser uses few of its codes.",
    mechanism=(
        "Only the nearest code gets a gradient (or an average) from an input. Once a few codes lie in the middle of the encoder's outputs "
        "they win every time, the others get nothing and stay where they are. A bad start (codes far from the data), a commitment term that "
        "is too weak or too strong, or an encoder that shrinks its output begin it."
    ),
    would_refute="The usage or perplexity of the codebook rises again.",
    refuting_fact="is_recovering",
    is_refuted_by=True,
    damage=Damage("before the step", "suspect", "few codes of the codebook are used"),
    rows=(
        Row("codebook_usage", 0.95, "observation", seen=("has_low_usage", "is_size_known"), absent=("is_recovering",)),
        Row("codebook_usage", 0.88, "observation", seen=("has_low_usage",), absent=("is_recovering",)),
        Row("codebook_usage", 0.60, "inference", missing=_NO_SIZE),
    ),
    fix=Fix(
        do=(
            "Stop wasting the run: dead codes do not come back by themselves. Start the codebook from data (k-means of the first batches), "
            "re-seed codes that nobody chose for a few hundred steps with inputs of the batch, use averaged updates, cosine distance or a "
            "lower code dimension; weigh the commitment term at about 0.25. Resume from a checkpoint from before the collapse."
        ),
        changes="How the codebook is updated. The decoder must learn new codes: expect a worse reconstruction for a while.",
        does_not_fix="A decoder that has learnt to ignore its codes: after a long collapse start again.",
        expect="Perplexity rises to a sizeable part of the codebook's size within a few thousand steps, and reconstruction improves with it.",
        verify="Count the different codes in a batch of a few thousand vectors: many more than a tenth of the codebook.",
        otherwise=(
            "If the encoder's outputs are all alike, it is the encoder that collapsed: look at its gradient and at the straight-through estimator. If usage "
            "is low because batches are small, measure it over many batches."
        ),
    ),
)  # fmt: skip

AUXILIARY_LOSS_INACTIVE = CauseEntry(
    cause="auxiliary_loss_inactive",
    happened="A term of the loss carries no gradient: it is added and shown, and teaches nothing.",
    mechanism=(
        "The term was computed under `no_grad` or inference mode, from detached tensors, from `.item()`, `.data` or numpy, or by an operation "
        "without a derivative (argmax, counting, rounding). It changes the value of the loss and no weight."
    ),
    would_refute="The term's tensor requires a gradient.",
    refuting_fact="has_gradient",
    is_refuted_by=True,
    rows=(
        Row("inactive_terms", 0.92, "observation", seen=("is_without_gradient",), absent=("has_gradient",), unless=("is_kl",)),
        Row("balance_term", 0.92, "observation", seen=("is_without_gradient",), absent=("has_gradient",)),
        Row("balance_term", 0.50, "inference", missing="more looks at the term's gradient"),
        Row("inactive_terms", 0.50, "inference", missing="the term's tensor at more logs (`watch.log(loss_terms={...})`)"),
    ),
    fix=Fix(
        do=(
            "Print `term.requires_grad` and `term.grad_fn` where the loss is summed, and go back from there: the first None is the place. Compute "
            "it from the tensors of the graph: probabilities instead of counts, no `.item()`, no `detach()` on the side that should learn."
        ),
        changes="The term begins to act: its weight, never felt so far, may be too large.",
        does_not_fix="What the term should have held until now (balance, distance, entropy).",
        expect="The term falls, or levels off, against the others within some hundred steps.",
        verify="`torch.autograd.grad(term, parameters, allow_unused=True)` has entries that are not None and not zero.",
        otherwise="If it is only shown and not meant to teach, log it under another name than the terms of the loss.",
    ),
)  # fmt: skip

ENTROPY_COLLAPSE = CauseEntry(
    cause="entropy_collapse",
    happened="The policy's entropy fell to nearly nothing: it has one answer left.",
    mechanism=(
        "Updates that reward what was sampled make it likelier to be sampled again. Without anything that holds entropy up (a bonus, a KL "
        "term, a clip that lets unlikely tokens grow) the distribution sharpens until samples of a group are all alike."
    ),
    would_refute="The entropy rises again by itself.",
    refuting_fact="is_returning",
    is_refuted_by=True,
    damage=Damage("before the step", "suspect", "the policy has collapsed to few answers"),
    rows=(
        Row("policy_entropy", 0.93, "observation", seen=("is_collapsed", "is_vocabulary_known"), absent=("is_returning",)),
        Row("policy_entropy", 0.80, "documented", seen=("is_collapsed",), absent=("is_returning",)),
        Row("policy_entropy", 0.40, "inference", missing=_NO_VOCABULARY),
    ),
    fix=Fix(
        do=(
            "Go back to a checkpoint from before the named step. Hold entropy up: an entropy bonus, a stronger KL term, a higher clip for "
            "rising ratios than for falling ones, a lower learning rate, a sampling temperature of 1."
        ),
        changes="How fast the policy sharpens; rewards rise more slowly at first.",
        does_not_fix="The policy as it is now: it no longer samples what it would have to learn from.",
        expect="Entropy falls slowly and levels off well above zero, while the reward still rises.",
        verify="Samples of one prompt at temperature 1 differ from each other, and entropy stays above its limit for a few hundred logs.",
        otherwise="If the task has one right answer for each prompt and it is found, this is success: stop, or take harder prompts.",
    ),
)  # fmt: skip

ENTROPY_EXPLOSION = CauseEntry(
    cause="entropy_explosion",
    happened="The policy's entropy rose to nearly its largest possible value: it writes gibberish.",
    mechanism=(
        "An entropy bonus that outweighs the reward, a learning rate that is too high, or advantages of the wrong sign flatten the "
        "distribution until every token is about as likely as any other."
    ),
    would_refute="The entropy falls again by itself.",
    refuting_fact="is_returning",
    is_refuted_by=True,
    damage=Damage("before the step", "suspect", "the policy gives gibberish"),
    rows=(
        Row("policy_entropy", 0.93, "observation", seen=("is_exploded", "is_vocabulary_known"), absent=("is_returning",)),
    ),
    fix=Fix(
        do=(
            "Stop, and go back to a checkpoint from before the named step. Lower the entropy bonus (or anneal it), then the learning rate; "
            "check the sign of advantages and of the loss; stop the bonus above a target entropy."
        ),
        changes="The balance of reward and exploration.",
        does_not_fix="The weights since the named step: a flattened policy does not recover.",
        expect="Entropy stays well under nine tenths of log(vocabulary).",
        verify="Read samples: they are sentences. Entropy over the next hundred logs does not rise.",
        otherwise="If samples read well and entropy is high, the logged entropy is of something else: raw logits before the temperature, or padding.",
    ),
)  # fmt: skip

KL_INACTIVE = CauseEntry(
    cause="kl_inactive",
    happened="The KL term is exactly zero although the policy has moved, or carries no gradient.",
    mechanism=(
        "The term was computed under `no_grad` or from detached tensors: it is shown and holds nothing. Or policy and reference are the same object, or the same weights: a reference made without a copy, an adapter that is active in both "
        "passes, a swap whose cached casts are used. Their difference is zero, so is its gradient, and nothing holds the policy."
    ),
    would_refute="The KL is above zero at some log.",
    refuting_fact="is_active",
    is_refuted_by=True,
    rows=(
        Row("inactive_terms", 0.92, "observation", seen=("is_without_gradient", "is_kl"), absent=("has_gradient",)),
        Row("kl_term", 0.85, "documented", seen=("is_zero", "has_term"), absent=("is_active",)),
        Row("kl_term", 0.60, "inference", seen=("is_zero",), missing=_NO_TERM),
        Row("kl_term", 0.30, "inference", unless=("is_far_at_first",), missing=_NO_TERM),
    ),
    fix=Fix(
        do=(
            "Compute both models' log-probabilities of one batch and compare: equal to the last bit means the reference is the policy. "
            "`copy.deepcopy` and freeze it before training, disable the adapter in the reference pass, leave the autocast region between "
            "the two."
        ),
        changes="The loss gains the term that it was meant to have; rewards will rise more slowly.",
        does_not_fix="The distance that the policy has already gone: decide by its samples whether to go on or back.",
        expect="KL is zero at the first step and above zero from the second on.",
        verify="`kl > 0` and `kl.requires_grad` after ten steps.",
        otherwise="If the KL's weight is zero on purpose, do not log it, or log the true KL without its weight.",
    ),
)  # fmt: skip

WRONG_REFERENCE = CauseEntry(
    cause="wrong_reference",
    happened="The KL is measured against another model than the one this run began with.",
    mechanism=(
        "A policy and its reference are equal before the first update, so that their KL is zero. It was not: the reference was loaded from "
        "another checkpoint, was initialised anew, is a base model where the policy was fine-tuned, reads another template or adapter, or "
        "its log-probabilities are of other tokens."
    ),
    would_refute="The KL is near zero at the first log.",
    refuting_fact="is_active",
    is_refuted_by=True,
    rows=(
        Row("kl_term", 0.70, "inference", seen=("is_far_at_first",), missing="whether this policy was trained before and is held to an older model on purpose"),
    ),
    fix=Fix(
        do=(
            "Compare both models' fingerprints before the first step, and the log-probabilities of one batch: they are equal. Make the reference as a copy of the "
            "policy, or load both from the same checkpoint, with the same tokenizer, template and dtype."
        ),
        changes="Where the policy is pulled to.",
        does_not_fix="The updates since the first step: start again from the policy's own checkpoint.",
        expect="The KL is zero at the first log, but for rounding and dropout.",
        verify="The first logged KL of the next run is under a hundredth.",
        otherwise="If the policy was trained before and the reference is the model that it came from, nothing is wrong.",
    ),
)  # fmt: skip

KL_SIGN_FLIPPED = CauseEntry(
    cause="kl_sign_flipped",
    happened="The KL term rewards distance from the reference.",
    mechanism=(
        "The term enters the loss with the sign that it has in a reward: minus. Then the optimizer lowers the loss by moving away from the "
        "reference, the faster the farther it is."
    ),
    would_refute="The term of the loss has the sign of the KL.",
    refuting_fact="is_active",
    is_refuted_by=True,
    damage=Damage("with the step", "suspect", "the penalty pushes the policy away from its reference"),
    rows=(
        Row("kl_term", 0.90, "observation", seen=("is_flipped", "has_term"), absent=("is_active",)),
    ),
    fix=Fix(
        do="Stop. A loss takes `+ beta * kl`, a reward takes `- beta * kl`. Correct the sign, and resume from a checkpoint from before training with it began.",
        changes="The direction of one term.",
        does_not_fix="The policy, which has been driven away from its reference since the first step.",
        expect="KL rises slowly and levels off; its term is positive.",
        verify="With the reward term switched off, KL falls from step to step.",
        otherwise="If the sign is right, the estimator is at fault: use `p * log(p / q)` over all tokens, or the non-negative estimate `exp(d) - d - 1` over samples.",
    ),
)  # fmt: skip

REWARD_COLLAPSE = CauseEntry(
    cause="reward_collapse",
    happened="The reward fell from its best level and stays down.",
    mechanism=(
        "An update that was too large, data that is too old for the policy, a reward model that the policy has left behind, or an entropy "
        "near either end: the policy enters a region from which its own samples no longer lead back."
    ),
    would_refute="The reward is coming back.",
    refuting_fact="is_recovering",
    is_refuted_by=True,
    damage=Damage("before the step", "suspect", "the reward had fallen, and stayed down"),
    rows=(
        Row("reward_trend", 0.80, "documented", seen=("has_fallen",), absent=("is_recovering",)),
        Row("reward_trend", 0.50, "inference", missing="more logs of the reward, to tell a dip from a fall"),
    ),
    fix=Fix(
        do=(
            "Go back to a checkpoint from before the named step. Look at KL, entropy, gradient norm and length of answers just before it, and "
            "mend the one that moved first; if none did, halve the learning rate."
        ),
        changes="How far a single update may go.",
        does_not_fix="A reward function that is wrong: then the best level was wrong too. Read samples from both sides of the step.",
        expect="The reward passes the named step at its former level.",
        verify="The median reward of the hundred logs after the named step is not below that of the hundred before.",
        otherwise="If prompts became harder at that step, nothing is wrong: compare rewards on a fixed set of prompts.",
    ),
)  # fmt: skip

TRAIN_INFERENCE_MISMATCH = CauseEntry(
    cause="train_inference_mismatch",
    happened="Importance ratios were off one before the first update: sampler and trainer disagree on the same weights.",
    mechanism=(
        "The engine that samples computes different log-probabilities than the one that trains: another precision or kernel, a temperature or a "
        "top-p that only one applies, another template or padding, weights that were not copied. Each update then corrects for it."
    ),
    would_refute="Ratios are near one on some first micro-step.",
    refuting_fact="is_ever_one",
    is_refuted_by=True,
    rows=(
        Row("importance_ratio", 0.90, "observation", seen=("is_off_at_first",), absent=("is_ever_one",)),
        Row("importance_ratio", 0.50, "inference", missing="importance ratios of the first micro-step of the run"),
    ),
    fix=Fix(
        do=(
            "Take one sample and compare log-probabilities token by token from both engines. All off by a factor: temperature. Off from one "
            "position on: template or padding. A little off everywhere: precision (use the same, compute the last layer in fp32). Only "
            "later: weights are not copied after an update. Meanwhile recompute the old log-probabilities in the trainer."
        ),
        changes="Recomputing costs one more forward pass a rollout; the rest makes both engines agree.",
        does_not_fix="Updates made so far: they were biased, by how much depends on the clip.",
        expect="Ratios of the first micro-step after a rollout are within a few percent of one.",
        verify="The largest distance of a ratio from one before the first update is under 0.05.",
        otherwise="If samples are used for several updates on purpose, log the ratios of the first one only.",
    ),
)  # fmt: skip

STALE_ROLLOUT_WEIGHTS = CauseEntry(
    cause="stale_rollout_weights",
    happened="The weights that sample are not those that are trained: old, partly loaded, or missing.",
    mechanism=(
        "The copy that generates was made at the beginning and is not renewed: the push of weights fails, goes to another object, or leaves "
        "out what was merged, cast or sharded. Each update takes the policy farther from the samples it is judged by."
    ),
    would_refute="Ratios come back to one at some first micro-step: the copy was renewed.",
    refuting_fact="is_ever_one",
    is_refuted_by=True,
    rows=(
        Row("importance_ratio", 0.85, "documented", seen=("is_moving_away",), absent=("is_ever_one",)),
        Row("rollout_weights", 0.95, "observation", seen=("is_compared",), absent=("is_ever_one",)),
        Row("rollout_weights", 0.60, "inference", seen=("is_cast",), missing=_CAST_ALONE),
        Row("rollout_weights", 0.55, "inference", missing=_CAST_ALONE),
    ),
    fix=Fix(
        do=(
            "Compare a fingerprint of the weights in the sampler with the trainer's after each push, parameter by parameter. Push after every "
            "update (or every n, if that is meant), adapters merged, from the module that the optimizer holds."
        ),
        changes="Samples come from the policy that is trained.",
        does_not_fix="Updates made with stale samples: go back to a checkpoint from before ratios had left one by a fifth.",
        expect="Ratios are near one on each first micro-step after a push.",
        verify="The mean distance of ratios from one is under 0.05 just after a push.",
        otherwise="If samples are meant to stay the same (training from recorded data), log the ratios under another name.",
    ),
)  # fmt: skip

NO_LEARNING_SIGNAL = CauseEntry(
    cause="no_learning_signal",
    happened="What is generated leaves nothing to learn from: rewards are constant, completions all empty or cut.",
    mechanism=(
        "A reward that is the same for every completion has no advantage, and a completion that is empty, or cut and masked, has no token to train. Without another "
        "term the gradient is exactly zero: steps are taken, at full cost, and the weights stay what they are."
    ),
    would_refute="Rewards of a group differ, or the gradient is not zero.",
    refuting_fact="has_signal",
    is_refuted_by=True,
    passes_after_steps=3,
    rows=(
        Row("learning_signal", 0.95, "observation", seen=("has_no_signal", "is_gradient_zero")),
        Row("learning_signal", 0.90, "observation"),
    ),
    fix=Fix(
        do=(
            "Print prompt, completion and reward of one group. Rewards all the same: call the reward function by hand on a right and on a wrong answer (a parser that fails, a default that is always "
            "returned, a format that is never met). Completions all cut: raise `max_completion_length`, check the end token of tokenizer and template, or do not mask what is cut. All empty: the "
            "template ends with the end token, or the prompt is cut to nothing."
        ),
        changes="What is rewarded, or what is generated; rewards before and after are not comparable.",
        does_not_fix="A task that is too hard for the model: give partial credit, or easier prompts first.",
        expect="The reward's deviation is above zero at most logs, some completions end by themselves, and the gradient is not zero.",
        verify="`frac_reward_zero_std` falls below one and `completions/clipped_ratio` below one within the first logs.",
        otherwise="If all completions of a group are equal, it is the sampling: temperature zero, or one seed for all.",
    ),
)  # fmt: skip

CLAMPED_ADAPTER_NORM = CauseEntry(
    cause="clamped_adapter_norm",
    happened="An adapter's norm sits at the limit that clamps it.",
    mechanism=(
        "Each step pushes the norm beyond its limit and the clamp scales it back: the adapter can turn but not grow, and the optimizer's "
        "moments keep pushing. A limit that was set for another rank, scale or learning rate does that."
    ),
    would_refute="The norm is well below its limit at some log.",
    refuting_fact="is_below_limit",
    is_refuted_by=True,
    rows=(
        Row("adapter_norm", 0.93, "observation", seen=("is_at_limit",), absent=("is_below_limit",)),
        Row("adapter_norm", 0.50, "inference", missing="the limit that clamps the norm"),
    ),
    fix=Fix(
        do="Raise the limit, or lower what pushes: the learning rate, the adapter's scale (alpha / rank), or take a larger rank.",
        changes="How far the adapter may move the model.",
        does_not_fix="Moments of the optimizer that have filled up: they need a few hundred steps to settle.",
        expect="The norm levels off below its limit.",
        verify="At no log of the next hundred is the norm above 0.95 of its limit.",
        otherwise="If the norm follows every higher limit, the adapter is not the place to learn this: the loss asks for more than it can give.",
    ),
)  # fmt: skip

DEGENERATE_OUTPUTS = CauseEntry(
    cause="degenerate_outputs",
    happened="Outputs repeat one token.",
    mechanism=(
        "A reward that grows with length, a judge that is fooled by repetition, a broken end token, or greedy decoding of a policy without "
        "entropy: whatever repeats is sampled, rewarded and repeated more."
    ),
    would_refute="Outputs are varied.",
    refuting_fact="is_varied",
    is_refuted_by=True,
    damage=Damage("before the step", "suspect", "outputs repeat one token"),
    rows=(
        Row("output_variety", 0.90, "observation", seen=("is_repeating",), absent=("is_varied",)),
        Row("output_variety", 0.50, "inference", missing="the share of the commonest token over more logs"),
    ),
    fix=Fix(
        do=(
            "Read ten samples. Check that the end token is trained and not masked, that padding is not counted, and what the reward gives to "
            "a repeated token; add a penalty there. Go back to a checkpoint from before the named step."
        ),
        changes="What is rewarded, or when an output ends.",
        does_not_fix="A policy that has lost its entropy: look for that incident.",
        expect="The share of the commonest token is that of ordinary text: a few percent.",
        verify="Ten samples read well, and the share stays low for a few hundred logs.",
        otherwise="If samples read well, the share counts padding or the prompt: count the answer's tokens only.",
    ),
)  # fmt: skip

FAMILY = Family(
    detectors=(
        DetectorEntry(InactiveTerms(), Stage.LOGGED, "logged"),
        DetectorEntry(RolloutWeights(), Stage.FED, "logged"),
        DetectorEntry(LearningSignal(), Stage.LOGGED, "logged"),
        DetectorEntry(ImportanceRatio(), Stage.LOGGED, "logged"),
        DetectorEntry(RewardSpread(), Stage.LOGGED, "logged"),
        DetectorEntry(KlTerm(), Stage.LOGGED, "logged", tried_on="made-up windows"),
        DetectorEntry(CodebookUsage(), Stage.LOGGED, "logged"),
        DetectorEntry(AdapterNorm(), Stage.LOGGED, "logged", tried_on="made-up windows"),
        DetectorEntry(PolicyEntropy(), Stage.LOGGED, "logged", tried_on="made-up windows"),
        DetectorEntry(OutputVariety(), Stage.LOGGED, "logged", tried_on="made-up windows"),
        DetectorEntry(RewardTrend(), Stage.LOGGED, "logged", tried_on="made-up windows"),
    ),
    causes=(
        ZERO_ADVANTAGES, CODEBOOK_COLLAPSE, ENTROPY_COLLAPSE, ENTROPY_EXPLOSION, KL_INACTIVE, WRONG_REFERENCE, KL_SIGN_FLIPPED, REWARD_COLLAPSE,
        TRAIN_INFERENCE_MISMATCH, STALE_ROLLOUT_WEIGHTS, NO_LEARNING_SIGNAL, AUXILIARY_LOSS_INACTIVE, CLAMPED_ADAPTER_NORM, DEGENERATE_OUTPUTS,
    ),
    brings_about=(
        Consequence("reward_spread", ("policy_entropy", "output_variety", "reward_trend"), ("curves",)),
        Consequence("learning_signal", ("reward_spread", "policy_entropy", "output_variety", "reward_trend", "zero_gradients", "still_weights"), ("curves", "weights"), whenever=True),
        Consequence("rollout_weights", ("importance_ratio", "kl_term", "reward_trend"), ("curves",)),
        Consequence("policy_entropy", ("reward_spread", "output_variety", "reward_trend"), ("curves",)),
        Consequence("output_variety", ("reward_trend", "reward_spread")),
        Consequence("inactive_terms", ("kl_term", "policy_entropy", "output_variety", "reward_trend", "loss_terms"), ("curves",)),
        Consequence("kl_term", ("policy_entropy", "output_variety", "reward_trend", "loss_terms"), ("curves",)),
        Consequence("importance_ratio", ("kl_term", "policy_entropy", "reward_trend"), ("curves",)),
    ),
)  # fmt: skip
