"""Pictures of the dashboards where no Grafana can run: real jobs, a real Prometheus, the panels' own queries, drawn as SVG.

    python tests/grafana/draw_dashboards.py grafana/pictures        three minutes; `make pictures`

Two jobs of two ranks train; in one of them rank 1 comes late for a while, and later its batch holds a NaN. Devices there are none: what
they tell is made up. Each picture says that it is a drawing, and what is made up: Grafana's own look differs in detail.
"""

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path += [str(HERE.parent), str(HERE)]

from prometheus_server import Prometheus, filled_in  # noqa: E402
from standin_devices import devices  # noqa: E402
from svg_canvas import BACKGROUND, EDGE, FAINT, NAMED, PANEL, TEXT, Box, Canvas  # noqa: E402
from svg_panels import draw  # noqa: E402
from svg_parts import Answer, Span  # noqa: E402

WIDTH, MARGIN, HEAD, ROW = 1240, 12, 62, 33
HEALTHY, SPOILED = "healthy", "late-then-nan"
PACE = ("--step-s", "0.2")
FAULT = ("--late", "110", "190", "--save-at", "230", "--nan-at", "400")
WATCHED_S = 150.0
SAYS = "Drawn from the panels' queries, run on a Prometheus that scraped real jobs of 2 ranks. No Grafana was run."
MADE_UP = "What devices tell is made up: there was none."


def main() -> None:
    """Run, scrape, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seconds", type=float, default=WATCHED_S, help="how long the jobs are watched")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        jobs = [
            stack.enter_context(job(place, name, words))
            for name, words in ((HEALTHY, PACE), (SPOILED, (*PACE, *FAULT)))
        ]
        targets = {"coordinators": [them[0] for them in jobs], "sidecars": [one for them in jobs for one in them[1:]]}
        standin = stack.enter_context(devices(SPOILED))
        targets["devices"] = [standin.address]
        prometheus = stack.enter_context(Prometheus(place, targets, standin.relabelling()))
        time.sleep(options.seconds)
        end_s = math.floor(time.time()) - 1
        for path in sorted((ROOT / "grafana" / "dashboards").glob("*.json")):
            picture = drawn(json.loads(path.read_text()), prometheus, SPOILED, end_s - options.seconds + 4, end_s)
            (options.directory / f"{path.stem}.svg").write_text(picture, encoding="utf-8")
            print(options.directory / f"{path.stem}.svg")


@contextmanager
def job(place: Path, name: str, words: tuple[str, ...]) -> Iterator[list[str]]:
    """A job of two ranks under holter; gives the addresses to scrape, and ends it."""
    run_dir = place / name
    environ = os.environ | {"HOLTER_RUN_ID": name, "HOLTER_RUN_DIR": str(run_dir), "HOLTER_ACTION": "notify"}
    launch = [Path(sys.executable).parent / "torchrun", "--standalone", "--nproc-per-node", "2", "-m", "holter"]
    log = (place / f"{name}.log").open("wb")
    command = [str(word) for word in (*launch, HERE / "scripts" / "scraped.py", *words)]
    process = subprocess.Popen(command, cwd=place, env=environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)
    try:
        yield addresses(run_dir)
    finally:
        process.terminate()
        process.wait(timeout=60)
        log.close()
        end_of(json.loads((run_dir / "coordinator.json").read_text())["pid"])


def end_of(pid: int) -> None:
    """Wait for it: it still writes into its run's directory."""
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.2)


