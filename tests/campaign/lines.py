"""What kinds of faults are written with: needs that several have, and lines of a script that several share."""

from tests.campaign.grammar import Draw, Need

PLAIN = Need("loop", ("plain",), "it is done by hand in a loop of one's own")
BY_HAND = Need("loop", ("plain", "accelerate"), "the Trainer does this part itself")
CONSTANT_RATE = Need("schedule", ("none",), "a schedule would set the rate again at the next step")
NO_CLIP = Need("clip", (False,), "clipping would take it away")
NO_SCALER = Need("precision", ("fp32", "bf16"), "a loss scaler would skip the step")
LOADER = Need("data", ("loader",), "it is a fault of a loader")
TWO = Need("ranks", (2,), "one pair of ranks shows it; more only take longer")


def get(name: str) -> str:
    return f'net.get_parameter("{name}")'


def differ(*names: str) -> list[str]:
    return [f'effect(not same_on_all_ranks({get(names[0])}), "replicas of {names[0]} differ")']


def last(*lines: str) -> list[str]:
    return ["if step == STEPS - 1:", *(f"    {line}" for line in lines)]


def under(model_names: tuple[str, ...], prefixes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in model_names if name.startswith(prefixes))


def measured(d: Draw, point: str, value: str) -> dict[str, list[str]]:
    """Keep a number of each step, apart for steps with the fault and steps without: what is checked is what the run did, not what was asked for."""
    return {
        "wrapped": ["measured = {True: [], False: []}"],
        point: [f"measured[{f'bool({d.when.condition})' if d.when.condition else 'True'}].append({value})"],
    }


def joined(*parts: dict[str, list[str]]) -> dict[str, list[str]]:
    """Lines of several, point by point."""
    found: dict[str, list[str]] = {}
    for part in parts:
        for point, lines in part.items():
            found.setdefault(point, []).extend(lines)
    return found


def on_culprits(d: Draw, *lines: str) -> list[str]:
    """Only where the fault is."""
    return [f"if {d.rank_is_culprit}:", *(f"    {line}" for line in lines)]


def keep(name: str) -> str:
    return f"held = {get(name)}.detach().clone()"


def still(name: str) -> list[str]:
    return [f'effect(torch.equal(held, {get(name)}), "{name} did not change")']


def has(*what: str) -> Need:
    return Need("has", what, f"the model needs {', '.join(what)}")


def model(*names: str) -> Need:
    return Need("model", names, f"made for {', '.join(names)}")


BUFFERS = Need("loop", ("plain", "accelerate"), "the Trainer broadcasts buffers by a setting of its own")
BF16 = Need("precision", ("bf16",), "there must be an autocast region")
FP16 = Need("precision", ("fp16",), "it is a fault of float16")
FP32 = Need("precision", ("fp32",), "a cast would hide it")
ADAMW = Need("optimizer", ("adamw",), "other optimizers take other rates")
ONE_OPTIMIZER = Need("optimizer", ("sgd", "adamw", "own"), "the second optimizer holds the rest")
EMA = Need("ema", (True,), "there must be an average")
ACCUMULATES = Need("accumulate", (2, 4), "there must be micro-batches")
ONCE, START, FROM, EVERY = ("once",), ("start",), ("from",), ("every",)
