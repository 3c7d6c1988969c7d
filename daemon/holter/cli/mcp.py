"""`holter mcp`: runs, incidents, evidence, pages of causes, diagnose, verify and memory for agents, as an MCP server.

Over standard input and output, or HTTP with `--http`. Read-only, unless `--allow-writes` lets an agent add to the memory. Nothing is run, halted or
resumed. It reads files that lie below `--root` alone (default: this folder). Needs the extra: pip install holter[mcp].
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

import holter
from holter import clock, config, offline
from holter.cli.diagnose import judged
from holter.cli.memory import add_told
from holter.cli.parts.earlier import memory_of_logs
from holter.cli.parts.run_reader import RUNS, RunReader, locate
from holter.cli.verify import verified
from holter.errors import ConfigError, UsageError
from holter.exporters import pages
from holter.files import read_json
from holter.offline.proof.memory import MemoryFile, search
from holter.offline.proof.verify import VerdictWord
from holter.records import Diagnosis

INSTRUCTIONS = (
    "holter says what is wrong with a training run. Ask `runs` or `status` first, then `incidents`; for a job without holter `diagnose` its logs. "
    "Show the diagnosis before you propose a fix. Below a confidence of 0.70 get what `missing` asks for. After a fix, `verify`."
)
MAX_INCIDENTS = 50


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--http",
        metavar="HOST:PORT",
        help="serve over HTTP instead of standard input and output; loopback unless you name another host",
    )
    parser.add_argument(
        "--root", default=".", metavar="DIR", help="the folder below which files may be read (default: this one)"
    )
    parser.add_argument(
        "--memory",
        default="",
        metavar="FILE",
        help="the memory's file (default: HOLTER_MEMORY, else holter-runs/memory.sqlite)",
    )
    parser.add_argument("--allow-writes", action="store_true", help="let agents add to the memory")
    parser.add_argument("--json", action="store_true", help="print the names of the tools as JSON, and end")


def run(args: argparse.Namespace) -> int:
    """Serve until the client disconnects."""
    root = Path(args.root)
    if not root.is_dir():
        raise UsageError(f"--root {args.root} is no folder")
    host, port = _address(args.http)
    try:
        from mcp.server import MCPServer  # noqa: PLC0415 - an extra
    except ImportError:
        raise UsageError("holter mcp needs the MCP SDK: pip install 'holter[mcp]'") from None
    desk = Tools(root.resolve(), args.memory)
    named = desk.all(is_writing=args.allow_writes)
    if args.json:
        sys.stdout.write(msgspec.json.encode([tool.__name__ for tool in named]).decode() + "\n")
        return 0
    server: Any = MCPServer("holter", instructions=INSTRUCTIONS, version=holter.__version__, log_level="WARNING")
    for tool in named:
        server.tool()(_answering(tool))
    if args.http:
        server.run("streamable-http", host=host, port=port)
    else:
        server.run("stdio")
    return 0


def _address(text: str | None) -> tuple[str, int]:
    if text is None:
        return "127.0.0.1", 0
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) >= 2**16:
        raise UsageError(f"--http takes HOST:PORT or :PORT, got {text}")
    return host or "127.0.0.1", int(port)


def _answering(tool: Any) -> Any:
    """Wrap a tool so that wrong use returns a sentence to the agent instead of failing the server."""
    import functools  # noqa: PLC0415 - beside its one use

    @functools.wraps(tool)
    def answer(*args: Any, **kwargs: Any) -> Any:
        try:
            return tool(*args, **kwargs)
        except (UsageError, ConfigError) as error:
            return {"error": str(error)}

    return answer


class Tools:
    """The tools that an agent may call; each answers what the command of the same name prints as JSON.

    Their docstrings are shown to the agent.
    """

    def __init__(self, root: Path, memory: str) -> None:
        self._root, self._memory = root, memory

    def all(self, *, is_writing: bool) -> list[Any]:
        """Return the tools, under the names that agents see."""
        reading = [
            self.runs,
            self.status,
            self.incidents,
            self.evidence,
            self.explain,
            self.diagnose,
            self.verify,
            self.memory_search,
        ]
        return [*reading, self.memory_add] if is_writing else reading

    def runs(self, folder: str = "holter-runs") -> dict[str, Any]:
        """All runs below a folder: name, when it started and ended, how many incidents and of which causes."""
        found = []
        for path in sorted(self._below(folder).glob("*/run.json")):
            identity = read_json(path, dict[str, Any]) or {}
            diagnoses = [
                one
                for file in path.parent.glob("incidents/*/diagnosis.json")
                if (one := read_json(file, Diagnosis)) is not None
            ]
            found.append(
                {
                    "run": str(path.parent),
                    **{
                        name: identity.get(name)
                        for name in ("run_id", "command", "framework", "world_size", "started_at", "ended_at")
                    },
                    "incidents": [
                        {
                            "id": one.id,
                            "severity": one.severity,
                            "cause": one.causes[0].cause,
                            "closed_at": one.closed_at,
                        }
                        for one in diagnoses
                        if one.causes
                    ],
                }
            )
        return {"runs": found}

    def status(self, run: str = "") -> dict[str, Any]:
        """One run: its ranks, steps and phases if its coordinator still answers; else what run.json says. Without a name: the newest."""
        found = self._run(run)
        return {
            "run": found.name,
            "live": found.ask("/api/v1/status"),
            "identity": {name: value for name, value in found.identity.items() if name != "coordinator"},
        }

    def incidents(self, run: str = "", incident: str = "") -> dict[str, Any]:
        """The diagnoses of a run, or one of them: ranked causes with evidence, what would refute them, the fix, hypotheses, what was seen before."""
        known = self._run(run).diagnoses()
        chosen = [one for one in known if incident in {"", one.id}]
        if incident and not chosen:
            raise UsageError(
                f"there is no incident {incident}; there are {', '.join(one.id for one in known) or 'none'}"
            )
        return {"incidents": msgspec.to_builtins(chosen[-MAX_INCIDENTS:])}

    def evidence(self, run: str, incident: str) -> dict[str, Any]:
        """The files of evidence of one incident: stacks, last collectives, statistics."""
        found = self._run(run)
        if found.directory is None:
            raise UsageError("evidence lies in the run directory: name that, not an address")
        folder = self._below(str(found.directory / "incidents" / incident / "evidence"))
        if not folder.is_dir():
            raise UsageError(f"there is no incident {incident} in {run}")
        return {"evidence": {path.name: read_json(path, dict[str, Any]) for path in sorted(folder.glob("*.json"))}}

    def explain(self, name: str = "") -> dict[str, Any]:
        """The page of a cause or a detector: how it comes about, what would refute it, what to do. Without a name: all names."""
        if not name:
            return {"names": list(pages.names())}
        page = pages.page(name)
        if page is None:
            raise UsageError(f"there is no page {name}; without a name all are listed")
        return {"name": name, "page": page}

    def diagnose(self, paths: list[str]) -> dict[str, Any]:
        """What a job without holter left (logs, tables, tracebacks, configs, code, dumps), judged: a list of diagnoses, each with what was seen before, and what could not be read."""
        found = offline.read([self._below(path) for path in paths])
        diagnoses = offline.judge(found, run_id=paths[0], now_ns=clock.wall_ns())
        if found.dumps is not None:
            diagnoses = [*judged(found.dumps, paths[0])[0], *diagnoses]
        memory = memory_of_logs(self._memory or config.load().memory)
        diagnoses = memory.recall(diagnoses, found) if memory is not None else diagnoses
        return {"diagnoses": msgspec.to_builtins(diagnoses), "remarks": [*found.remarks, *found.failures]}

    def verify(self, before: str, after: str, incident: str = "", cause: str = "") -> dict[str, Any]:
        """Did a fix work: two run directories or logs. fixed, not_fixed, worse or undecided, how many more steps would decide, and what else changed."""
        names = [str(self._below(before)), *([incident] if incident else []), str(self._below(after))]
        found: dict[str, Any] = msgspec.to_builtins(verified(names, cause or None))
        return found

    def memory_search(self, text: str = "") -> dict[str, Any]:
        """Incidents of earlier runs with what was tried against them and what came of it; all of them for an empty text."""
        file = self._file()
        return {"entries": msgspec.to_builtins(search(file.entries(), text)), "remarks": file.remarks}

    def memory_add(
        self, cause: str, fix: str = "", verdict: VerdictWord | None = None, note: str = "", place: str = ""
    ) -> dict[str, Any]:
        """Remember a fix that was tried, with what `verify` said of it, or a note."""
        return {
            "remembered": add_told(self._file(), cause=cause, fix=fix, verdict=verdict or "", note=note, place=place)
        }

    def _file(self) -> MemoryFile:
        from holter.cli.memory import memory_file  # noqa: PLC0415 - one place that finds it

        return memory_file(self._memory)

    def _run(self, run: str) -> RunReader:
        if not run:
            return locate(None, self._root / RUNS)
        return locate(str(self._below(run)) if (self._root / run).exists() else run)

    def _below(self, name: str) -> Path:
        """Return the path of a file that may be read. Raises UsageError if it may not."""
        path = (self._root / name).resolve()
        if path != self._root and self._root not in path.parents:
            raise UsageError(f"{name} lies outside of {self._root}: `holter mcp --root DIR` says what may be read")
        return path
