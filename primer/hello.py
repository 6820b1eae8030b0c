"""Several processes say hello with plain torch.distributed: a group, ranks, a message, a sum, and a deadlock.

    ./launch.sh hello                                 two ranks; --world-size 4 for more
    ./launch.sh hello --deadlock                      all ranks send first, and none receives: a failure, after 10 s
    python primer/hello.py <rank>                     in two terminals, with the ranks 0 and 1

`torchrun --nproc-per-node 2 primer/hello.py` also works. Only the backend, "lab", is not torch's own: see README.md.
"""

import argparse
import os
import signal
import sys
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

import distlab  # noqa: F401  # registers the backend "lab"


def main() -> None:
    args = read_command_line()
    try:  # wait until all ranks are there; no wait, here or below, may take longer than the timeout
        dist.init_process_group("lab", timeout=timedelta(seconds=10 if args.deadlock else 120))
    except (dist.DistError, ValueError) as error:
        could_not_meet(error)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    print(f"rank {rank} of {world_size}: hello", flush=True)

    numbers = torch.arange(3.0) + 10 * rank
    received = torch.empty(3)
    if rank == 0 or args.deadlock:
        dist.send(numbers, after)  # may return only when the receiver takes the message
        dist.recv(received, before)
    else:
        dist.recv(received, before)
        dist.send(numbers, after)
    print(f"rank {rank} received {received.tolist()} from rank {before}", flush=True)

    dist.all_reduce(numbers)  # the sum over all ranks, in place, on all of them
    print(f"rank {rank} has the sum {numbers.tolist()}", flush=True)
    dist.destroy_process_group()


def read_command_line() -> argparse.Namespace:
    """Read the flags. In terminals, also set the variables by which ranks meet, as launch.sh and torchrun do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "rank", type=int, nargs="?", choices=(0, 1), help="of this process; launch.sh and torchrun set it"
    )
    parser.add_argument("--deadlock", action="store_true", help="all ranks send first, and wait for each other")
    args = parser.parse_args()
    if (args.rank is None) != ("RANK" in os.environ):
        parser.error("give the rank, 0 or 1; under launch.sh and torchrun, leave it out")
    if args.rank is not None:
        os.environ.update(RANK=str(args.rank), WORLD_SIZE="2", MASTER_ADDR="localhost")
        os.environ.setdefault("MASTER_PORT", "29500")
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C also ends a rank that waits inside torch
        print(f"# rank {args.rank} waits until rank {1 - args.rank} is there: start it in another terminal", flush=True)
    if os.environ["WORLD_SIZE"] == "1":
        parser.exit(2, "# --world-size 1: a rank cannot send to itself; give at least 2\n")
    return args


def could_not_meet(error: Exception) -> NoReturn:
    """End this process with a sentence: a rank is missing, two have the number 0, or the port is abc, for example."""
    why = f"the ranks could not meet at port {os.environ.get('MASTER_PORT')} ({str(error).splitlines()[0]})"
    print(f"# {why}: start each rank once, or put MASTER_PORT=29501 before each command", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
