"""A port for a job's store that nobody takes between our asking and its binding.

The kernel gives outgoing connections, of which jobs make many, ports from 32768 on: one that it calls free may be gone a moment later.
"""

import os
import socket

FIRST, NUM = 20_000, 12_000


def free_port() -> int:
    """Below those that the kernel gives away; where to begin depends on who asks."""
    for step in range(NUM):
        port = FIRST + (os.getpid() * 7 + step) % NUM
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise OSError("no port between 20000 and 32000 is free")
