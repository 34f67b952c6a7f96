"""A job that takes many leases and runs once at a time. The watchdog renews its lease every third of the lease.

    ASYNCLOCK_URLS=embedded: python examples/long_job.py --lease 1 --seconds 4

Exit code: 0 done; 1 the lease was lost during the job (or the servers are out of reach); 75 it already runs elsewhere;
143 after SIGTERM, which stops the job and releases its lock at once.
The lease is short, so that after a crash (try kill -9) the next run does not wait long.
"""

import argparse
import asyncio
import os
import sys

from graceful import run

from asynclock import Lease, LockLost, redlock

STEP = 0.1


async def job(lease: Lease, seconds: float) -> None:
    """Work, step by step. If the lease is lost, the current step is cancelled."""
    steps = max(1, round(seconds / STEP))
    for step in range(1, steps + 1):
        await asyncio.sleep(STEP)  # a step's work
        print(f"{step / steps:4.0%}  token {lease.fence}, {lease.remaining:.2f} s of lease left", flush=True)


async def main(name: str, seconds: float, length: float) -> int:
    """Run the job under the lock. Returns the exit code."""
    async with redlock:
        lease = await redlock(name, lease=length).acquire(timeout=0)
        if lease is None:
            print(f"{name} runs elsewhere", file=sys.stderr)
            return os.EX_TEMPFAIL
        try:
            async with lease:
                await job(lease, seconds)
        except LockLost as lost:
            print(f"stopped: {lost}", file=sys.stderr)
            return 1
    print("done")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="nightly", help="the name of the job's lock")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long the job takes")
    parser.add_argument("--lease", type=float, default=1.0, help="the lease, in seconds")
    args = parser.parse_args()
    sys.exit(run(main(args.name, args.seconds, args.lease)))
