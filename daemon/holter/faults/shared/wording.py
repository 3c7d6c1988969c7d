"""Words that the sentences of all detectors share."""

from collections.abc import Iterable

MAX_LISTED = 8
"""More ranks than this are counted instead of listed."""
MAX_TENSORS_NAMED = 5


def listed(parts: Iterable[str]) -> str:
    """Join words: `a`, `a and b`, `a, b and c`."""
    *head, last = parts
    return f"{', '.join(head)} and {last}" if head else last


def ranks_text(ranks: Iterable[int]) -> str:
    """Name ranks: `rank 1`, `ranks 0 and 3`, `16 ranks (0, 1, 2, ...)`."""
    known = sorted(ranks)
    if not known:
        return "no rank"
    if len(known) == 1:
        return f"rank {known[0]}"
    if len(known) > MAX_LISTED:
        return f"{len(known)} ranks ({', '.join(map(str, known[:3]))}, ...)"
    return f"ranks {listed(map(str, known))}"


def cap(text: str) -> str:
    """Capitalise the first letter, for the beginning of a sentence."""
    return text[0].upper() + text[1:]


def was(ranks: Iterable[int]) -> str:
    """Return the verb for so many ranks: `was` or `were`."""
    return "was" if len(list(ranks)) == 1 else "were"


def names_text(names: Iterable[str], count: int = 0) -> str:
    """Join names: `a, b`, or the first few and how many more there are."""
    known = list(names)
    num_more = max(count, len(known)) - len(known[:MAX_LISTED])
    return ", ".join(known[:MAX_LISTED]) + (f" and {num_more} more" if num_more > 0 else "")


def named(names: Iterable[str]) -> str:
    """Do the same with fewer names, for tensors, whose names are long."""
    known = list(names)
    return names_text(known[:MAX_TENSORS_NAMED], len(known))


def modules_of(tensors: Iterable[str]) -> tuple[str, ...]:
    """Return the modules that these tensors belong to, each once."""
    return tuple(dict.fromkeys(module for name in tensors if (module := name.rpartition(".")[0])))
