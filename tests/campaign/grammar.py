"""The grammar: where x how x what x when. A seed gives a case, always the same one.

    case = draw("7-3")        the fourth case of seed 7
    case = draw("7-h3")       the fourth healthy run of seed 7

What is drawn: a kind of fault first, so that rare ones occur as often as common ones; then model, loop and moment, until the rules allow them.
The grammar is frozen: change it, and every score that was ever written down is about something else.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.campaign.models import MODELS, Model

EITHER_WAY = {
    # The rules leave less of the frameworks.
    "loop": (*["plain"] * 2, *["accelerate"] * 3, *["trainer"] * 5),
    "precision": ("fp32", "fp32", "bf16", "fp16"),
    "optimizer": ("sgd", "adamw", "adamw", "own", "two"),
    "ranks": (2, 2, 2, 4),
    "clip": (False, True),
    "ema": (False, False, True),
    "schedule": ("none", "warmup", "cosine"),
    "accumulate": (1, 1, 2, 4),
    "data": ("made", "loader"),
}
"""How: each is drawn by itself; what is written twice is twice as likely."""
RATES = {"sgd": "0.05", "adamw": "2e-3", "own": "1e-3", "two": "0.02"}
"""Learning rates, of two optimizers the first one's."""
LATE_BY = 10
"""How much later than its first step a fault may be dated: what is compared now and then is dated to the comparison that shows it."""
WITHIN = 50
"""Steps in which it must be found."""
MOST_TRIES = 20_000
PREFIXES = ("", "", "train/", "actor/", "grpo/", "rollout/", "objective/", "policy/", "Train/")
OTHER_NAMES = {"rewards": ("reward",), "kl": ("kl_div", "kl_divergence"), "entropy": ("policy_entropy",)}
"""What else people call it."""


@dataclass(frozen=True)
class Setting:
    """How a model is trained."""

    model: Model
    loop: str = "plain"
    precision: str = "fp32"
    optimizer: str = "adamw"
    ranks: int = 2
    clip: bool = False
    ema: bool = False
    schedule: str = "none"
    accumulate: int = 1
    data: str = "made"

    @property
    def words(self) -> str:
        """For people."""
        extras = [
            word
            for word, is_so in (
                ("clipping", self.clip),
                ("EMA", self.ema),
                (self.schedule, self.schedule != "none"),
                (f"{self.accumulate} micro-batches", self.accumulate > 1),
                ("loader", self.data == "loader"),
            )
            if is_so
        ]
        return ", ".join([self.model.name, self.loop, self.precision, self.optimizer, f"{self.ranks} ranks", *extras])


@dataclass(frozen=True)
class Rule:
    """A combination that makes no sense, and why."""

    why: str
    excludes: Callable[[Setting], bool]


RULES = (
    Rule(
        "The Trainer steps and scales by itself: a scaler, a second optimizer or an average beside it would be other scripts.",
        lambda how: how.loop == "trainer" and (how.precision == "fp16" or how.optimizer == "two" or how.ema),
    ),
    Rule("The Trainer has its own loader.", lambda how: how.loop == "trainer" and how.data == "made"),
    Rule("accelerate's fp16 needs a device.", lambda how: how.loop == "accelerate" and how.precision == "fp16"),
    Rule("accelerate shards a loader that it prepares; here batches are made.", lambda how: how.loop == "accelerate" and how.data == "loader"),
    Rule("Logs of a script are told in a loop of its own or by accelerate.", lambda how: how.loop == "trainer" and "logs" in how.model.has),
    Rule("A policy samples anew in each micro-batch; one a step is what people do.", lambda how: how.model.name == "policy" and how.accumulate > 1),
    Rule("fp16 with two optimizers needs care in who is skipped; it is another script.", lambda how: how.precision == "fp16" and how.optimizer == "two"),
    Rule("Distances of a quantiser in fp16 on a CPU are not implemented.", lambda how: how.model.name == "vq" and how.precision == "fp16"),
    Rule("A recurrent cell has no float16 kernel on a CPU.", lambda how: how.model.name == "rnn" and how.precision != "fp32"),
)  # fmt: skip


