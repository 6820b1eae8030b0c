"""What a stage can do with a micro-batch. Each kind of action is one class, here or elsewhere, and owns its meaning.

The plan asks an action what it needs, gives, costs and keeps; the executor runs it; tables and figures show its letter.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, cast

if TYPE_CHECKING:
    from torch import Tensor

    from distlab.pipeline.activations import Stage

ACTIVATIONS, GRADIENTS = "activations", "gradients of activations"  # the kinds that travel between stages
GRAPH, FACTORS, WEIGHT_GRADIENTS = "graph", "factors of weight gradients", "gradients of weights"  # stay on their stage

Program = Sequence["Action"]  # what one worker does, in order
Programs = Sequence[Program]  # a pipeline's schedule: what each worker does
PerStage = float | Sequence[float]  # a number serves all stages, a sequence has one for each


@dataclass(frozen=True)
class Result:
    """What a stage computes of a micro-batch; a message, if an action on another worker needs it."""

    kind: str  # also the ledger's column
    stage: int  # that computes it
    micro_batch: int

    def __str__(self) -> str:
        return f"the {self.kind.removesuffix(' of activations')} of micro-batch {self.micro_batch}"


@dataclass(frozen=True)
class ActionCosts:
    """What actions and messages cost."""

    forward: PerStage = 1.0  # seconds of a stage's forward pass over one micro-batch
    backward: PerStage = 2.0  # seconds of its backward pass
    transfer: float = 0.0  # seconds from the end of an action until its message has arrived at the next stage
    activation_bytes: PerStage = 0.0  # what a stage keeps of one micro-batch from its forward to its backward pass
    message_bytes: float = 0.0
    weight_share: PerStage = 0.5  # of a backward pass's seconds, the fraction that `BackwardWeight` takes
    weight_bytes_share: PerStage = 0.5  # of a micro-batch's activation bytes, what is kept for `BackwardWeight`
    measured: Mapping[tuple[str, int], float] = field(default_factory=dict)  # seconds by (letter, stage), where known

    def seconds(self, action: "Action") -> float:
        """How long an action computes."""
        return self.measured.get((action.letter, action.stage), action.seconds(self))

    def kept_bytes(self, action: "Action") -> float:
        """Bytes of activations kept from this action on; negative: freed."""
        return action.kept_share(self) * of_stage(self.activation_bytes, action.stage)


@dataclass(frozen=True)
class Action(ABC):
    """One stage's work on one micro-batch; subclasses are the kinds."""

    letter: ClassVar[str]  # before the micro-batch's number: "F2"
    color: ClassVar[str] = "#cc79a7"  # in figures, as those below of the palette in `distlab.reports.style`
    gives: ClassVar[tuple[str, ...]] = ()  # kinds of results that it computes
    keeps: ClassVar[float] = 0.0  # share of a micro-batch's activations that is kept from now on; negative: freed

    stage: int
    micro_batch: int

    def __init_subclass__(cls) -> None:
        other = KINDS.get(cls.letter, cls)
        if other.__qualname__ != cls.__qualname__:
            raise TypeError(f"{cls.__name__} needs a letter of its own: {cls.letter} is {other.__name__}")
        KINDS[cls.letter] = cls

    def __str__(self) -> str:
        return f"{self.letter}{self.micro_batch}"

    @property
    def results(self) -> list[Result]:
        return [self.result(kind) for kind in self.gives]

    def result(self, kind: str, stage: int | None = None) -> Result:
        """A result of this micro-batch, by default of this stage."""
        return Result(kind, self.stage if stage is None else stage, self.micro_batch)

    @abstractmethod
    def needs(self, stages: int) -> list[Result]:
        """What must be computed first, in a pipeline of `stages` stages; each message is for one action."""

    @abstractmethod
    def seconds(self, costs: ActionCosts) -> float:
        """How long it computes."""

    def kept_share(self, costs: ActionCosts) -> float:
        """`keeps`, where the costs do not tell it better."""
        return self.keeps

    def prepare(self, stage: "Stage") -> None:  # noqa: B027  # nothing, for most kinds
        """Tell the stage, before a step, what this action will need of earlier ones."""

    def run(self, stage: "Stage", *received: "Tensor") -> "dict[str, Tensor]":
        """Compute, given what other stages sent; return by kind what others need: each (batch, seq, width)."""
        raise NotImplementedError


