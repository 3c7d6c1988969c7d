"""A real Slurm of one node on loopback: munged, slurmctld and slurmd from the distribution's packages, as root, with holter's own lines in slurm.conf."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.conftest import wait_for

from free_port import free_port

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
BIN = Path(sys.executable).parent
DAEMONS = ("munged", "slurmctld", "slurmd")
CONFIGURATION = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={home}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
SlurmdSpoolDir={home}/spool
StateSaveLocation={home}/state
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=5
# A life of a minute is too short for a start where others use the machine too; the signal comes by the limit all the same.
OverTimeLimit=4
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
include {home}/holter.conf
"""


@dataclass
class Slurm:
    """The cluster, as its user sees it."""

    home: Path
    environ: dict[str, str]

    def run(self, *words: object) -> str:
        """A command of Slurm's; what it printed."""
        told = subprocess.run(
            [str(word) for word in words],
            cwd=self.home / "work",
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert told.returncode == 0, (words, told.stderr)
        return told.stdout.strip()

    def submit(self, *words: object) -> str:
        """A batch job; its number. All that its lives print is in work/slurm-NUMBER.out."""
        return self.run("sbatch", "--parsable", *words)

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        said = self.run("scontrol", "show", "job", number)
        return dict(word.partition("=")[::2] for word in said.split())

    def printed(self, number: str) -> str:
        """By all lives of the job."""
        path = self.home / "work" / f"slurm-{number}.out"
        return path.read_text(errors="replace") if path.exists() else ""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Started once for a file of tests; whatever still runs in it is cancelled at the end."""
    if missing := [name for name in DAEMONS if shutil.which(name) is None]:
        pytest.skip(
            f"no {', '.join(missing)} here; `make system` installs slurm and munge from the distribution's packages"
        )
    if os.geteuid() != 0:
        pytest.skip("slurmd starts jobs as root only")
    home = tmp_path_factory.mktemp("slurm")
    # munged wants a socket that everyone can come to.
    for folder in (home, *home.parents):
        if folder.owner() == "root" and folder != Path("/tmp"):  # noqa: S108
            folder.chmod(folder.stat().st_mode | 0o011)
    environ = _configure(home)
    daemons = _start(home, environ)
    cluster = Slurm(home, environ)
    try:
        yield cluster
    finally:
        subprocess.run(
            ["scancel", "--full", "--user", "root"], env=environ, check=False, timeout=30, capture_output=True
        )
        _await_idle(cluster)
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()


def _configure(home: Path) -> dict[str, str]:
    for folder in ("munge", "spool", "state", "work", "archive"):
        (home / folder).mkdir()
    key = home / "munge" / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    for name, variables in (
        ("prolog", f"HOLTER={BIN}/holter HOLTER_LOG={home}/doctor.log"),
        ("epilog", f"HOLTER_ARCHIVE={home}/archive"),
    ):
        # Slurm gives its prologs no environment but its own.
        (home / f"holter-{name}.sh").write_text(f"#!/bin/bash\nexec env {variables} {DEPLOY}/slurm/{name}.sh\n")
        (home / f"holter-{name}.sh").chmod(0o755)
    ours = (DEPLOY / "slurm" / "holter.conf").read_text().replace("/etc/slurm/", f"{home}/")
    (home / "holter.conf").write_text(ours)
    port = free_port()
    text = CONFIGURATION.format(
        home=home, host=socket.gethostname().partition(".")[0], port=port, node_port=port + 1, cpus=os.cpu_count()
    )
    (home / "slurm.conf").write_text(text)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("HOLTER", "SLURM"))}
    return environ | {
        "SLURM_CONF": str(home / "slurm.conf"),
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "HOLTER_SH": str(DEPLOY / "slurm" / "holter.sh"),
        "HOLTER_LINGER_S": "0",
        "HOLTER_MEMORY": "off",
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }


def _start(home: Path, environ: dict[str, str]) -> "list[subprocess.Popen[bytes]]":
    munge = home / "munge"
    files = [
        f"--{name}={munge / file}" for name, file in (("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"))
    ]
    files += [f"--{name}={munge / file}" for name, file in (("log-file", "log"), ("seed-file", "seed"))]
    commands = (
        ["munged", "--foreground", "--num-threads=10", *files],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", socket.gethostname().partition(".")[0]],
    )
    daemons = []
    for command in commands:
        with (home / f"{command[0]}.log").open("wb") as log:
            daemons.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
        if command[0] == "munged":
            wait_for((munge / "socket").exists, 20, "munged")
    cluster = Slurm(home, environ)
    wait_for(lambda: _nodes(cluster) == "idle", 60, f"a node that is idle; see {home}/*.log")
    return daemons


def _nodes(cluster: Slurm) -> str:
    asked = subprocess.run(
        ["sinfo", "-h", "-o", "%T"], env=cluster.environ, capture_output=True, text=True, check=False
    )
    return asked.stdout.strip()


def _await_idle(cluster: Slurm) -> None:
    try:
        wait_for(lambda: _nodes(cluster) in {"idle", "down"}, 30, "the last job's end")
    except AssertionError as late:
        print(late)
