"""Mixtures of experts: routers that collapse and experts that are full."""

from holter.faults.experts.balance_term import BalanceTerm
from holter.faults.experts.expert_capacity import ExpertCapacity
from holter.faults.experts.expert_load import ExpertLoad
from holter.faults.family import CauseEntry, Consequence, DetectorEntry, Family, Row, Stage
from holter.records import Fix

EXPERT_COLLAPSE = CauseEntry(
    cause="expert_collapse",
    happened="A router sends nearly everything to few experts, or some experts get nothing.",
    mechanism=(
        "Only experts that are chosen learn, so that a router which prefers a few makes them better and prefers them more. A balancing term that is missing, detached or too "
        "weak, a bias or an initialisation that favours one expert, a large rate for the router, or inputs that all look alike begin it."
    ),
    would_refute="The load evens out by itself over the next hundred steps.",
    refuting_fact="is_evening_out",
    is_refuted_by=True,
    rows=(
        Row("expert_load", 0.93, "observation", seen=("is_one_sided",), absent=("is_evening_out",)),
        Row("expert_load", 0.40, "inference", missing="more looks at where the router sends its tokens"),
    ),
    fix=Fix(
        do="Raise the weight of the balancing term (0.01 is usual), or balance by a bias of the router that is moved against the load; look for a bias, an initialisation or a scale that favours one expert.",
        changes="Where tokens go; the loss rises a little at first.",
        does_not_fix="Experts that have learnt nothing until now: they start from where they began.",
        expect="The share of the busiest experts falls within some hundred steps, and no expert stays without tokens.",
        verify="Count tokens by expert over 100 steps: the largest share is below twice the balanced one.",
        otherwise="If the term acts and the load stays one-sided, compute the router in float32 and add noise to its logits; or go back to a checkpoint from before the collapse.",
    ),
)  # fmt: skip

EXPERT_OVERFLOW = CauseEntry(
    cause="expert_overflow",
    happened="Tokens beyond the capacity of experts are dropped: they pass the layer by.",
    mechanism=(
        "Each expert takes at most capacity factor times tokens times choices by number of experts. What a router sends beyond that is left out. A capacity factor that is too small, a router "
        "that is one-sided, or a capacity that was computed from another batch size, sequence length or number of ranks drops tokens at every step."
    ),
    would_refute="The dropped share falls under a few per cent by itself.",
    refuting_fact="is_evening_out",
    is_refuted_by=True,
    rows=(
        Row("expert_capacity", 0.92, "observation", seen=("is_capacity_exceeded",), absent=("is_evening_out",)),
        Row("expert_capacity", 0.40, "inference", missing="more looks at what experts are sent and given"),
    ),
    fix=Fix(
        do="Raise the capacity factor (1.25 to 2 while training), and see that capacity is computed from the tokens of this call; if few experts take everything, balance the router first.",
        changes="Memory and time of the expert layers.",
        does_not_fix="What the dropped tokens should have taught.",
        expect="The dropped share falls under a few per cent.",
        verify="Print tokens sent and tokens received by expert for one batch: they agree, or nearly.",
        otherwise="Route without dropping (sorted or block-sparse experts), so that no capacity is needed.",
    ),
)  # fmt: skip

FAMILY = Family(
    detectors=(
        DetectorEntry(BalanceTerm(), Stage.FORWARD),
        DetectorEntry(ExpertLoad(), Stage.FORWARD),
        DetectorEntry(ExpertCapacity(), Stage.FORWARD),
    ),
    causes=(EXPERT_COLLAPSE, EXPERT_OVERFLOW),
    brings_about=(
        # Without balancing the router collapses, and a collapsed router fills its experts.
        Consequence("balance_term", ("expert_load", "expert_capacity"), whenever=True),
        Consequence("expert_load", ("expert_capacity",), whenever=True),
        # A router that is sure of itself has no gradient, and neither have experts without tokens.
        Consequence(
            "expert_load",
            ("gradient_vanishing", "gradient_balance", "zero_gradients", "missing_gradients"),
            whenever=True,
        ),
    ),
)
