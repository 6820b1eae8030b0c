"""The flags of launch.sh itself: machines, the ranks on each of them, restarts, the story at the end."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distlab.axes.layout import Layout, equal_parts, layout_flags, layout_size
from distlab.rendezvous.addresses import is_loopback
from simplellm.errors import InputError, require

FLAGS = """
  --tell PROMPT         save the model and, when training has finished, tell a story that begins with PROMPT
  --max-restarts N      after a failure, restart all ranks from the last checkpoint, at most N times (default: 0)
  --spares N            with --repair: N processes may take the places of ranks that have died (default: 0)
  --nnodes N            number of machines; run the same command on each, with --master-addr (default: 1)
  --node-rank R         number of this machine, from 0; node 0 is at --master-addr
  --ranks-per-node A,B  ranks of each machine, by node rank (default: the same number on each)
"""


@dataclass(frozen=True)
class Nodes:
    """The machines of a run.

    Ranks are numbered machine by machine. Ranks that communicate most have neighboring numbers, so they are on one
    machine where possible.
    """

    rank: int  # node rank of this machine
    ranks_of: tuple[int, ...]  # number of ranks on each machine, by node rank


def read_flags(args: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the launcher's own flags, and the other ones for the script; `InputError` if a value is not a number."""
    numbers = {"nnodes": 1, "node-rank": None, "max-restarts": 0, "spares": 0}
    flags, rest = read_known(args, numbers, texts=("ranks-per-node", "tell"))
    require(flags.max_restarts >= 0, f"--max-restarts {flags.max_restarts}: give 0 or more")
    require(flags.spares >= 0, f"--spares {flags.spares}: give 0 or more")
    return flags, rest


def read_known(
    args: list[str], numbers: Mapping[str, int | None], texts: Sequence[str] = ()
) -> tuple[argparse.Namespace, list[str]]:
    """Return the values of some flags, and all other arguments; `InputError` if a value is missing or is not a number.

    Args:
        numbers: the flags that take a whole number, without their dashes, and their defaults.
        texts: those that take any text; None by default.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in (*numbers, *texts):
        spellings = dict.fromkeys(("--" + name, "--" + name.replace("-", "_")))
        parser.add_argument(*spellings, type=int if name in numbers else str, default=numbers.get(name))
    try:
        return parser.parse_known_args(args)
    except argparse.ArgumentError as error:
        raise InputError(str(error)) from error


def refuse_to_tell(script: str) -> InputError:
    """Return the error for `--tell` with a script whose model cannot tell a story."""
    return InputError(f"--tell: {script} does not train a Llama, which could tell a story; leave --tell out")


def assign_ranks(flags: argparse.Namespace, layout: Layout, master_addr: str) -> Nodes:
    """Divide the ranks of a layout among the machines given by the launcher's flags.

    Raises:
        InputError: they cannot be divided this way, or the node rank of this machine is not valid.
    """
    count, rank = flags.nnodes, flags.node_rank or 0
    machines = f"--nnodes {count}"
    require(count >= 1, f"{machines}: give the number of machines, at least 1")
    is_ranked = count == 1 or flags.node_rank is not None
    require(is_ranked, f"{machines}: give each machine its --node-rank, from 0 to {count - 1}")
    require(0 <= rank < count, f"--node-rank {rank}: {machines} has the node ranks 0 to {count - 1}")
    is_reachable = count == 1 or not is_loopback(master_addr)
    address = f"--master-addr {master_addr} with {machines}"
    require(is_reachable, f"{address}: give the address at which the others reach node 0")
    return Nodes(rank, _share(flags.ranks_per_node, count, layout))


def _share(given: str | None, count: int, layout: Layout) -> tuple[int, ...]:
    ranks, flags = layout_size(layout), layout_flags(layout)
    if given is None:
        even = tuple(equal_parts(ranks, count))
        example = f"; or give --ranks-per-node, as in {','.join(map(str, even))}" if ranks > count else ""
        sentence = f"{flags} with --nnodes {count}: {ranks} ranks do not divide among {count} machines"
        require(ranks % count == 0, f"{sentence}; change one of the two numbers{example}")
        return even
    try:
        shares = tuple(map(int, given.split(",")))
    except ValueError:
        raise InputError(f"--ranks-per-node {given}: give a number for each machine, as in 4,2") from None
    require(
        len(shares) == count and min(shares) >= 1 and sum(shares) == ranks,
        f"--ranks-per-node {given}: --nnodes {count} and {flags} need {count} number{'s' * (count > 1)}, each at least "
        f"1, that add up to {ranks}",
    )
    return shares