@dataclass(frozen=True)
class Need:
    """What a kind of fault needs of a setting, and why."""

    what: str
    """A field of `Setting`, or `has` for what the model has."""
    values: tuple[Any, ...]
    why: str = ""

    def holds(self, how: Setting) -> bool:
        """Whether the setting has it."""
        if self.what == "has":
            return set(self.values) <= how.model.has
        if self.what == "hasnt":
            return not set(self.values) & how.model.has
        if self.what == "model":
            return how.model.name in self.values
        return getattr(how, self.what) in self.values


@dataclass(frozen=True)
class When:
    """`start`: from the first step on; `from`: from a later one on; `once`; `every` so many steps from a step on."""

    kind: str
    begin: int = 0
    every: int = 0

    @property
    def condition(self) -> str:
        """In Python; empty: always."""
        return {
            "start": "",
            "from": f"step >= {self.begin}",
            "once": f"step == {self.begin}",
            "every": f"step >= {self.begin} and (step - {self.begin}) % {self.every} == 0",
        }[self.kind]

    @property
    def words(self) -> str:
        """For people."""
        return {
            "start": "from the start",
            "from": f"from step {self.begin} on",
            "once": f"once, at step {self.begin}",
            "every": f"every {self.every} steps from step {self.begin} on",
        }[self.kind]


@dataclass
class Draw:
    """What a fault is made from."""

    rng: random.Random
    setting: Setting
    when: When
    culprits: tuple[int, ...]
    steps: int

    @property
    def model(self) -> Model:
        """Where."""
        return self.setting.model

    @property
    def begin(self) -> int:
        """The first step."""
        return self.when.begin

    @property
    def rank_is_culprit(self) -> str:
        """In Python."""
        return f"rank == {self.culprits[0]}" if len(self.culprits) == 1 else f"rank in {self.culprits}"

    def guard(self, *lines: str, step: bool = True, ranks: bool = False) -> list[str]:
        """The lines, under the conditions that are asked for."""
        conditions = [
            text for text, is_asked in ((self.when.condition, step), (self.rank_is_culprit, ranks)) if is_asked and text
        ]
        return [f"if {' and '.join(conditions)}:", *(f"    {line}" for line in lines)] if conditions else list(lines)

    def install(self, *lines: str, ranks: bool = False) -> dict[str, list[str]]:
        """The lines once: before the first step, or at the step from which on the fault is there."""
        if self.when.kind == "start":
            return {"wrapped": self.guard(*lines, step=False, ranks=ranks)}
        who = f" and {self.rank_is_culprit}" if ranks else ""
        return {"step": [f"if step == {self.begin}{who}:", *(f"    {line}" for line in lines)]}

    def expression(self, faulty: str, sound: str, *, ranks: bool = False) -> str:
        """The faulty one while the conditions hold."""
        conditions = [text for text in (self.when.condition, self.rank_is_culprit if ranks else "") if text]
        return f"({faulty} if {' and '.join(conditions)} else {sound})" if conditions else faulty

    def weight(self) -> str:
        """One of the trained matrices."""
        return self.rng.choice(self.model.weights)

    def tensors_or_all(self) -> tuple[str, ...]:
        """One matrix, or all that is trained."""
        return self.model.trained if self.rng.random() < 0.4 else (self.weight(),)

    def group(self, names: Sequence[str]) -> str:
        """In Python, an iterable of parameters."""
        if set(names) == set(self.model.trained):
            return "[p for p in net.parameters() if p.requires_grad]"
        return "[" + ", ".join(f'net.get_parameter("{name}")' for name in names) + "]"