KINDS: dict[str, type[Action]] = {}  # by letter


class Forward(Action):
    """Activations of the stage before -> this stage's activations."""

    letter, color, gives, keeps = "F", "#56b4e9", (ACTIVATIONS, GRAPH), 1.0

    def needs(self, stages: int) -> list[Result]:
        return [self.result(ACTIVATIONS, self.stage - 1)] if self.stage > 0 else []

    def seconds(self, costs: ActionCosts) -> float:
        return of_stage(costs.forward, self.stage)

    def run(self, stage: "Stage", *received: "Tensor") -> "dict[str, Tensor]":
        x = received[0].requires_grad_() if received else stage.micro_batches[self.micro_batch]
        y = stage.forward(self.micro_batch, x)
        stage.live[self.micro_batch] = x, y
        return {ACTIVATIONS: y.detach()}


class Backward(Action):
    """Gradients from the stage after -> gradients of this stage's weights, and of what the stage before sent."""

    letter, color, gives, keeps = "B", "#e69f00", (GRADIENTS, WEIGHT_GRADIENTS), -1.0

    def needs(self, stages: int) -> list[Result]:
        own = self.result(GRAPH)
        return [own, self.result(GRADIENTS, self.stage + 1)] if self.stage < stages - 1 else [own]

    def seconds(self, costs: ActionCosts) -> float:
        return of_stage(costs.backward, self.stage)

    def run(self, stage: "Stage", *received: "Tensor") -> "dict[str, Tensor]":
        x, y = stage.release(self.micro_batch)
        y.backward(*received)
        return {GRADIENTS: cast("Tensor", x.grad)}  # None for the first stage's token ids, which nobody needs


class BackwardInput(Backward):
    """The part of a backward pass for which the stage before waits: all gradients but those of linear layers' weights.

    The letters are those of `torch.distributed.pipelining`; the paper calls the two parts B and W (Qi et al., "Zero
    Bubble Pipeline Parallelism", arXiv 2401.10241).
    """

    letter, color, gives, keeps = "I", "#f0e442", (GRADIENTS, FACTORS), -0.5

    def seconds(self, costs: ActionCosts) -> float:
        return of_stage(costs.backward, self.stage) * (1 - of_stage(costs.weight_share, self.stage))

    def kept_share(self, costs: ActionCosts) -> float:
        return of_stage(costs.weight_bytes_share, self.stage) - 1


class BackwardWeight(Action):
    """The part for which nobody waits before the end of the step: the products for the weights of linear layers."""

    letter, color, gives, keeps = "W", "#009e73", (WEIGHT_GRADIENTS,), -0.5

    def needs(self, stages: int) -> list[Result]:
        return [self.result(FACTORS)]

    def seconds(self, costs: ActionCosts) -> float:
        return of_stage(costs.backward, self.stage) * of_stage(costs.weight_share, self.stage)

    def kept_share(self, costs: ActionCosts) -> float:
        return -of_stage(costs.weight_bytes_share, self.stage)

    def prepare(self, stage: "Stage") -> None:
        stage.defer(self.micro_batch)

    def run(self, stage: "Stage", *received: "Tensor") -> "dict[str, Tensor]":
        stage.deferred.pop(self.micro_batch).compute()
        return {}


def of_stage(value: PerStage, stage: int) -> float:
    return value[stage] if isinstance(value, Sequence) else value


def stages_of(program: Program) -> list[int]:
    """The stages of a worker, in order."""
    return sorted({action.stage for action in program})


def describe_stages(program: Program) -> str:
    """ "stage 1", "stages 1 and 4": a worker's stages."""
    *others, last = map(str, stages_of(program))
    return f"stages {', '.join(others)} and {last}" if others else f"stage {last}"


def labels(programs: Programs) -> dict[Action, str]:
    """Names that tell a worker's actions apart: "F2", and "F2'" on the second of its stages."""
    held = [(program, stages_of(program)) for program in programs]
    return {action: str(action) + "'" * stages.index(action.stage) for program, stages in held for action in program}
