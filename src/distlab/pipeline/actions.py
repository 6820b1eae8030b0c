"""Actions: the operations that a stage can apply to a micro-batch. Each kind of action is one class, here or elsewhere.

An action states what it needs, what it computes, how long it takes and which activations it keeps; the simulation in
`plan` uses these. The executor runs it. Tables and figures show its letter.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, cast

from distlab.axes.layout import name_stages

if TYPE_CHECKING:
    from torch import Tensor

    from distlab.pipeline.activations import MicroBatch

ACTIVATIONS, GRADIENTS = "activations", "gradients of activations"  # kinds of results that are sent between stages
# Kinds never sent:
INPUT, GRAPH, FACTORS, WEIGHT_GRADIENTS = "input", "graph", "factors of weight gradients", "gradients of weights"

Program = Sequence["Action"]  # one worker's actions, in order
Programs = Sequence[Program]  # a pipeline's schedule: the actions of each worker
PerStage = float | Sequence[float]  # one number for all stages, or a sequence with one per stage


@dataclass(frozen=True)
class Result:
    """A result that a stage computes for a micro-batch; it is sent as a message if another worker needs it."""

    kind: str  # also the ledger's column
    stage: int  # the stage that computes it
    micro_batch: int

    def __str__(self) -> str:
        return f"the {self.kind.removesuffix(' of activations')} of micro-batch {self.micro_batch}"


@dataclass(frozen=True)
class ActionCosts:
    """Time and memory costs of actions and messages."""

    forward: PerStage = 1.0  # seconds of a stage's forward pass over one micro-batch
    backward: PerStage = 2.0  # seconds of its backward pass
    transfer: float = 0.0  # seconds from the end of an action until its message has arrived at the next stage
    activation_bytes: PerStage = 0.0  # kept for one micro-batch between its forward and its backward pass
    weight_share: PerStage = 0.5  # fraction of a backward pass's seconds that `BackwardWeight` takes
    weight_bytes_share: PerStage = 0.5  # fraction of a micro-batch's activation bytes kept for `BackwardWeight`
    measured: Mapping[tuple[str, int], float] = field(default_factory=dict)  # seconds by (letter, stage), where known
    input_bytes_share: PerStage = 0.0  # fraction of a micro-batch's activation bytes that `ForwardKeepingInput` keeps
    blocks: PerStage | None = None  # seconds of a forward pass through a stage's blocks only; by default, `forward`
    # Of a layer's forward pass over a micro-batch, on one rank; this number decides how many threads have enough to do.
    layer_multiply_adds: float = math.inf

    def seconds(self, action: "Action") -> float:
        """Return the compute time of an action."""
        return self.measured.get((action.letter, action.stage), action.seconds(self))

    def kept_bytes(self, action: "Action") -> float:
        """Return the bytes of activations that this action adds to those kept; negative if it frees them."""
        return action.kept_share(self) * of_stage(self.activation_bytes, action.stage)


@dataclass(frozen=True)
class Action(ABC):
    """One stage's work on one micro-batch; each subclass is a kind of action."""

    letter: ClassVar[str]  # printed before the micro-batch's number: "F2"
    color: ClassVar[str] = "#999999"  # in figures; the colors here are from the palette in `distlab.reports.style`
    gives: ClassVar[tuple[str, ...]] = ()  # kinds of results that it computes
    keeps: ClassVar[float] = 0.0  # see `kept_share`

    stage: int
    micro_batch: int

    def __init_subclass__(cls) -> None:
        other = ACTION_KINDS.get(cls.letter, cls)
        if other.__qualname__ != cls.__qualname__:
            raise TypeError(f"{cls.__name__} needs a letter of its own: {cls.letter} is {other.__name__}")
        ACTION_KINDS[cls.letter] = cls

    def __str__(self) -> str:
        return f"{self.letter}{self.micro_batch}"

    @classmethod
    def in_words(cls) -> str:
        """Return the name of this kind in words: "backward weight"."""
        return re.sub(r"(?<!^)(?=[A-Z])", " ", cls.__name__).lower()

    @property
    def results(self) -> list[Result]:
        return [self.result(kind) for kind in self.gives]

    def result(self, kind: str, stage: int | None = None) -> Result:
        """Return a result of this micro-batch, by default of this stage."""
        return Result(kind, self.stage if stage is None else stage, self.micro_batch)

    @abstractmethod
    def needs(self, stages: int) -> list[Result]:
        """Return the results that must exist first, in a pipeline of `stages` stages; a message serves one action."""

    @abstractmethod
    def seconds(self, costs: ActionCosts) -> float:
        """Return the compute time."""

    def kept_share(self, costs: ActionCosts) -> float:
        """Return the share of a micro-batch's activations that it adds to those kept; negative if it frees them."""
        return self.keeps

    def prepare(self, here: "MicroBatch") -> None:  # noqa: B027  # most kinds need no preparation
        """Before a step, tell the micro-batch what this action will need from earlier actions."""

    def run(self, here: "MicroBatch", *received: "Tensor") -> "dict[str, Tensor]":
        """Compute from the tensors received; return those that other stages need, by kind: each (batch, seq, width)."""
        raise NotImplementedError


ACTION_KINDS: dict[str, type[Action]] = {}  # by letter