@dataclass
class Injected:
    """A fault as lines of a script, and what is to be said of it."""

    words: str
    """What was done, for people."""
    points: dict[str, list[str]] = field(default_factory=dict)
    """Point of the script -> lines that stand there."""
    replaced: dict[str, str] = field(default_factory=dict)
    """Part of the script -> what stands there instead."""
    effect: list[str] = field(default_factory=list)
    """Lines at the end that check it without holter."""
    base_points: dict[str, list[str]] = field(default_factory=dict)
    base_replaced: dict[str, str] = field(default_factory=dict)
    """What the healthy twin has too: without it the fault would have no place to be."""
    tensors: tuple[str, ...] | None = None
    modules: tuple[str, ...] | None = None
    ranks: str = "none"
    """`none`: no rank is to blame; `culprits`; `all`."""
    magnitude: str = ""
    also: dict[str, str] = field(default_factory=dict)
    """Further causes that are as right, and why."""
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    name: str
    cause: str
    family: str
    make: Callable[[Draw], Injected]
    whens: tuple[str, ...] = ("start", "from")
    needs: tuple[Need, ...] = ()
    also: Mapping[str, str] = field(default_factory=dict)
    """Causes that are as right, and why."""
    late_by: int = LATE_BY
    within: int | None = WITHIN
    """None: it hangs or dies, and steps say nothing."""
    ends: str = "normally"
    """`hangs`, `dies`, or `either`: what the job does when the fault is there."""
    severity: str = "warning"
    """At least this."""
    one_culprit: bool = True
    """Else several ranks may have it."""


@dataclass(frozen=True)
class Expected:
    """What must be said of a case."""

    causes: dict[str, str]
    """The right one first, with why each is right."""
    begin: int
    late_by: int
    within: int | None
    ranks: tuple[tuple[int, ...], ...] | None
    """Any of these; None: no rank is to blame."""
    tensors: tuple[str, ...] | None
    modules: tuple[str, ...] | None
    severity: str
    has_step: bool


@dataclass(frozen=True)
class Case:
    """One drawn script."""

    seed: str
    setting: Setting
    steps: int
    kind: Kind | None = None
    injected: Injected | None = None
    when: When | None = None
    culprits: tuple[int, ...] = ()
    oddities: tuple[tuple[str, Injected], ...] = ()
    """Of a healthy run: odd things that are no faults."""
    names: dict[str, str] = field(default_factory=dict)
    """What is logged -> the name it is logged under."""

    @property
    def family(self) -> str:
        """Of faults, or `healthy`."""
        return self.kind.family if self.kind else "healthy"

    @property
    def is_faulty(self) -> bool:
        """Neither a twin nor a healthy run."""
        return self.kind is not None and not self.seed.endswith("-twin")

    @property
    def title(self) -> str:
        """One line for people."""
        if self.kind is None or self.injected is None or self.when is None:
            odd = ", ".join(name for name, _ in self.oddities) or "nothing odd"
            return f"healthy: {odd} ({self.setting.words})"
        if not self.is_faulty:
            return f"the healthy twin of {self.seed.removesuffix('-twin')} ({self.setting.words})"
        size = f" ({self.injected.magnitude})" if self.injected.magnitude else ""
        return f"{self.kind.cause}: {self.injected.words}{size}, {self.when.words} ({self.setting.words})"

    @property
    def expected(self) -> Expected | None:
        """None: nothing may be said."""
        return _expected(self) if self.is_faulty else None


