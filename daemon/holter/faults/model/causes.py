"""The model itself."""

from holter.faults.family import CauseEntry, Consequence, Damage, DetectorEntry, Family, Row, Stage
from holter.faults.model.architecture import Architecture
from holter.faults.model.initialisation import Initialisation
from holter.faults.model.variance_of_nothing import VarianceOfNothing
from holter.records import Fix

_NO_CENSUS = "a census of the whole model with its modules' classes"

LOPSIDED_ARCHITECTURE = CauseEntry(
    cause="lopsided_architecture",
    happened="One component holds most of the model's parameters.",
    mechanism=(
        "A table of embeddings grows with vocabulary times width, the layers with width squared times depth. With a large vocabulary and a "
        "small width or depth the table outweighs everything that computes; most memory and communication serve rows that are rarely used."
    ),
    would_refute="The parameters are spread over many tensors.",
    refuting_fact="is_spread_out",
    is_refuted_by=True,
    rows=(
        Row("architecture", 0.95, "observation", seen=("is_most_in_embeddings",), absent=("is_spread_out",)),
        Row("architecture", 0.90, "observation", seen=("is_most_in_one_place",), absent=("is_spread_out",)),
        Row("architecture", 0.60, "inference", missing=_NO_CENSUS),
    ),
    fix=Fix(
        do=(
            "Nothing needs to stop. Compare vocabulary, width and number of layers with what was intended. If the table is too large: a "
            "smaller vocabulary, tied input and output embeddings, a factorised table, or a deeper model."
        ),
        changes="The architecture, so that training starts anew.",
        does_not_fix="A run that is under way: its checkpoints fit this architecture only.",
        expect="Embeddings hold a fifth to a half of a small language model, a few percent of a large one.",
        verify="Sum `p.numel()` by module: no single one holds over four fifths.",
        otherwise="If it is meant so (a recommender, a retrieval table), think of sparse gradients or a sharded table; else leave it.",
    ),
)  # fmt: skip

IMPLAUSIBLE_INITIALISATION = CauseEntry(
    cause="implausible_initialisation",
    happened="A weight that should vary has one value in all its elements.",
    mechanism=(
        "Units of a layer with equal weights compute the same thing and get the same gradient, so that they stay copies of each other for "
        "ever; a matrix of zeros between two others passes nothing on in either direction. It comes from `to_empty` or a meta device without "
        "a later initialisation, from an initialiser for biases applied to all parameters, or from names that a checkpoint did not hold."
    ),
    would_refute="The elements of the named tensors differ from each other.",
    refuting_fact="is_varied",
    is_refuted_by=True,
    damage=Damage("before the step", "suspect", "a weight that should vary is constant"),
    rows=(
        Row("initialisation", 0.93, "observation", seen=("is_constant",), absent=("is_varied", "is_most_of_the_model")),
        Row("initialisation", 0.85, "documented", seen=("is_constant",), absent=("is_varied",)),
        Row("initialisation", 0.85, "documented", seen=("is_stuck_at_zero",), absent=("is_varied",)),
        Row("initialisation", 0.60, "inference", missing="the values of the named tensors when training began"),
    ),
    fix=Fix(
        do=(
            "Stop the run: the named tensors cannot learn to differ, if they matter. Find who initialises them (`reset_parameters`, "
            "`_init_weights`, `load_state_dict(strict=False)` and its missing keys) and give them a random initialisation, or the weights "
            "that should have been loaded. Start again."
        ),
        changes="The values of the named tensors at step 0.",
        does_not_fix="A checkpoint of this run: the symmetry is in it, and in its optimizer's moments.",
        expect="The named tensors have a spread of about 1 / sqrt(inputs) at step 0, and the loss falls further than before.",
        verify="`tensor.std() > 0` for each of them right after the model is built and loaded, on every rank.",
        otherwise=(
            "If one value is meant (a gate, a scale, the closing matrix of a residual branch), make sure that gradients reach it: it must have "
            "changed after a few steps."
        ),
    ),
)  # fmt: skip

VARIANCE_WITHOUT_SAMPLES = CauseEntry(
    cause="variance_without_samples",
    happened="A variance or a standard deviation was taken over one sample or none.",
    mechanism=(
        "The unbiased estimate divides by the number of samples less one. With one sample that is 0 / 0: NaN. It passes into whatever is "
        "normalised by it, or into a comparison that is then false for ever: a halting rule that never fires, a mask that is always empty."
    ),
    would_refute="The reduced dimension had two elements or more.",
    refuting_fact="has_samples",
    is_refuted_by=True,
    rows=(
        Row("variance_of_nothing", 0.95, "observation", seen=("is_warned", "is_module_known")),
        Row("variance_of_nothing", 0.90, "observation", seen=("is_warned",)),
        Row("variance_of_nothing", 0.60, "inference", missing="the warning's text and place"),
    ),
    fix=Fix(
        do=(
            "Go to the file and line named here and look at the shape that is reduced: a batch or a group of one, a dimension squeezed away, a "
            "mask that leaves one element. Reduce over the dimension that was meant, use `correction=0` where a single sample is legal, or "
            "handle that case apart; drop the last incomplete batch if that is where it comes from."
        ),
        changes="One statistic. With `correction=0` it is smaller by (n - 1) / n everywhere.",
        does_not_fix="NaN that has already reached weights or running statistics: look for other incidents of this run.",
        expect="The warning no longer appears, and what depends on the statistic varies from step to step.",
        verify="Print the reduced shape and the result at that line for one step: more than one sample, a finite number.",
        otherwise="If the shape is right, an upstream filter empties it for some batches only: log how many samples are left at each step.",
    ),
)  # fmt: skip

FAMILY = Family(
    detectors=(
        DetectorEntry(Initialisation(), Stage.INITIALISED),
        DetectorEntry(Architecture(), Stage.INITIALISED),
        DetectorEntry(VarianceOfNothing(), Stage.FORWARD),
    ),
    causes=(
        LOPSIDED_ARCHITECTURE, IMPLAUSIBLE_INITIALISATION, VARIANCE_WITHOUT_SAMPLES,
    ),
    brings_about=(
        Consequence("initialisation", groups=("weights", "curves"), whenever=True),
        Consequence("variance_of_nothing", ("nonfinite_values", "nonfinite_loss"), whenever=True),
    ),
)  # fmt: skip
