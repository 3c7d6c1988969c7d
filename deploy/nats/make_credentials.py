"""Accounts for a NATS server: who may report, who may read, who may order.

    python deploy/nats/make_credentials.py --ranks 16 --hosts node-a,node-b --run RUN /etc/holter/nats

writes `users.conf`, which `server.conf` includes, and a file with a seed for each who: `rank-0.seed` … `host-node-a.seed`, `coordinator.seed`, `reader.seed`.
The server has only their public halves. A seed that is there already is kept. Without --run the accounts are for every run; so one server can
serve runs of people who trust each other, and runs of others have accounts of their own.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import nkeys

from holter.transport.nats.line import inbox_of
from holter.transport.nats.subjects import BUCKET, BUCKET_STREAM, Subjects, credential_of, host_name

SEED_BYTES = 32
RESPONSES = {"max": 1, "expires": "10s"}
"""What was asked by a request may be answered, once."""


def reporter(names: Subjects, who: str) -> dict[str, object]:
    """A rank's sidecar, or a host's agent: speaks as itself, hears what it is told."""
    return {
        "publish": [names.hello(who), names.said(who), names.alive(who), names.clock],
        "subscribe": [names.told(who), names.told("all"), f"{inbox_of(credential_of(who))}.>"],
        "allow_responses": RESPONSES,
    }


def coordinator(names: Subjects) -> dict[str, object]:
    """Reads the stream, holds the lease, gives orders."""
    stream, api = names.stream, "$JS.API"
    return {
        "publish": [
            names.told("*"),
            *(f"{api}.STREAM.{verb}.{kept}" for kept in (stream, BUCKET_STREAM) for verb in ("INFO", "CREATE")),
            f"{api}.CONSUMER.CREATE.{stream}",
            f"{api}.CONSUMER.CREATE.{stream}.>",
            f"{api}.CONSUMER.DELETE.{stream}.>",
            f"{api}.STREAM.MSG.GET.{BUCKET_STREAM}",
            f"$KV.{BUCKET}.{names.key}",
            "$JS.FC.>",
        ],
        "subscribe": [names.alive("*"), names.clock, f"{inbox_of('coordinator')}.>"],
        "allow_responses": RESPONSES,
    }


def reader() -> dict[str, object]:
    """Asks for what is shown of the runs, and nothing else."""
    api = "$JS.API.STREAM"
    return {
        "publish": [f"{api}.INFO.{BUCKET_STREAM}", f"{api}.MSG.GET.{BUCKET_STREAM}"],
        "subscribe": [f"{inbox_of('reader')}.>"],
    }


class EveryRun(Subjects):
    """With a star where the run's name is."""

    def __init__(self) -> None:
        super().__init__("x")
        self.key = self.stream = "*"
        self._base = "holter.*"
        self.clock = "holter.*.clock"


def seed_of(directory: Path, who: str) -> bytes:
    """The one that is there, or a new one, which its owner alone can read."""
    path = directory / f"{who}.seed"
    if not path.exists():
        seed = nkeys.encode_seed(os.urandom(SEED_BYTES), nkeys.PREFIX_BYTE_USER)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(seed + b"\n")
    return path.read_bytes().strip()


def users(directory: Path, names: Subjects, speakers: Sequence[str]) -> dict[str, dict[str, object]]:
    """Who -> what it may do."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = {credential_of(who): reporter(names, who) for who in speakers}
    return found | {"coordinator": coordinator(names), "reader": reader()}


def written(directory: Path, permissions: dict[str, dict[str, object]]) -> str:
    """`users.conf`: JSON is what nats-server reads too."""
    lines = []
    for who, may in permissions.items():
        public = nkeys.from_seed(bytearray(seed_of(directory, who))).public_key.decode()
        lines.append(f"  # {who}\n  " + json.dumps({"nkey": public, "permissions": may}))
    return "users: [\n" + ",\n".join(lines) + "\n]\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ranks", type=int, default=0, help="ranks 0 to N-1")
    parser.add_argument("--hosts", default="", help="names of hosts that have an agent, separated by commas")
    parser.add_argument("--run", default="", help="the run's id; without it they are for every run")
    args = parser.parse_args(argv)
    names = Subjects(args.run) if args.run else EveryRun()
    speakers = [str(rank) for rank in range(args.ranks)]
    speakers += [host_name(host.strip()) for host in args.hosts.split(",") if host.strip()]
    text = written(args.directory, users(args.directory, names, speakers))
    (args.directory / "users.conf").write_text(text, encoding="utf-8")
    print(f"{args.directory}/users.conf: {len(speakers)} who report, a coordinator, a reader")
    return 0


if __name__ == "__main__":
    sys.exit(main())