SCOPE = {
    "unsynced_initialisation": "T", "gradient_sync_bypassed": "TS", "unreduced_parameters": "TS", "uneven_clipping": "RTS",
    "optimizer_state_mismatch": "RS", "corrupted_collective": "RS", "silent_data_corruption": "RTS", "buffer_divergence": "TS",
    "nondeterministic_drift": "TS", "model_structure_mismatch": "RT", "gradient_scale_mismatch": "TS", "frozen_set_mismatch": "RT",
    "frozen_component_uninitialised": "RT", "frozen_component_mismatch": "RT", "frozen_component_changed": "TS",
    "unfrozen_by_mistake": "T", "lost_buffer": "T", "stale_optimizer_parameters": "T", "nothing_trainable": "T", "graph_detached": "T",
    "gradients_never_cleared": "S", "lost_update": "TS", "rounded_away_updates": "T", "every_step_skipped": "S",
    "accumulation_not_normalised": "S", "dead_activations": "TS", "average_not_tracking": "T", "zero_gradients": "S",
    "trained_in_evaluation_mode": "RTS", "dtype_mismatch_across_ranks": "RT", "dtype_changed": "TS", "precision_round_trip": "RT",
    "gradient_underflow": "TS", "activation_overflow": "RTS", "buffer_precision_loss": "T", "stale_autocast_cache": "S",
    "autocast_not_applied": "T", "nonfinite_input": "RS", "nonfinite_forward": "RTS", "nonfinite_backward": "RTS",
    "nonfinite_loss_function": "RS", "hidden_nonfinite_loss": "S", "exploding_gradients": "TS", "vanishing_gradients": "TS",
    "imbalanced_gradients": "TS", "learning_rate_too_high": "S", "loss_divergence": "S", "loss_plateau": "S", "overfitting": "S",
    "dominating_loss_term": "S", "duplicate_data_across_ranks": "RS", "double_sharded_data": "S", "repeated_epoch_order": "S",
    "uneven_batches": "RS", "data_leakage": "S", "class_imbalance": "S", "distribution_shift": "RS", "corrupt_labels_or_range": "RS",
    "rank_missing_from_collective": "R", "collective_order_mismatch": "R", "collective_shape_mismatch": "R",
    "collective_dtype_mismatch": "R", "rank_stuck_in_python": "R", "interpreter_locked": "R", "rank_suspended": "R",
    "script_error": "RS", "rank_dead": "R", "stalled_data_loader": "R", "stalled_checkpoint": "R", "slow_compute": "R",
    "slow_input": "R", "entropy_collapse": "S", "entropy_explosion": "S", "zero_advantages": "S", "kl_inactive": "S",
    "kl_sign_flipped": "S", "reward_collapse": "S", "train_inference_mismatch": "S", "clamped_adapter_norm": "TS",
    "codebook_collapse": "TS", "degenerate_outputs": "S", "stale_rollout_weights": "TS", "no_learning_signal": "S",
    "auxiliary_loss_inactive": "TS", "host_memory_leak": "RS", "out_of_memory": "RS", "lopsided_architecture": "T",
    "implausible_initialisation": "T",
}  # fmt: skip
"""What a diagnosis must name beside the cause: ranks, tensors or modules, the step."""
TIED_VOTE = frozenset(
    [
        "optimizer_state_mismatch",
        "uneven_clipping",
        "frozen_component_mismatch",
        "dtype_mismatch_across_ranks",
        "model_structure_mismatch",
        "distribution_shift",
        "corrupt_labels_or_range",
        "precision_round_trip",
        "trained_in_evaluation_mode",
        "corrupted_collective",
    ]
)
"""Of two ranks that differed from the start, both plausible, nobody can say which is wrong: then both may be named."""
BOTH_SIDES = frozenset(
    [
        "collective_order_mismatch",
        "collective_shape_mismatch",
        "collective_dtype_mismatch",
        "frozen_set_mismatch",
        "uneven_batches",
    ]
)
"""Two ranks that do not match: either, or both, or none may be named. Among four the one that differs is the culprit."""
BY_NATURE_LOGGED = frozenset(
    {"codebook_collapse", "clamped_adapter_norm", "auxiliary_loss_inactive", "stale_rollout_weights"}
)
"""What is logged has a name of its own: no tensor is asked for."""