def addresses(run_dir: Path) -> list[str]:
    """The coordinator's and its two sidecars'."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        time.sleep(0.2)
        try:
            coordinator = json.loads((run_dir / "coordinator.json").read_text())["address"].removeprefix("http://")
            with urllib.request.urlopen(f"http://{coordinator}/api/v1/status", timeout=5) as answer:
                found = [rank["metrics_address"] for rank in json.load(answer)["ranks"]]
        except OSError:
            continue
        if len(found) == 2 and all(found):
            return [coordinator, *found]
    raise TimeoutError(f"waited 120 s for two sidecars of {run_dir}")


def drawn(dashboard: dict[str, Any], prometheus: Prometheus, run_id: str, start_s: float, end_s: float) -> str:
    """One dashboard of one run as SVG; the fleet's is of all."""
    run_id = ".*" if dashboard["uid"] == "holter-fleet" else run_id
    span = Span(start_s, end_s, 1.0, tuple(marks(dashboard, prometheus, run_id, start_s, end_s)))
    height = HEAD + max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"]) * ROW + MARGIN
    canvas = Canvas()
    canvas.rect(Box(0, 0, WIDTH, height), BACKGROUND)
    header(canvas, dashboard, run_id, span)
    column = (WIDTH - 2 * MARGIN) / 24
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        box = Box(MARGIN + at["x"] * column, HEAD + at["y"] * ROW, at["w"] * column - 6, at["h"] * ROW - 6)
        draw(canvas, box, panel, answers(panel, prometheus, run_id, span), span)
    return canvas.svg(WIDTH, height)


def header(canvas: Canvas, dashboard: dict[str, Any], run_id: str, span: Span) -> None:
    """Title, what is chosen, the time, and what this picture is."""
    canvas.text(MARGIN + 2, 24, dashboard["title"], 16, TEXT, "bold")
    chosen = {"datasource": "Prometheus", "run": "All" if run_id == ".*" else run_id, "rank": "All"}
    x = float(MARGIN)
    for variable in dashboard["templating"]["list"]:
        text = f"{variable['label']}: {chosen[variable['name']]}"
        width = len(text) * 6.2 + 16
        canvas.rect(Box(x, 34, width, 20), PANEL, EDGE, radius=2)
        canvas.text(x + 8, 48, text, 11, TEXT)
        x += width + 6
    clock = [time.strftime("%H:%M:%S", time.gmtime(at)) for at in (span.start_s, span.end_s)]
    canvas.text(WIDTH - MARGIN, 24, f"{clock[0]} to {clock[1]} UTC", 11, TEXT, "end")
    canvas.text(WIDTH - MARGIN, 48, SAYS, 11, FAINT, "end")
    if "DCGM_" in json.dumps(dashboard):
        canvas.text(WIDTH - MARGIN, 36, MADE_UP, 11, FAINT, "end")


def marks(
    dashboard: dict[str, Any], prometheus: Prometheus, run_id: str, start_s: float, end_s: float
) -> Iterator[tuple[str, float]]:
    """Where each incident and each halt began."""
    for mark in dashboard["annotations"]["list"]:
        for series in prometheus.between(filled_in(mark["target"]["expr"], run_id), start_s, end_s):
            yield NAMED[mark["iconColor"]], float(series["values"][0][0])


def answers(panel: dict[str, Any], prometheus: Prometheus, run_id: str, span: Span) -> list[Answer]:
    """What Prometheus says to a panel's queries."""
    found = []
    for target in panel["targets"]:
        expr = filled_in(target["expr"], run_id)
        if target["instant"]:
            told = [(series["metric"], [series["value"]]) for series in prometheus.at(expr, span.end_s)]
        else:
            told = [(s["metric"], s["values"]) for s in prometheus.between(expr, span.start_s, span.end_s, span.step_s)]
        for labels, values in told:
            points = [(float(at), float(value)) for at, value in values]
            found.append(Answer(named(target["legendFormat"], labels), labels, points, target["refId"]))
    return found


def named(legend: str, labels: dict[str, str]) -> str:
    """As Grafana fills in a legend."""
    return re.sub(r"\{\{(\w+)\}\}", lambda label: labels.get(label[1], ""), legend)


if __name__ == "__main__":
    assert shutil.which("prometheus"), "prometheus is not on PATH"
    main()
