"""What the model itself says."""

from holter.faults.row import Row

_NO_CENSUS = "a census of the whole model with its modules' classes"

ROWS: tuple[Row, ...] = (
    # architecture: where do the parameters lie?
    Row("lopsided_architecture", "architecture", 0.95, "observation", seen=("is_most_in_embeddings",), absent=("is_spread_out",)),
    Row("lopsided_architecture", "architecture", 0.90, "observation", seen=("is_most_in_one_place",), absent=("is_spread_out",)),
    Row("lopsided_architecture", "architecture", 0.60, "inference", missing=_NO_CENSUS),
    # initialisation: one value, and will it ever change?
    Row("implausible_initialisation", "initialisation", 0.93, "observation", seen=("is_constant",), absent=("is_varied", "is_most_of_the_model")),
    Row("implausible_initialisation", "initialisation", 0.85, "documented", seen=("is_constant",), absent=("is_varied",)),
    Row("implausible_initialisation", "initialisation", 0.85, "documented", seen=("is_stuck_at_zero",), absent=("is_varied",)),
    Row("implausible_initialisation", "initialisation", 0.60, "inference", missing="the values of the named tensors when training began"),
    # variance_of_nothing: torch says so.
    Row("variance_without_samples", "variance_of_nothing", 0.95, "observation", seen=("is_warned", "is_module_known")),
    Row("variance_without_samples", "variance_of_nothing", 0.90, "observation", seen=("is_warned",)),
    Row("variance_without_samples", "variance_of_nothing", 0.60, "inference", missing="the warning's text and place"),
)  # fmt: skip
