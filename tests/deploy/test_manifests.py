"""Kubernetes, systemd and the container: what the real tools and the API's schemas say of the files, and that the commands in them work."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.conftest import ROOT, wait_for

from free_port import free_port
from holter import cli

DEPLOY = ROOT / "deploy"
JOBS = ("jobset", "trainingruntime")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The overlay for kube-prometheus-stack, as README.md says."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here; `make system` installs it")
    version = json.loads(subprocess.check_output(["kubectl", "version", "--client", "-o", "json"]))
    if "kustomizeVersion" not in version:
        pytest.skip("this kubectl's kustomize is too old for labels and patches")
    copy = tmp_path_factory.mktemp("kubernetes") / "kubernetes"
    shutil.copytree(DEPLOY / "kubernetes", copy)
    for name, words in (("rules", ("alerts", "--operator")), ("dashboards", ("dashboards", "--config-maps"))):
        printed = subprocess.check_output([sys.executable, "-m", "holter.cli", *words])
        (copy / "monitoring" / f"{name}.yaml").write_bytes(printed)
    overlay = copy / "overlays" / "kube-prometheus-stack"
    return list(yaml.safe_load_all(subprocess.check_output(["kubectl", "kustomize", overlay], text=True)))


def job_set(name: str) -> dict[str, Any]:
    """The JobSet's own part of a job's manifest."""
    manifest = yaml.safe_load((DEPLOY / "kubernetes" / "jobs" / f"{name}.yaml").read_text())
    return manifest["spec"]["template"]["spec"] if manifest["kind"] == "ClusterTrainingRuntime" else manifest["spec"]


def lost(said: Any, known: Any, path: str = "") -> Iterator[str]:
    """What a model did not take over; defaults that it adds are no matter."""
    if isinstance(said, dict) and isinstance(known, dict):
        for name, value in said.items():
            yield from lost(value, known.get(name), f"{path}/{name}")
    elif isinstance(said, list) and isinstance(known, list) and len(said) == len(known):
        for number, (one, other) in enumerate(zip(said, known, strict=True)):
            yield from lost(one, other, f"{path}/{number}")
    elif said != known:
        yield path


def validate(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, "1.37", strict=True)


def test_the_schemas_can_refuse() -> None:
    with pytest.raises(kubernetes_validate.ValidationError):
        validate({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"prots": []}})


def test_what_the_overlay_builds_is_what_the_api_takes(built) -> None:
    core = [one for one in built if "monitoring.coreos.com" not in one["apiVersion"]]
    for manifest in core:
        validate(manifest)
    assert {"ConfigMap", "Service", "StatefulSet"} == {one["kind"] for one in core}
    assert {"training"} == {one["metadata"]["namespace"] for one in built}


def test_the_operator_and_grafana_select_what_is_theirs(built) -> None:
    for manifest in built:
        labels = manifest["metadata"]["labels"]
        if manifest["kind"] == "ConfigMap":
            assert "1" == labels["grafana_dashboard"]
        elif "monitoring.coreos.com" in manifest["apiVersion"]:
            assert "kube-prometheus-stack" == labels["release"]
    (monitor,) = (one for one in built if one["kind"] == "ServiceMonitor")
    (service,) = (one for one in built if one["kind"] == "Service")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here; `make system` installs it")
def test_the_operators_rules_are_prometheus_own(built, tmp_path) -> None:
    (rule,) = (one for one in built if one["kind"] == "PrometheusRule")
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rule["spec"]))
    subprocess.run(["promtool", "check", "rules", tmp_path / "rules.yml"], check=True, capture_output=True)


@pytest.mark.parametrize("name", JOBS)
def test_a_halted_job_fails_and_is_not_begun_again(name) -> None:
    jobs = job_set(name)
    assert 0 == jobs["failurePolicy"]["maxRestarts"]
    (replicated,) = jobs["replicatedJobs"]
    job = replicated["template"]
    validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job["spec"]})
    first = job["spec"]["podFailurePolicy"]["rules"][0]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert ("FailJob", [93], container["name"]) == (
        first["action"],
        first["onExitCodes"]["values"],
        first["onExitCodes"]["containerName"],
    )
    # Without it a launcher would turn 93 into 1.
    assert ["holter", "launch", "--"] == container["command"][:3]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("jobset", "jobset_v1alpha2_job_set.JobsetV1alpha2JobSet"),
        ("trainingruntime", "trainer_v1alpha1_cluster_training_runtime.TrainerV1alpha1ClusterTrainingRuntime"),
    ],
)
def test_the_models_of_their_own_api_know_every_field(name, model) -> None:
    pytest.importorskip("kubeflow_trainer_api", reason="no kubeflow-trainer-api here (make frameworks)")
    module, _, kind = model.partition(".")
    model = getattr(importlib.import_module(f"kubeflow_trainer_api.models.{module}"), kind)
    manifest = yaml.safe_load((DEPLOY / "kubernetes" / "jobs" / f"{name}.yaml").read_text())
    assert [] == list(lost(manifest, model.from_dict(manifest).to_dict()))
    manifest["spec"]["numNode"] = 2
    assert ["/spec/numNode"] == list(lost(manifest, model.from_dict(manifest).to_dict()))


@pytest.mark.parametrize("name", JOBS)
def test_the_agent_and_the_ranks_meet(name) -> None:
    pod = job_set(name)["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (agent,), (trainer,) = pod["initContainers"], pod["containers"]
    assert "Always" == agent["restartPolicy"]
    environ = {one["name"]: one["value"] for one in trainer["env"]}
    assert environ["HOLTER_AGENT"] == agent["args"][agent["args"].index("--socket") + 1]
    shared = [one for one in agent["volumeMounts"] if one["name"] == "agent"]
    assert shared == [one for one in trainer["volumeMounts"] if one["name"] == "agent"]
    assert environ["HOLTER_AGENT"].startswith(f"{shared[0]['mountPath']}/")
    assert {"runAsUser"} <= set(pod["securityContext"])
    assert not {"securityContext"} & set(trainer)


@pytest.mark.parametrize("name", JOBS)
def test_the_ports_of_the_ranks_are_scraped(name) -> None:
    (_, monitor) = yaml.safe_load_all((DEPLOY / "kubernetes" / "monitoring" / "monitors.yaml").read_text())
    pod = job_set(name)["replicatedJobs"][0]["template"]["spec"]["template"]
    assert monitor["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
    assert [one["port"] for one in monitor["spec"]["podMetricsEndpoints"]] == list(ports)
    environ = {one["name"]: one["value"] for one in pod["spec"]["containers"][0]["env"]}
    assert [int(environ["HOLTER_METRICS_PORT"]) + rank for rank in (0, 1)] == list(ports.values())


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="no systemd-analyze here; `make system` installs it"
)
@pytest.mark.parametrize("name", ["holter-coordinator@", "holter-agent@", "holter-hub"])
def test_the_units_are_well_formed_and_hardened(name, tmp_path) -> None:
    units = tmp_path / "units"
    shutil.copytree(DEPLOY / "systemd", units)
    unit = units / f"{name}.service"
    unit.write_text(unit.read_text().replace("/opt/holter/bin/holter", str(Path(sys.executable).with_name("holter"))))
    # The hardening is a drop-in of all units.
    environ = os.environ | {"SYSTEMD_UNIT_PATH": f"{units}:"}
    verify = ["systemd-analyze", "verify", "--man=no", unit]
    told = subprocess.run(verify, env=environ, capture_output=True, text=True, check=False)
    assert (0, "") == (told.returncode, told.stderr)
    words = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", unit]
    told = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert 0 == told.returncode, told.stdout[-300:]


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    lint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if lint is None:
        pytest.skip("no hadolint here: its package has none for this platform")
    told = subprocess.run([lint, DEPLOY / "container" / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (0, "") == (told.returncode, told.stdout)


def coordinator_commands() -> dict[str, list[str]]:
    """The words after `holter`, as each environment starts it."""
    docker = re.search(r"^CMD (\[.*\])$", (DEPLOY / "container" / "Dockerfile").read_text(), flags=re.MULTILINE)
    unit = re.search(
        r"^ExecStart=\S+ (.*)$", (DEPLOY / "systemd" / "holter-coordinator@.service").read_text(), flags=re.MULTILINE
    )
    (_, stateful) = yaml.safe_load_all((DEPLOY / "kubernetes" / "base" / "coordinator.yaml").read_text())
    assert docker is not None
    assert unit is not None
    values = {"%i": "gpt", "%d": "/secrets", "${HOLTER_LISTEN}": "127.0.0.1", "${HOLTER_PORT}": "8095"}
    values |= {"${HOLTER_WAIT_S}": "60", "${HOLTER_IDLE_S}": "60", "/var/lib/holter": "/runs"}
    line = unit[1]
    for name, value in values.items():
        line = line.replace(name, value)
    return {
        "container": json.loads(docker[1]),
        "systemd": line.split(),
        "kubernetes": stateful["spec"]["template"]["spec"]["containers"][0]["args"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("where", ["container", "systemd", "kubernetes"])
def test_the_coordinator_starts_as_it_is_told_to_and_the_health_check_passes(where, tmp_path) -> None:
    port = str(free_port())
    (tmp_path / "token").write_text("secret\n")
    words = coordinator_commands()[where]
    places = {"/runs": str(tmp_path / "runs"), "/secrets": str(tmp_path), "0.0.0.0": "127.0.0.1", "8095": port}  # noqa: S104
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    process = subprocess.Popen([sys.executable, "-m", "holter.cli", *words], stderr=subprocess.PIPE, text=True)
    check = re.search(r'"import urllib.*?"(?=])', (DEPLOY / "container" / "Dockerfile").read_text())
    assert check is not None
    program = json.loads(check[0]).replace("8095", port)
    ask = [sys.executable, "-c", program]

    def is_well() -> bool:
        return subprocess.run(ask, capture_output=True, check=False).returncode == 0

    try:
        wait_for(lambda: process.poll() is not None or is_well(), 30, "the health check")
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
    finally:
        process.terminate()
        process.communicate(timeout=20)


def test_dashboards_and_rules_are_printed_for_kubernetes(capsys) -> None:
    assert 0 == cli.main(["alerts", "--operator"])
    assert "PrometheusRule" == yaml.safe_load(capsys.readouterr().out)["kind"]
    assert 0 == cli.main(["dashboards", "--config-maps"])
    maps = list(yaml.safe_load_all(capsys.readouterr().out))
    assert {"holter-overview.json"} <= {name for one in maps for name in one["data"]}
