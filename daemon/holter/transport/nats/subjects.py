"""What things are called on the server. RUN is the run's name, WHO a rank's number, or `host-` and a host's name for its agent.

holter.RUN.hello.WHO   a sidecar introduces itself         in the stream
holter.RUN.said.WHO    records, and the last word          in the stream
holter.RUN.alive.WHO   where the rank is now               kept by nobody
holter.RUN.clock       the question for the clock          request and reply
holter.RUN.told.WHO    to one sidecar; tables are fetched so, by request and reply
holter.RUN.told.all    to every sidecar: who the coordinator is

holter-run-RUN         the run's stream
holter-runs            the bucket with each run's lease and what is shown of it, by RUN
"""

import re

PREFIX = "holter"
BUCKET = "holter-runs"
BUCKET_STREAM = f"KV_{BUCKET}"
ALL = "all"
HOST = "host-"

_PLAIN = re.compile(r"[A-Za-z0-9_-]")


def token_of(name: str) -> str:
    """One word of a subject: what cannot stand there is written as `=` and its code."""
    return "".join(each if _PLAIN.match(each) else f"={ord(each):x}=" for each in name) or "=="


def name_of(token: str) -> str:
    """What `token_of` was given."""
    return re.sub(r"=([0-9a-f]*)=", lambda found: chr(int(found[1], 16)) if found[1] else "", token)


def host_name(host: str) -> str:
    """WHO a host's agent is."""
    return f"{HOST}{token_of(host)}"


def credential_of(who: str) -> str:
    """By which name its credentials go: `rank-3`, `host-node-a`."""
    return who if who.startswith(HOST) else f"rank-{who}"


class Subjects:
    """Those of one run."""

    def __init__(self, run_id: str) -> None:
        self.key = token_of(run_id)
        """Of the run in the bucket."""
        self.stream = f"{PREFIX}-run-{self.key}"
        self._base = f"{PREFIX}.{self.key}"
        self.clock = f"{self._base}.clock"
        self.kept = [self.hello("*"), self.said("*")]
        """What the stream keeps."""

    def hello(self, who: str) -> str:
        """Where a sidecar introduces itself."""
        return f"{self._base}.hello.{who}"

    def said(self, who: str) -> str:
        """Where it says what happened."""
        return f"{self._base}.said.{who}"

    def alive(self, who: str) -> str:
        """Where it says that it is there."""
        return f"{self._base}.alive.{who}"

    def told(self, who: str) -> str:
        """Where it is told something."""
        return f"{self._base}.told.{who}"
