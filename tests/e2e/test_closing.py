"""An incident that is over, in a real job: closed live, in the report and in a replay."""

import json
import os
import signal
import urllib.request
from pathlib import Path

import pytest
from tests.conftest import wait_for

from holter import cli

SCRIPT = Path(__file__).parents[1] / "corpus" / "scripts" / "process_faults.py"
pytestmark = pytest.mark.job


@pytest.mark.release
@pytest.mark.timeout(300)
def test_a_hang_that_is_over_is_closed_once_the_job_went_on_for_a_while(nursery, tmp_path, capsys):
    script = [str(SCRIPT), "suspend", "--steps", "100000"]
    job = nursery.start(tmp_path, script, env={"HOLTER_ACTION": "notify"})
    run = job.run_dir

    def closings():
        """Of the hang: that random labels are not learned is an information, and stands."""
        known = [json.loads(path.read_text()) for path in run.glob("incidents/*/diagnosis.json")]
        return [one["closed_at"] for one in known if one["severity"] == "critical"]

    try:
        wait_for(lambda: closings() == [None], 90, "the incident")
        ranks = json.loads(urllib.request.urlopen(f"http://{job.coordinator()}/api/v1/status", timeout=9).read())
        os.kill(next(rank["pid"] for rank in ranks["ranks"] if rank["rank"] == 1), signal.SIGCONT)
        wait_for(lambda: None not in closings(), 120, "the end of the incident")
        metrics = urllib.request.urlopen(f"http://{job.coordinator()}/metrics", timeout=9).read().decode()
        assert 'holter_incident_open{cause="rank_suspended"' not in metrics
        assert 'holter_incidents_total{cause="rank_suspended"' in metrics
        assert 0 == cli.main(["report", str(run), "--json"]), "nothing critical is open"
        (found,) = [one for one in json.loads(capsys.readouterr().out) if one["severity"] != "info"]
    finally:
        job.end()
    job.wait()
    assert "rank_suspended" == found["causes"][0]["cause"]
    assert cli.main(["replay", str(run), "--json"]) in (0, 1)
    replayed = json.loads(capsys.readouterr().out)
    (again,) = [one for one in replayed if one["causes"][0]["cause"] == "rank_suspended"]
    assert again["closed_at"] is not None, "a replay says the same"
