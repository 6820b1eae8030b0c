"""What a rank waits for, and how it is named."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Wait:
    """What a rank waits for.

    Attributes:
        what: e.g. "the activations of micro-batch 2".
        way: what the rank does; "other" where only the name is known.
        peers: the other ranks that have to do their part.
        number: of a collective, counted from 0 among those of its ranks.
    """

    what: str
    way: Literal["send", "receive", "collective", "other"]
    peers: tuple[int, ...] = ()
    number: int = 0

    def sentence(self, describe: Callable[[int], str]) -> str:
        """ "the gradients from ranks 0 and 2", "rank 1 (stage 1) to take the activations": what one waits for."""
        if self.way == "send":
            return f"{describe(self.peers[0])} to take {self.what}"
        if self.way == "receive":
            return f"{self.what} from {describe(self.peers[0])}"
        return f"{self.what} from {list_ranks(self.peers)}" if self.way == "collective" else self.what


def group_key(ranks: Sequence[int]) -> str:
    """The ranks of a collective, as a key: "0,1,2"."""
    return ",".join(map(str, sorted(ranks)))


def list_ranks(ranks: Sequence[int]) -> str:
    """ "rank 2", "ranks 0 and 2", "ranks 0, 1 and 3"."""
    names = [str(rank) for rank in ranks]
    if len(names) < 2:
        return f"rank {''.join(names)}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
