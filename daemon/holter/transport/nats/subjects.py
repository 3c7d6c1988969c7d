"""Names of subjects, streams and the bucket. RUN is the run, WHO a rank's number, or `host-` and a host's name for its agent.

holter.RUN.hello.WHO   a sidecar introduces itself         in the stream
holter.RUN.said.WHO    records, and the goodbye            in the stream
holter.RUN.alive.WHO   where the rank is now               not kept
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
    """Encode a name as one word of a subject: characters that are not allowed are written as `=`, their code and `=`."""
    return "".join(each if _PLAIN.match(each) else f"={ord(each):x}=" for each in name) or "=="


def name_of(token: str) -> str:
    """Return the name that `token_of` encoded."""
    return re.sub(r"=([0-9a-f]*)=", lambda found: chr(int(found[1], 16)) if found[1] else "", token)


def host_name(host: str) -> str:
    """Return the WHO of a host's agent."""
    return f"{HOST}{token_of(host)}"


def credential_of(who: str) -> str:
    """Return the name for its credentials: `rank-3`, `host-node-a`."""
    return who if who.startswith(HOST) else f"rank-{who}"


class Subjects:
    """The subjects of one run."""

    def __init__(self, run_id: str) -> None:
        self.key = token_of(run_id)
        """Key of the run in the bucket."""
        self.stream = f"{PREFIX}-run-{self.key}"
        self._base = f"{PREFIX}.{self.key}"
        self.clock = f"{self._base}.clock"
        self.kept = [self.hello("*"), self.said("*")]
        """Subjects that the stream keeps."""

    def hello(self, who: str) -> str:
        """Return the subject on which a sidecar introduces itself."""
        return f"{self._base}.hello.{who}"

    def said(self, who: str) -> str:
        """Return the subject to which it sends records."""
        return f"{self._base}.said.{who}"

    def alive(self, who: str) -> str:
        """Return the subject to which it sends signs of life."""
        return f"{self._base}.alive.{who}"

    def told(self, who: str) -> str:
        """Return the subject on which it receives messages."""
        return f"{self._base}.told.{who}"
