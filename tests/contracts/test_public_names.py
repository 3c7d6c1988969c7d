"""Names that other people's scripts rely on."""

import subprocess
import sys
from importlib import metadata

import holter
from holter import config


def test_the_public_face():
    assert {"watch", "HolterCallback", "__version__"} <= set(holter.__all__)


def test_torch_finds_the_entry_point():
    points = {point.name: point.value for point in metadata.entry_points(group="torch.backends")}
    assert points["holter"] == "holter.integrations.autoload:autoload"


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
    for command in ("status", "report", "explain", "coordinator", "sidecar"):
        assert command in helped.stdout
