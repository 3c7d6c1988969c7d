"""Chooses the agent through which a sidecar reports, and starts it from the first sidecar of a host.

HOLTER_AGENT=auto    every sidecar of the host tries the lock beside the socket; the one that gets it starts `holter agent`, which keeps the lock
HOLTER_AGENT=PATH    somebody else has started it
"""

import logging
import os
import subprocess
from dataclasses import replace
from functools import partial

from holter import clock
from holter.sidecar import spawn
from holter.sidecar.spawn import Bootstrap
from holter.transport.limits import UplinkSettings
from holter.transport.local_socket import AUTO, directory, lock, prepare, socket_of

IDLE_S = 5.0
"""Seconds after which the agent ends when the last sidecar has left."""
FIRST_S = 30.0
"""Seconds after which it ends if no sidecar has connected; later sidecars start another one."""

logger = logging.getLogger(__name__)


def through_agent(settings: UplinkSettings, named: str, word: Bootstrap, world_size: int) -> UplinkSettings:
    """Return the settings with this host's agent added, if one is to be used."""
    if not named:
        return settings
    if named != AUTO:
        return replace(settings, agent=named)
    if (problem := prepare(directory())) is not None:
        logger.warning("no agent: %s", problem)
        return settings
    path = str(socket_of(word.run_id, word.address))
    return replace(settings, agent=path, start_agent=partial(start, path, word, world_size))


def start(path: str, word: Bootstrap, world_size: int) -> None:
    """Start the agent unless it runs. Raises nothing: without it, each sidecar reports directly."""
    held = lock(path)
    if held is None:
        return
    read_end, write_end = os.pipe()
    arguments = ["agent", "--socket", path, "--coordinator", word.address, "--run-id", word.run_id]
    arguments += ["--world-size", str(world_size), "--idle-s", str(IDLE_S), "--first-s", str(FIRST_S)]
    arguments += [
        "--clock-base-ns",
        str(clock.base_ns()),
        "--lock-fd",
        str(held),
        "--token-file",
        f"/dev/fd/{read_end}",
    ]
    arguments += ["--log-file", os.path.join(word.run_dir, "logs", f"agent-{os.uname().nodename}.log")]  # noqa: PTH118
    try:
        os.write(write_end, word.token.encode() + b"\n")
        os.close(write_end)
        spawn.start(arguments, pass_fds=(held, read_end))
        logger.info("started the agent of this host, which listens at %s", path)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the agent of this host could not be started: %s", error)
    finally:
        os.close(read_end)
        os.close(held)
