"""An exercise, and the layouts in which a training script is tried."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from distlab.axes.layout import Layout, replicas_in
from distlab.run.terminal import counted

AXIS_PLURALS = {"dp": "replicas", "pp": "stages", "cp": "parts", "ep": "shares", "tp": "slices"}


@dataclass(frozen=True)
class Trial:
    """A layout in which a training script is tried beside one process."""

    layout: Layout
    batch_size: int = 2  # sequences of each replica
    micro_batches: int = 1
    settings: Mapping[str, int | float | str] = field(default_factory=dict)  # further flags of the script, by name

    @property
    def world_size(self) -> int:
        return prod(self.layout.values())

    @property
    def replicas(self) -> int:
        return replicas_in(self.layout)

    @property
    def flags(self) -> dict[str, int | float | str]:
        """The script's flags by name; a script with a single axis has one for the number of ranks."""
        ranks, *others = self.layout.values()
        topology = self.layout if others else {"world_size": ranks}
        sizes = {"batch_size": self.batch_size, "micro_batches": self.micro_batches}
        return {**topology, **sizes, **self.settings}

    @property
    def sync_every(self) -> int:
        """Steps of each replica between two averages of the weights."""
        return int(self.settings.get("sync_every", 1))

    def __str__(self) -> str:
        sizes = ", ".join(counted(size, AXIS_PLURALS[name]) for name, size in self.layout.items())
        often = f", an average every {self.sync_every} steps" if self.sync_every > 1 else ""
        return f"{sizes}, {self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)}{often}"


@dataclass(frozen=True)
class OneProcess:
    """The training run of one process that ranks are compared with, where it is not that of the chapters."""

    settings: tuple[tuple[str, int | str], ...] = ()  # flags that differ from those of all trials, by their names
    mixture: bool = False  # each block has experts
    masks_documents: bool = False  # tokens attend within their documents
    first_sentences: bool = False  # only the tokens of each row's first sentence are predicted
    shared: tuple[tuple[str, str], ...] = ()  # names of two modules, of which the first is replaced by the second
    clip_norm: float = float("inf")  # the largest norm of all gradients together


USUAL = OneProcess()


@dataclass(frozen=True)
class Exercise:
    """An exercise, and how it is checked."""

    name: str
    title: str  # what one learns, after "Exercise dp-ga: "
    minutes: int  # how long it takes somebody who has read the chapter
    chapter: str  # the page to read first
    task: str  # paragraphs, divided by blank lines
    hints: tuple[str, ...]  # from a nudge to nearly the solution
    script: str = ""  # the chapter's script that it is made from; "" for functions alone
    takes: tuple[str, ...] = ()  # functions and classes to write: of the script, or "module:name" of the library
    given: tuple[tuple[str, str], ...] = ()  # text that is replaced in the skeleton
    imports: tuple[str, ...] = ()  # that the solution needs, if the script does without
    keeps: tuple[str, ...] = ()  # methods of these classes that are given
    functions: str = ""  # how those in `takes` are tried one by one: a name in `distlab_exercises.checker`
    cases: tuple[str, ...] = ()  # functions that are tried, but not taken out
    trials: tuple[Trial, ...] = field(default_factory=tuple)
    weights_only: bool = False  # compare no gradients: those of the ranks are their own
    shares_out: bool = False  # each rank's optimizer updates its part of the weights
    loss_numbers: int = 0  # that the ranks need to combine of each token for its loss; 0: they may send more
    ranks_start_apart: bool = False  # try it with ranks whose weights differ from rank 0's at first

    @property
    def tried(self) -> tuple[str, ...]:
        """Functions that are tried on their own before the script is trained."""
        return (self.cases or self.takes) if self.functions else ()

    @property
    def file_name(self) -> str:
        return self.script.rpartition("/")[2] or f"{self.name.replace('-', '_')}.py"