def _expected(case: Case) -> Expected:
    kind, injected, when = case.kind, case.injected, case.when
    assert kind is not None
    assert injected is not None
    assert when is not None
    scope = SCOPE[kind.cause]
    everyone = tuple(range(case.setting.ranks))
    ranks: tuple[tuple[int, ...], ...] | None = None
    if "R" in scope and injected.ranks == "culprits":
        ranks = (case.culprits,)
        is_tie = case.setting.ranks == 2 and (kind.cause in BOTH_SIDES or (kind.cause in TIED_VOTE and when.begin == 0))
        if is_tie:
            each = tuple((rank,) for rank in everyone)
            ranks = (*each, everyone, ()) if kind.cause in BOTH_SIDES else (case.culprits, everyone)
    elif "R" in scope and injected.ranks == "all":
        ranks = (everyone, ())
    has_place = "T" in scope and kind.cause not in BY_NATURE_LOGGED
    return Expected(
        causes={kind.cause: "what was injected", **kind.also, **injected.also},
        begin=when.begin,
        late_by=kind.late_by,
        within=kind.within,
        ranks=ranks,
        tensors=injected.tensors if has_place else None,
        modules=injected.modules if has_place else None,
        severity=kind.severity,
        has_step="S" in scope,
    )


def objections(needs: Sequence[Need], how: Setting) -> list[str]:
    """Why this combination makes no sense; empty: it does."""
    found = [rule.why for rule in RULES if rule.excludes(how)]
    found += [need.why or f"needs {need.what} {need.values}" for need in needs if not need.holds(how)]
    return found


def draw_setting(rng: random.Random, needs: Sequence[Need] = ()) -> Setting:
    """Until the rules allow it."""
    for _ in range(MOST_TRIES):
        how = Setting(
            rng.choice(list(MODELS.values())),
            **{name: rng.choice(values) for name, values in EITHER_WAY.items()},  # type: ignore[arg-type]
        )
        if not objections(needs, how):
            return how
    raise ValueError(f"no setting in {MOST_TRIES} draws satisfies {needs}")


def draw_when(rng: random.Random, kind: Kind) -> When:
    """A moment that the kind of fault can have."""
    which = rng.choice(kind.whens)
    if which == "start":
        return When("start")
    return When(which, rng.randrange(17, 48), rng.choice((2, 3, 5, 7)) if which == "every" else 0)


def draw(seed: str) -> Case:
    """The case of this seed; `h` in it makes a healthy run."""
    from tests.campaign import healthy  # noqa: PLC0415  it is made of the grammar
    from tests.campaign.faults import KINDS  # noqa: PLC0415

    rng = random.Random(f"holter campaign {seed}")  # noqa: S311  not for secrets
    if "h" in seed:
        return healthy.draw(seed, rng)
    kind = rng.choice(KINDS)
    how = draw_setting(rng, kind.needs)
    when = draw_when(rng, kind)
    culprits = (rng.randrange(how.ranks),)
    if not kind.one_culprit and how.ranks > 2 and rng.random() < 0.3:
        culprits = tuple(sorted(rng.sample(range(how.ranks), 2)))
    # What is not found when the run ends was not found in time.
    steps = when.begin + (kind.within or WITHIN)
    injected = kind.make(Draw(rng, how, when, culprits, steps))
    return Case(seed, how, steps, kind, injected, when, culprits, names=draw_names(rng, how.model))


def draw_names(rng: random.Random, model: Model) -> dict[str, str]:
    """Under what a script logs: people put things in front."""
    prefix = rng.choice(PREFIXES)
    return {name: prefix + rng.choice((name, name, *OTHER_NAMES.get(name, ()))) for name in model.names}


def twin(case: Case) -> Case:
    """The same script without the fault."""
    assert case.injected is not None
    return replace(case, seed=f"{case.seed}-twin", injected=replace(case.injected, points={}, replaced={}, effect=[]))
