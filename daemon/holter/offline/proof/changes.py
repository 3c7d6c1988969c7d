"""Finds what differs between two runs besides the fault: config, command, environment, versions, code, world, data order.

If there is more than one change, that is said, because then it is unknown which one helped. What differs between any two
runs anyway (directories, ports, dates) does not count.
"""

import re
from collections.abc import Mapping, Sequence

import msgspec

from holter.offline.proof.record import RunRecord

_OWN = re.compile(
    r"(^|[._\-])(out(put)?|log(ging)?|save|ckpt|checkpoint|cache|tmp|temp|work)([._\-]?(dir(ectory)?|path|folder|file|root|to))?$"
    r"|(^|[._\-])(run|exp(eriment)?|job|trial)([._\-]?(id|name|dir))$"
    r"|(^|[._\-])(master|rdzv|main[._\-]?process|holter)?[._\-]?(port|addr(ess)?|endpoint)$"
    r"|resume|^HOLTER|time(stamp)?$|date$|hostname$|(^|[._\-])pid$|local[._\-]?rank$|best_|global_step|total_flos|log_history|max_steps$|train_runtime",
    re.IGNORECASE,
)
"""Matches names of settings that differ between any two runs, and of how far a run goes."""
MAX_SHOWN = 80
"""Number of characters of a value that are shown."""


class SettingChange(msgspec.Struct, frozen=True, kw_only=True):
    """One difference between two runs."""

    kind: str
    """config, command, environment, version, code, world or data."""
    name: str
    before: str
    """Value before; empty if the setting did not exist."""
    after: str

    def text(self) -> str:
        """Describe the change: `config lr: 0.1 -> 0.01`."""
        if self.kind in {"code", "data"}:
            what = "differs" if self.before and self.after else "is new" if self.after else "is gone"
            return f"{self.kind} {self.name} {what}".rstrip()
        return f"{self.kind} {self.name}: {_short(self.before)} -> {_short(self.after)}"


def setting_changes(before: RunRecord, after: RunRecord) -> tuple[SettingChange, ...]:
    """Return every difference that somebody made, in the order of their kinds."""
    made = list(settings_differ(before.settings, after.settings))
    if (order := _data_order(before, after)) is not None:
        made.append(order)
    return tuple(made)


def settings_differ(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[SettingChange, ...]:
    """Compare two sets of settings; a kind that only one of them has is no difference, because it was not recorded."""
    known = {name.partition(": ")[0] for name in before} & {name.partition(": ")[0] for name in after}
    found = []
    for full in [*before, *(name for name in after if name not in before)]:
        kind, _, name = full.partition(": ")
        if kind not in known or _OWN.search(name):
            continue
        old, new = before.get(full, ""), after.get(full, "")
        if not _is_equal(old, new):
            found.append(SettingChange(kind=kind, name=name, before=old, after=new))
    return tuple(found)


def unknown_kinds(before: RunRecord, after: RunRecord) -> list[str]:
    """Return kinds of settings that at least one of the two did not record."""
    found = []
    for kind in ("config", "command", "environment", "version", "code"):
        knows = [any(name.startswith(f"{kind}: ") for name in one.settings) for one in (before, after)]
        if not all(knows) and not (kind in {"config", "command"} and _has_either(before) and _has_either(after)):
            found.append(kind)
    if not (before.batches and after.batches):
        found.append("data order")
    return found


def _has_either(record: RunRecord) -> bool:
    return any(name.startswith(("config: ", "command: ")) for name in record.settings)


def options_of(command: Sequence[str]) -> dict[str, str]:
    """Parse `["train.py", "--lr", "0.1", "lr=3"]` into `{"command: --lr": "0.1", ...}`.

    Arguments without an option are numbered.
    """
    made: dict[str, str] = {}
    name, num_plain = "", 0
    for word in command[1:]:
        if word.startswith("-") and not _is_number(word):
            head, equals, value = word.partition("=")
            made[f"command: {head}"] = value if equals else "true"
            name = "" if equals else head
        elif name:
            made[f"command: {name}"], name = word, ""
        else:
            head, equals, value = word.partition("=")
            made[f"command: {head}" if equals else f"command: argument {(num_plain := num_plain + 1)}"] = (
                value if equals else word
            )
    return made


def _data_order(before: RunRecord, after: RunRecord) -> SettingChange | None:
    """Compare the fingerprints of batches at the same steps."""
    common = [step for step in before.batches if before.batches[step] and after.batches.get(step)]
    same = sum(before.batches[step] == after.batches[step] for step in common)
    if not common or same >= 0.9 * len(common):
        return None
    said = f"{len(common) - same} of {len(common)} common steps had other batches"
    return SettingChange(kind="data", name=f"order ({said})", before="one order", after="another")


def _is_equal(old: str, new: str) -> bool:
    if _is_number(old) and _is_number(new):
        return float(old) == float(new)
    return old.strip() == new.strip()


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _short(text: str) -> str:
    text = text or "not set"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"
