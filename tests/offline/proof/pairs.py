"""Twenty fixes, each a pair of runs: what `holter verify` must say of them. Seven of them do nothing. Written before the first was run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pair:
    name: str
    before: str
    after: str
    verdict: str
    num_changes: int | None
    """None: the change is in what no log or run directory holds."""
    under: str = "log"
    """`log`, `holter` (one rank), `ranks` (two ranks under holter), `mixed` (BEFORE two ranks under holter, AFTER a log)"""


HOT = "--lr 60 --steps 160"
BAD = "--bad-sample-at 60 --steps 200"
SMALL = "--epochs 60 --samples 24 --batch-size 8 --width 256 --lr 0.01"
NAN = "--nan-rank 1 --nan-step 30"

PAIRS = (
    Pair("a rate that is low enough", f"{HOT} --format nano", "--lr 0.05 --steps 160 --format nano", "fixed", 1),
    Pair("another seed does not cool a rate", f"{HOT} --format jsonl", f"{HOT} --format jsonl --seed 2", "not_fixed", 1),
    Pair("a logarithm that has its epsilon", f"{BAD} --format hf", f"{BAD} --format hf --eps 1e-3", "fixed", 1),
    Pair("weight decay mends no logarithm", f"{BAD} --format csv", f"{BAD} --format csv --weight-decay 0.01", "not_fixed", 1),
    Pair(
        "mended, but not run for long enough",
        f"{BAD} --format plain",
        "--bad-sample-at 60 --steps 80 --eps 1e-3 --format plain",
        "undecided",
        2,
    ),
    # At first with the same rate, and expected to be fixed: that run overfitted too, and verify said so.
    Pair("more data and a lower rate against overfitting", SMALL, f"{SMALL.replace('--samples 24', '--samples 4000')} --lr 0.0002", "fixed", 2),
    Pair("another seed against overfitting", SMALL, f"{SMALL} --seed 5", "not_fixed", 1),
    Pair("the graph is whole again", "--detach --steps 240", "--steps 240", "fixed", 1),
    Pair("larger batches mend no graph", "--detach --steps 240", "--detach --steps 240 --batch-size 64", "not_fixed", 1),
    Pair("an index that is in range", "--index-error-at 30 --steps 200", "--steps 200", "fixed", 1),
    Pair("clipping mends no index", "--index-error-at 30 --steps 200", "--index-error-at 30 --steps 200 --clip 1", "not_fixed", 1),
    Pair("hotter still", "--lr 6 --momentum 0.5 --steps 160", "--lr 600 --momentum 0.5 --steps 160", "worse", 1),
    Pair("two changes at once", f"{HOT} --format nano", "--lr 0.05 --clip 1.0 --steps 160 --format nano", "fixed", 2),
    Pair("nothing was wrong", "--steps 200", "--steps 200 --seed 4", "undecided", 1),
    Pair("a fix that breaks the script", f"{BAD} --format plain", f"{BAD} --eps 1e-3 --index-error-at 20 --format plain", "worse", 2),
    Pair("no NaN in the batch any more", f"{NAN} --steps 150", "--steps 150", "fixed", None, "ranks"),
    Pair("a lower rate mends no batch", f"{NAN} --steps 150", f"{NAN} --steps 150 --lr 0.01", "not_fixed", None, "ranks"),
    Pair("the wrapper is called", "--raw-module --steps 120", "--steps 120", "fixed", None, "ranks"),
    Pair("momentum does not synchronise", "--raw-module --steps 120", "--raw-module --steps 120 --momentum 0.5", "not_fixed", None, "ranks"),
    Pair("a log does not show replicas", "--raw-module --steps 120", "--steps 200", "undecided", None, "mixed"),
)  # fmt: skip
