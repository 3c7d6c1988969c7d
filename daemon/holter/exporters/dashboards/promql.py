"""Parts of queries, written so that no query counts a rank twice or mixes runs.

The coordinator and the sidecars export the same series of a rank; which of them are scraped is up to the deployment. So
every query first takes one value for each rank, and only then aggregates over ranks. A sidecar that is scraped always
says that it is up, so of `sidecar_up` the lowest value counts.

A run may have 16,000 ranks: panels about the job use the job's own series; panels about ranks show the few that are
worst at the end of the time shown, so that the rows stay the same from one point to the next.
"""

RUN = 'run_id="$run"'
RANK = f'{RUN}, rank=~"$rank"'
RUNS = 'run_id=~"$run"'
"""Matcher for dashboards that show several runs."""
INTERVAL = "[$__rate_interval]"
END = " @ end()"
"""Modifier that evaluates a query at the end of the time shown."""
MOST = 16
"""Number of ranks that one panel shows; the rank variable limits which ones are considered."""


def series(metric: str, *matchers: str, of: str = RUN) -> str:
    """Return a selector of a metric; `of` is the matcher of run and ranks."""
    return f"holter_{metric}{{{', '.join((of, *matchers))}}}"


def each(labels: str, expression: str) -> str:
    """Return one value for each combination of labels, whichever process it was scraped from."""
    return f"max by ({labels}) ({expression})"


def by_rank(metric: str, *matchers: str, at: str = "") -> str:
    """Return a gauge of each chosen rank."""
    return each("rank", series(metric, *matchers, of=RANK) + at)


def highest(expression: str, ranking: str) -> str:
    """Restrict an expression to the ranks where `ranking` is highest at the end."""
    return f"{expression} and on (rank) topk({MOST}, {ranking})"


def lowest(expression: str, ranking: str) -> str:
    """Restrict an expression to the ranks where `ranking` is lowest at the end."""
    return f"{expression} and on (rank) bottomk({MOST}, {ranking})"


def highest_by_rank(metric: str) -> str:
    """Return a gauge for the ranks where it is highest at the end."""
    return highest(by_rank(metric), by_rank(metric, at=END))


def sidecars() -> str:
    """Return whether each sidecar is heard; if there are thousands, unheard ones come first."""
    return f"bottomk({2 * MOST}, min by (rank) ({series('sidecar_up', of=RANK)}))"


def job(metric: str, aggregate: str, of: str = RUN) -> str:
    """Return one figure over all ranks, as exported by the coordinator."""
    return each("run_id", series(f"job_{metric}", f'aggregate="{aggregate}"', of=of))


def job_spread(metric: str) -> str:
    """Return mean, lowest and highest value over the ranks."""
    return each("aggregate", series(f"job_{metric}"))


def job_speed(of: str = RUN) -> str:
    """Return steps per second; a run that went back to a checkpoint has speed 0, not a negative one."""
    return each("run_id", f"clamp_min(deriv({series('job_step', of=of)}{INTERVAL}), 0)")


def rate(metric: str, *matchers: str, of: str = RANK, at: str = "") -> str:
    """Return a counter's increase per second."""
    return f"rate({series(metric, *matchers, of=of)}{INTERVAL}{at})"


def increase(metric: str, *matchers: str, of: str = RANK) -> str:
    """Return a counter's increase since the previous point."""
    return f"increase({series(metric, *matchers, of=of)}{INTERVAL})"


def ago(timestamp: str) -> str:
    """Return the seconds since a timestamp, at least 0.

    A scraped value may be younger than the scrape's own time, which is that of its beginning.
    """
    return f"clamp_min(time() - {timestamp}, 0)"


def mean_step_seconds(at: str = "") -> str:
    """Return the average duration of each rank's steps."""
    return f"{each('rank', rate('step_seconds_sum', at=at))} / {each('rank', rate('step_seconds_count', at=at))}"


def step_buckets() -> str:
    """Return steps per second by duration, over the chosen ranks."""
    return f"sum by (le) ({each('rank, le', rate('step_seconds_bucket'))})"


def severe(labels: str, metric: str) -> str:
    """Return the severity of what stands as a number: 3 critical, 2 warning, 1 info."""
    levels = {'severity="critical"': 3, 'severity="warning"': 2, 'severity="info"': 1}
    return " or ".join(f"({each(labels, series(metric, name))} > bool 0) * {level}" for name, level in levels.items())


def or_none(expression: str, of: str = RUN) -> str:
    """Return 0 where an expression has no value, but only for a run that is being scraped."""
    return f"{expression} or 0 * max({series('build_info', of=of)})"
