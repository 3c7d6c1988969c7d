"""Queries, put together so that none of them counts twice or looks at another run.

The coordinator and the sidecars export the same series of a rank; which of them are scraped is up to the deployment. So every query
first takes one value of each rank, and only then looks across ranks. What a sidecar says of its own line to the coordinator is no news:
of `sidecar_up` the worst is taken.
"""

RUN = 'run_id="$run"'
RANK = f'{RUN}, rank=~"$rank"'
RUNS = 'run_id=~"$run"'
"""Where several runs are shown."""
INTERVAL = "[$__rate_interval]"


def series(metric: str, *matchers: str, of: str = RUN) -> str:
    """A selector; `of` says which run and ranks."""
    return f"holter_{metric}{{{', '.join((of, *matchers))}}}"


def each(labels: str, expression: str) -> str:
    """One value for each combination of labels, whoever was scraped for it."""
    return f"max by ({labels}) ({expression})"


def by_rank(metric: str, *matchers: str) -> str:
    """A gauge of each chosen rank."""
    return each("rank", series(metric, *matchers, of=RANK))


def rate(metric: str, *matchers: str, of: str = RANK) -> str:
    """A counter's increase in a second."""
    return f"rate({series(metric, *matchers, of=of)}{INTERVAL})"


def increase(metric: str, *matchers: str, of: str = RANK) -> str:
    """A counter's increase since the point before."""
    return f"increase({series(metric, *matchers, of=of)}{INTERVAL})"


def ago(timestamp: str) -> str:
    """Seconds since then. A scrape has the time at which it began, and what it brought may be younger."""
    return f"clamp_min(time() - {timestamp}, 0)"


def mean_step_seconds(labels: str, of: str = RANK) -> str:
    """Average duration of a step."""
    return f"{each(labels, rate('step_seconds_sum', of=of))} / {each(labels, rate('step_seconds_count', of=of))}"


def step_buckets() -> str:
    """Steps in a second by duration, over the chosen ranks."""
    return f"sum by (le) ({each('rank, le', rate('step_seconds_bucket'))})"


def severe(labels: str, metric: str) -> str:
    """The severity of what stands: 3 critical, 2 warning, 1 info."""
    levels = {'severity="critical"': 3, 'severity="warning"': 2, 'severity="info"': 1}
    return " or ".join(f"({each(labels, series(metric, name))} > bool 0) * {level}" for name, level in levels.items())


def or_none(expression: str, of: str = RUN) -> str:
    """0 instead of nothing, but only for a run that is there."""
    return f"{expression} or 0 * max({series('build_info', of=of)})"