class Forward(Action):
    """Activations of the previous stage -> activations of this stage."""

    letter, color, gives, keeps = "F", "#56b4e9", (ACTIVATIONS, GRAPH), 1.0

    def needs(self, stages: int) -> list[Result]:
        return [self.result(ACTIVATIONS, self.stage - 1)] if self.stage > 0 else []

    def seconds(self, costs: ActionCosts) -> float:
        return of_stage(costs.forward, self.stage)

    def run(self, here: "MicroBatch", *received: "Tensor") -> "dict[str, Tensor]":
        x = received[0].requires_grad_() if received else here.ids
        y = here.forward(x)
        here.kept = x, y
        return {ACTIVATIONS: y.detach()}


class ForwardKeepingInput(Forward):
    """A forward pass that keeps only its input; `ForwardAgain` computes the rest again for the backward pass."""

    letter, gives = "f", (ACTIVATIONS, INPUT)

    def kept_share(self, costs: ActionCosts) -> float:
        return of_stage(costs.input_bytes_share, self.stage)

    def run(self, here: "MicroBatch", *received: "Tensor") -> "dict[str, Tensor]":
        x = received[0].requires_grad_() if received else here.ids
        y = here.forward(x, keep_input_only=True)
        here.keep_graph(x, y)
        return {ACTIVATIONS: y.detach()}


class ForwardAgain(Action):
    """The forward pass again, this time for its activations; it need not wait for gradients from the stage after."""

    letter, color, gives = "R", "#cc79a7", (GRAPH,)

    def needs(self, stages: int) -> list[Result]:
        return [self.result(INPUT)]

    def seconds(self, costs: ActionCosts) -> float:
        return of_stage(costs.forward, self.stage)

    def kept_share(self, costs: ActionCosts) -> float:
        return 1 - of_stage(costs.input_bytes_share, self.stage)

    def run(self, here: "MicroBatch", *received: "Tensor") -> "dict[str, Tensor]":
        here.recompute()
        return {}


class Backward(Action):
    """Gradients from the next stage -> gradients of this stage's weights and of the activations it received."""

    letter, color, gives, keeps = "B", "#e69f00", (GRADIENTS, WEIGHT_GRADIENTS), -1.0

    def needs(self, stages: int) -> list[Result]:
        own = self.result(GRAPH)
        return [own, self.result(GRADIENTS, self.stage + 1)] if self.stage < stages - 1 else [own]

    def seconds(self, costs: ActionCosts) -> float:
        return of_stage(costs.backward, self.stage)

    def run(self, here: "MicroBatch", *received: "Tensor") -> "dict[str, Tensor]":
        x = here.backward(*received)
        return {GRADIENTS: cast("Tensor", x.grad)}  # None for the token ids of the first stage; no stage needs it


class BackwardInput(Backward):
    """The part of a backward pass that the previous stage waits for: all gradients except those of linear weights.

    The letters follow `torch.distributed.pipelining`; the paper calls the two parts B and W (Qi et al., "Zero Bubble
    Pipeline Parallelism", arXiv 2401.10241).
    """

    letter, color, gives = "I", "#f0e442", (GRADIENTS, FACTORS)

    def seconds(self, costs: ActionCosts) -> float:
        return of_stage(costs.backward, self.stage) * (1 - of_stage(costs.weight_share, self.stage))

    def kept_share(self, costs: ActionCosts) -> float:
        return of_stage(costs.weight_bytes_share, self.stage) - 1


class RecomputingBackward(Backward):
    """A backward pass right after its forward pass, in which each block computes its inside again."""

    letter = "b"

    def seconds(self, costs: ActionCosts) -> float:
        return costs.seconds(Backward(self.stage, self.micro_batch)) + _blocks_again(self, costs)


class RecomputingBackwardInput(BackwardInput):
    """The same, without the gradients of linear weights."""

    letter = "i"

    def seconds(self, costs: ActionCosts) -> float:
        return costs.seconds(BackwardInput(self.stage, self.micro_batch)) + _blocks_again(self, costs)


class BackwardWeight(Action):
    """The part that no stage waits for until the end of the step: the gradients of the weights of linear layers."""

    letter, color, gives = "W", "#009e73", (WEIGHT_GRADIENTS,)

    def needs(self, stages: int) -> list[Result]:
        return [self.result(FACTORS)]

    def seconds(self, costs: ActionCosts) -> float:
        return of_stage(costs.backward, self.stage) * of_stage(costs.weight_share, self.stage)

    def kept_share(self, costs: ActionCosts) -> float:
        return -of_stage(costs.weight_bytes_share, self.stage)

    def prepare(self, here: "MicroBatch") -> None:
        here.defer_weight_gradients()

    def run(self, here: "MicroBatch", *received: "Tensor") -> "dict[str, Tensor]":
        here.compute_weight_gradients()
        return {}


def _blocks_again(action: Action, costs: ActionCosts) -> float:
    """Return the seconds that the blocks of a stage take to compute their insides again."""
    if costs.blocks is None:
        return costs.seconds(ForwardAgain(action.stage, action.micro_batch))
    return of_stage(costs.blocks, action.stage)


def of_stage(value: PerStage, stage: int) -> float:
    return value[stage] if isinstance(value, Sequence) else value


def stages_of(program: Program) -> list[int]:
    """Return the stages that a worker holds, in order."""
    return sorted({action.stage for action in program})


def describe_stages(program: Program) -> str:
    """Return a worker's stages in words: "stage 1", "stages 1 and 4"."""
    return name_stages(stages_of(program))


def labels(programs: Programs) -> dict[Action, str]:
    """Unique names for a worker's actions: "F2" on its first stage, "F2'" on its second."""
    held = [(program, stages_of(program)) for program in programs]
    return {action: str(action) + "'" * stages.index(action.stage) for program, stages in held for action in program}
