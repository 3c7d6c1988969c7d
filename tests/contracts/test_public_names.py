"""Names that other people's scripts rely on."""

import subprocess
import sys
from importlib import metadata

import holter
from holter import config, testing
from holter.exporters.prometheus import HALT_OUTCOMES, METRICS


def test_the_public_face():
    assert {"watch", "HolterCallback", "__version__"} <= set(holter.__all__)


def test_the_faults_to_rehearse_with():
    names = {"suspend", "resume", "kill", "abort", "leave", "spin", "sleep_for_ever", "hold_interpreter_lock"}
    more = {"skip_collective", "slow_forward", "slow_backward", "slow_data", "stall_loader", "stall_save"}
    silent = {"flip_bit", "perturb", "scale_gradients", "round_trip", "lose_updates", "detach_output"}
    silent |= {"spoil_output", "spoil_gradient", "leave_autocast"}
    assert names | more | silent <= set(testing.__all__)


def test_torch_finds_the_entry_point():
    points = {point.name: point.value for point in metadata.entry_points(group="torch.backends")}
    assert points["holter"] == "holter.frameworks.autoload:autoload"


def test_every_environment_variable_of_the_interface_is_a_setting():
    names = [
        "run_dir",
        "run_id",
        "coordinator",
        "token",
        "token_file",
        "action",
        "overhead_budget",
        "port",
        "metrics_port",
    ]
    assert {*names, "nats"} <= set(config.Settings.__dataclass_fields__)


def test_every_setting_is_documented_under_itself():
    lines = open(config.__file__, encoding="utf-8").read().splitlines()  # noqa: SIM115, PTH123
    for name in config.Settings.__dataclass_fields__:
        index = next(i for i, line in enumerate(lines) if line.startswith(f"    {name}: "))
        assert lines[index + 1].strip().startswith('"""'), name


def test_the_command_knows_its_commands():
    helped = subprocess.run([sys.executable, "-m", "holter.cli", "--help"], capture_output=True, text=True, check=True)
    for command in ("status", "report", "explain", "alerts", "coordinator", "sidecar"):
        assert command in helped.stdout


def test_metrics_that_dashboards_and_pagers_rely_on():
    labels = {
        "build_info": (),
        "rank_info": ("rank", "hostname", "gpu_uuid"),
        "step": ("rank",),
        "last_progress_timestamp_seconds": ("rank",),
        "step_seconds": ("rank",),
        "phase": ("rank", "phase"),
        "loss": ("rank",),
        "gradient_norm": ("rank",),
        "nonfinite_total": ("rank", "where"),
        "collective_lag_seconds": ("rank",),
        "overhead_ratio": ("rank",),
        "observations_dropped_total": ("rank",),
        "finding_active": ("detector", "severity"),
        "incident_open": ("cause", "severity"),
        "incident_info": ("incident", "cause", "severity", "ranks", "tensors", "collective", "step", "url"),
        "incidents_total": ("cause",),
        "halts_total": ("outcome",),
        "checkpoint_last_good_step": (),
        "detector_seconds": ("detector",),
        "detector_failures_total": ("detector",),
        "sidecar_up": ("rank",),
        "device_temperature_celsius": ("rank", "gpu_uuid"),
    }
    for name, expected in labels.items():
        assert set(expected) <= set(METRICS[name].labels), name
    assert METRICS["step_seconds"].kind == "histogram"
    assert set(HALT_OUTCOMES) == {"completed", "called_off", "refused", "incomplete", "failed"}
    assert all((metric.kind == "counter") == name.endswith("_total") for name, metric in METRICS.items())
    assert all(metric.unit == "" or name.endswith(f"_{metric.unit}") for name, metric in METRICS.items())
