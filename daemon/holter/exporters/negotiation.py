"""Which format a scraper gets: OpenMetrics if it weighs no less than the classic text, in a version that we speak.

The library's own choice takes no weights into account, claims any version it is asked for, and raises on one that is no number.
"""

OPEN_METRICS = "application/openmetrics-text"
CLASSIC = ("text/plain", "text/*", "*/*")


def chosen(accept: str) -> str:
    """The header as the library may be given it, whatever the scraper wrote; empty: the classic text."""
    weights: dict[str, float] = {}
    for kind, parameters in map(_range, accept.split(",")):
        if kind != OPEN_METRICS or (parameters.get("version") or "1").split(".")[0] == "1":
            weights[kind] = max(weights.get(kind, 0.0), _weight(parameters.get("q", "1")))
    weight = weights.get(OPEN_METRICS, 0.0)
    is_preferred = weight > 0 and weight >= max(weights.get(kind, 0.0) for kind in CLASSIC)
    return f"{OPEN_METRICS};version=1.0.0" if is_preferred else ""


def _range(part: str) -> tuple[str, dict[str, str]]:
    kind, *parameters = part.split(";")
    pairs = (word.partition("=") for word in parameters)
    return kind.strip().lower(), {name.strip().lower(): value.strip(' "') for name, _, value in pairs}


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
