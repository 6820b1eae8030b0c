"""The settings of all runs that train the lab's Llama.

The settings of replicas are in `replicas`, of pipelines in `stages`, of slices in `slices`, of shared sequences in
`sequences`, of mixtures of experts in `experts`; those of several kinds of parallelism at once in `hybrid`.
"""

import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from distlab.checkpoints import LLAMA
from distlab.settings.common import ResumableSettings, require_positive, shown_as
from distlab.settings.resume_policy import ResumePolicy
from simplellm.errors import require, require_package
from simplellm.options import Recompute, check_heads
from simplellm.sources import choose_source, open_source
from simplellm.tokenizers import SHIPPED_MODEL, SPTokenizer

if TYPE_CHECKING:
    from distlab.comm.recorder import StepTime

LRSchedule = Literal["constant", "cosine", "linear"]
OptimizerName = Literal["adam", "adamw", "sgd"]  # their classes are in `distlab.run.model`
MOMENTS: dict[str, int] = {"adam": 2, "adamw": 2, "sgd": 0}  # tensors that the optimizer keeps for each weight
BETAS = (0.9, 0.999)  # torch's default
MOST_LAYERS, MOST_TOKENS = 1000, 2**24  # larger numbers are taken for typing errors, as with `MOST_RANKS`


@dataclass
class TrainSettings(ResumableSettings):
    """A training run of the lab's Llama."""

    architecture = LLAMA

    seed: Annotated[int, ResumePolicy.DEFAULT] = 0
    """seed of the initial weights and of the data"""
    steps: int = 5000
    """optimizer steps"""
    batch_size: Annotated[int, ResumePolicy.PER_REPLICA] = 3
    """sequences per step for one model replica"""
    micro_batches: Annotated[int, ResumePolicy.SAME_LAYOUT] = 1
    """parts that the batch is split into"""
    seq_len: Annotated[int, ResumePolicy.DEFAULT] = 256
    """tokens per sequence"""
    dmodel: Annotated[int, ResumePolicy.MODEL] = 288
    """width of the model"""
    num_heads: Annotated[int, ResumePolicy.MODEL] = 6
    """attention heads"""
    num_kv_heads: Annotated[int | None, ResumePolicy.MODEL, shown_as("INT", "default: as many as --num-heads")] = None
    """key and value heads, each shared by the same number of attention heads (grouped-query attention)"""
    hidden_dim: Annotated[int | None, ResumePolicy.MODEL, shown_as("INT", "default: 4 times --dmodel")] = None
    """width of the feed-forward layers"""
    n_layers: Annotated[int, ResumePolicy.MODEL] = 6
    """transformer layers"""
    lr: Annotated[float, ResumePolicy.DEFAULT] = 8e-4
    """learning rate"""
    optimizer: Annotated[OptimizerName, ResumePolicy.FIXED] = "adam"
    """update rule"""
    clip_norm: Annotated[float | None, ResumePolicy.DEFAULT, shown_as("FLOAT", "default: no clipping")] = None
    """largest norm of all gradients together; if it is larger, all of them are scaled down"""
    betas: Annotated[tuple[float, float], ResumePolicy.DEFAULT, shown_as("FLOAT FLOAT", "default: 0.9 0.999")] = BETAS
    """decay rates of adam's and adamw's moving averages of the gradient and of its square"""
    weight_decay: Annotated[float | None, ResumePolicy.DEFAULT, shown_as("FLOAT", "default: 0; 0.01 with adamw")] = None
    """weight decay, of matrices only"""
    warmup_steps: Annotated[int, ResumePolicy.DEFAULT] = 0
    """steps over which the learning rate rises to --lr"""
    lr_schedule: Annotated[LRSchedule, ResumePolicy.DEFAULT] = "constant"
    """how the learning rate falls from --lr to --min-lr between the warm-up and the last step"""
    min_lr: Annotated[float, ResumePolicy.DEFAULT] = 0.0
    """learning rate at the end of --lr-schedule cosine or linear"""
    dtype: Annotated[Literal["float32", "bfloat16"], ResumePolicy.DEFAULT] = "float32"
    """bfloat16 computes in mixed precision"""
    residual: Annotated[Literal["float32", "bfloat16"], ResumePolicy.DEFAULT] = "float32"
    """the residual stream in mixed precision: bfloat16 takes half the memory, and is rounded after every layer"""
    recompute: Recompute = "none"
    """activations that the backward pass computes again: the inside of each block, with or without attention, or all"""
    compile: bool = False
    """compile blocks, head and loss with torch.compile before the first step, which takes up to a minute"""
    document_mask: Annotated[bool, ResumePolicy.FIXED] = False
    """tokens attend within their own document, where several are joined to one sequence"""
    data: Annotated[str, tyro.conf.arg(metavar="auto|sample|tinystories|FILE")] = "auto"
    """stories: the generator (sample), the hub's data set (tinystories), or a .txt, .jsonl or .parquet file"""
    tokenizer: Annotated[Path | None, shown_as("FILE", "default: the shipped one")] = None
    """a SentencePiece model"""
    eval_every: Annotated[int | None, shown_as("INT", "default: never")] = None
    """evaluate on the validation split every N steps"""
    eval_sequences: int = 24
    """sequences of the validation split to evaluate on"""
    machine: Annotated[Path | None, shown_as("FILE", "default: no prediction")] = None
    """file of launch.sh calibrate: print the predicted time of a step and, at the end, the measured time"""
    trace: bool = False
    """record the timeline, and draw it at the end of the run"""
    page: bool = False
    """write the run's page, an HTML file, at the end of the run"""
    tensorboard: bool = False
    """also write the records for TensorBoard, in the run's folder"""

    @property
    def length(self) -> tuple[str, int]:
        return f"--steps {self.steps}", self.steps

    @property
    def tokenizer_model(self) -> Path:
        return self.tokenizer or SHIPPED_MODEL

    @property
    def data_identity(self) -> dict[str, Any] | None:
        if self.data in ("sample", "tinystories"):
            return {"source": self.data} | ({"seed": self.seed} if self.data == "sample" else {})
        if self.data == "auto":
            return None
        from distlab.settings.resuming import file_identity

        return file_identity(self.data)

    @property
    def has_moments(self) -> bool:
        """True if the optimizer keeps moving averages of the gradients."""
        return moments_of(self.optimizer) > 0

    @property
    def positions(self) -> int:
        """Positions of a sequence on each rank."""
        return self.seq_len

    def decide(self) -> dict[str, Any]:
        if self.tensorboard:
            require_package("tensorboard", "--tensorboard")
        source, why = choose_source(self.data)
        why += f" (--data {self.data})" * (self.data in ("sample", "tinystories"))
        if self.prediction is not None:
            self.prediction.check_device(self.device)
        decided = {"data": source, "data_because": why, "data_identity": replace(self, data=source).data_identity}
        if self.prediction is not None:
            decided["predicted_seconds"] = self.prediction.seconds
        if source == "tinystories":
            from simplellm.sources.hub import hub_revision

            decided["data_revision"] = hub_revision()
        return decided

    def remarks(self, decided: dict[str, Any]) -> list[str]:
        predicted = [self.prediction.sentence] if self.prediction else []
        return [f"stories from {decided['data_because']}", *self._lr_remarks(), *predicted]

    def remarks_at_the_end(self, times: "Sequence[StepTime]") -> list[str]:
        return list(self.prediction.beside(times)) if self.prediction and times else []

    @functools.cached_property
    def prediction(self) -> Any:
        """The planner's `Prediction` for this run, with `--machine`, else None; `InputError` if it has none.

        The file is read once: when the run ends, hours later, it may have changed.
        """
        if self.machine is None:
            return None
        sentence = f"--machine {self.machine}: there is no such file; launch.sh calibrate FILE writes one"
        require(os.path.isfile(self.machine), sentence)
        from distlab.settings.optional_packages import planner_prediction

        return planner_prediction().of(self, self.machine)

    def _lr_remarks(self) -> list[str]:
        """Return lines to print about a learning rate that changes."""
        parts = [f"rises to {self.lr:g} over {self.warmup_steps:,} steps"] if self.warmup_steps else []
        if self.lr_schedule != "constant":
            curve = "half a cosine" if self.lr_schedule == "cosine" else "a line"
            parts.append(f"falls from {self.lr:g} to {self.min_lr:g} along {curve}, until step {self.steps:,}")
        return [f"the learning rate {' and then '.join(parts)}"] if parts else []

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return learning_rate(step, self.steps, self.lr, self.warmup_steps, self.lr_schedule, self.min_lr)

    def mixture_options(self) -> dict[str, Any]:
        """Return the keyword arguments of models in `simplellm.llama` that a mixture of experts adds."""
        return {}

    def check(self) -> None:
        super().check()
        sizes = "dmodel num_heads num_kv_heads hidden_dim n_layers"
        require_positive(
            self, *f"steps batch_size micro_batches {sizes} lr clip_norm eval_every eval_sequences".split()
        )
        require(self.n_layers <= MOST_LAYERS, f"--n-layers {self.n_layers}: give at most {MOST_LAYERS:,}")
        for flag, sequences in (("--batch-size", self.batch_size), ("--eval-sequences", self.eval_sequences)):
            tokens, given = sequences * self.seq_len, f"{flag} {sequences} with --seq-len {self.seq_len}"
            require(tokens <= MOST_TOKENS, f"{given}: {tokens:,} tokens at a time; give at most {MOST_TOKENS:,}")
        self._check_recipe()
        is_mixed = self.dtype == "bfloat16" or self.residual == "float32"
        require(is_mixed, f"--residual {self.residual} with --dtype {self.dtype}: give --dtype bfloat16 too")
        if self.compile:
            from distlab.machine.compilers import require_compiler

            require_compiler()
        require(self.seq_len > 1, f"--seq-len {self.seq_len}: predicting the next token needs at least 2")
        if self.resume is None:  # otherwise they are the checkpoint's, whose heads may have a different width
            check_heads(self.dmodel, self.num_heads, self.num_kv_heads)
        rows, parts = self.batch_size, self.micro_batches
        advice = f"the batch must divide into equal micro-batches; give a multiple of {parts}"
        require(rows % parts == 0, f"--batch-size {rows} with --micro-batches {parts}: {advice}")
        if self.page:
            from distlab.settings.optional_packages import page_writer

            page_writer()
        has_end = SPTokenizer(self.tokenizer).eos_id >= 0
        sentence = "the model has no end-of-document piece (eos); give one that has"
        require(has_end, f"--tokenizer {self.tokenizer}: {sentence}")
        _ = self.prediction  # raises `InputError` if the planner cannot predict this run
        if self.data not in ("auto", "sample", "tinystories"):  # a file may be unreadable or empty
            for split in ("train", "validation") if self.eval_every else ("train",):
                open_source(self.data, split, self.seed).check_text()

    def _check_recipe(self) -> None:
        decay, betas = self.weight_decay, " ".join(map(str, self.betas))
        require(decay is None or 0 <= decay < math.inf, f"--weight-decay {decay}: give 0 or more")
        are_shares = all(0 <= beta < 1 for beta in self.betas)
        require(are_shares, f"--betas {betas}: give two numbers from 0 to less than 1")
        given = f"--betas {betas} with --optimizer {self.optimizer}"
        require(self.has_moments or self.betas == BETAS, f"{given}: only adam and adamw have moments")
        warmup, given = self.warmup_steps, f"--warmup-steps {self.warmup_steps}"
        require(warmup >= 0, f"{given}: give 0 or more")
        require(warmup <= self.steps, f"{given} with --steps {self.steps}: the warm-up must end within the run")
        given = f"--min-lr {self.min_lr:g}"
        require(0 <= self.min_lr <= self.lr, f"{given} with --lr {self.lr:g}: give 0 or more, and at most --lr")


def learning_rate(
    step: int, steps: int, lr: float, warmup_steps: int = 0, schedule: LRSchedule = "constant", min_lr: float = 0.0
) -> float:
    """Return the learning rate of a step. It depends only on the arguments, so it continues in a resumed run.

    It rises linearly to `lr` over the first `warmup_steps` steps. Then it falls from `lr` towards `min_lr`, along half
    a cosine (Loshchilov and Hutter, arXiv 1608.03983) or a line; it would reach `min_lr` right after the last step.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    left = (1 + math.cos(math.pi * done)) / 2 if schedule == "cosine" else 1 - done
    return min_lr + (lr - min_lr) * left


def moments_of(optimizer: str) -> int:
    """Return the number of tensors that an optimizer keeps for each weight; one of a script's own counts like Adam."""
    return MOMENTS.get(optimizer, MOMENTS["adam"])
