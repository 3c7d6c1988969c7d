"""A sidecar's uplink as a process, with a made-up rank that takes four steps a second: `made_up_rank.py ADDRESS RUN RANK WORLD`, until its standard input ends."""

import asyncio
import sys

from tests.coordinator.conftest import SimulatedRank


async def main() -> None:
    """Train, and say how it ended."""
    address, run, rank, world = sys.argv[1:5]
    made = SimulatedRank(int(rank), 0, world_size=int(world), address=address, run_id=run)
    made.attach()
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    step = 0
    while not ended.done():
        made.step(step)
        step += 1
        await asyncio.sleep(0.25)
    print(step, await made.end(step), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
