"""What a sidecar must be told: where the coordinator is and who the job is.

It comes through a pipe from the rank, which has it from the environment or from the job's rendezvous store; never on a command line.
"""

import msgspec


class Bootstrap(msgspec.Struct, frozen=True, kw_only=True):
    """One line of JSON on the pipe, and the value in the job's store."""

    address: str
    """`host:port` of the coordinator."""
    token: str
    run_id: str
    run_dir: str
    action: str
    save_deadline_s: float = 300.0
    """So long a save may take in a halt."""
    starts_coordinator: bool = False
    """Only in rank 0's own copy, when no running coordinator was named."""


def encode(bootstrap: Bootstrap) -> bytes:
    """One line."""
    return msgspec.json.encode(bootstrap) + b"\n"


def decode(line: bytes) -> Bootstrap:
    """From one line; raises msgspec.ValidationError or DecodeError."""
    return msgspec.json.decode(line, type=Bootstrap)
