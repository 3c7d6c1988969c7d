"""`holter mcp`, driven by the SDK's own client over standard input and output and over HTTP; `holter skill`."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from free_port import free_port
from holter.cli import main

mcp = pytest.importorskip("mcp", reason="the extra holter[mcp] is not installed")
Client, StdioServerParameters = mcp.Client, mcp.StdioServerParameters
ROOT = Path(__file__).resolve().parents[2]
READING = {"runs", "status", "incidents", "evidence", "explain", "diagnose", "verify", "memory_search"}


@pytest.fixture
def folder(tmp_path):
    for name, last in (("before.log", "nan"), ("after.log", "1.0")):
        (tmp_path / name).write_text("\n".join(f"step {i} loss {1.0 if i < 30 else last}" for i in range(200)))
    run = tmp_path / "holter-runs" / "r1"
    run.mkdir(parents=True)
    (run / "run.json").write_text(
        json.dumps(
            {
                "run_id": "r1",
                "started_at": "2026-11-18T10:00:00Z",
                "ended_at": "2026-11-18T11:00:00Z",
                "coordinator": "",
            }
        )
    )
    return tmp_path


def server(folder: Path, *words: str):
    return StdioServerParameters(
        command=sys.executable, args=["-m", "holter.cli", "mcp", *words], cwd=folder, env={"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    )  # fmt: skip


async def asked(client, tool: str, **arguments):
    return json.loads((await client.call_tool(tool, arguments)).content[0].text)


async def test_an_agent_diagnoses_verifies_and_reads_over_standard_input(folder):
    async with Client(server(folder)) as client:
        assert READING == {tool.name for tool in (await client.list_tools()).tools}
        found = await asked(client, "diagnose", paths=["before.log"])
        assert found["diagnoses"][0]["causes"][0]["cause"].startswith("nonfinite")
        assert "fixed" == (await asked(client, "verify", before="before.log", after="after.log"))["verdict"]
        assert ["r1"] == [run["run_id"] for run in (await asked(client, "runs"))["runs"]]
        assert "r1" == (await asked(client, "status"))["run"]
        assert [] == (await asked(client, "incidents"))["incidents"]
        assert "mechanism" not in (await asked(client, "explain"))
        assert "What" in (await asked(client, "explain", name="nonfinite_input"))["page"]
        assert [] == (await asked(client, "memory_search"))["entries"]
        for tool, arguments in (
            ("diagnose", {"paths": ["/etc/passwd"]}),
            ("diagnose", {"paths": ["../x"]}),
            ("incidents", {"run": "nowhere"}),
            ("explain", {"name": "x"}),
        ):
            assert "error" in await asked(client, tool, **arguments)


async def test_an_agent_writes_only_where_it_was_told_it_may(folder):
    async with Client(server(folder, "--allow-writes")) as client:
        added = await asked(client, "memory_add", cause="rank_dead", fix="another host", verdict="fixed")
        assert added["remembered"]
        assert ["another host"] == [
            one["fix"] for one in (await asked(client, "memory_search", text="host"))["entries"]
        ]
        assert "error" in await asked(client, "memory_add", cause="nonsense", fix="x")


@pytest.fixture
def address(folder):
    port = free_port()
    command = [sys.executable, "-m", "holter.cli", "mcp", "--http", f":{port}"]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            break
        time.sleep(0.2)
    yield f"http://127.0.0.1:{port}/mcp"
    process.terminate()
    process.wait(30)


async def test_the_same_over_http(address):
    async with Client(address) as client:
        assert "fixed" == (await asked(client, "verify", before="before.log", after="after.log"))["verdict"]


@pytest.mark.parametrize(
    "words", [["mcp", "--root", "nowhere"], ["mcp", "--http", "x"], ["skill", "--install", "/proc/nowhere"]]
)
def test_wrong_use_is_one_sentence(words, capsys):
    assert 2 == main(words)
    assert 1 == capsys.readouterr().err.count("\n")


def test_the_skill_is_installed_and_is_the_one_of_the_tree(tmp_path, capsys):
    assert 0 == main(["skill", "--install", str(tmp_path / "skills")])
    written = (tmp_path / "skills" / "holter" / "SKILL.md").read_text(encoding="utf-8")
    assert written == (ROOT / "skills" / "holter" / "SKILL.md").read_text(encoding="utf-8")
    assert written.startswith("---\nname: holter\ndescription: ")
    capsys.readouterr()
    assert 0 == main(["skill"])
    assert written == capsys.readouterr().out
