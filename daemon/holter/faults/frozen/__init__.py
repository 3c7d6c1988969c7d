"""Parts of the model that should not move, and do, or were never right."""

from holter.faults.family import Consequence, DetectorEntry, Family, Stage
from holter.faults.frozen.causes import CAUSES
from holter.faults.frozen.declared_frozen import DeclaredFrozen
from holter.faults.frozen.frozen_divergence import FrozenDivergence
from holter.faults.frozen.frozen_movement import FrozenMovement

FAMILY = Family(
    detectors=(
        DetectorEntry(DeclaredFrozen(), Stage.INITIALISED),
        DetectorEntry(FrozenDivergence(), Stage.LOADED),
        DetectorEntry(FrozenMovement(), Stage.WEIGHTS_AFTER),
    ),
    causes=CAUSES,
    brings_about=(
        Consequence("declared_frozen", ("frozen_movement",), ("curves",), whenever=True),
        Consequence("frozen_divergence", ("batch_values", "missing_gradients"), ("curves",), whenever=True),
        Consequence("frozen_divergence", ("compute_dtype",), if_leader_is=("dtype_mismatch_across_ranks",), whenever=True),
        Consequence("frozen_divergence", ("nonfinite_values",), unless_follower_is=("nonfinite_input",), whenever=True),
        # What an empty encoder puts out is what the model is fed.
        Consequence("frozen_divergence", ("nonfinite_values",), if_leader_is=("frozen_component_uninitialised",), on_a_shared_rank=True, whenever=True),
        Consequence("frozen_movement", ("frozen_divergence", "replica_divergence")),
    ),
)  # fmt: skip
