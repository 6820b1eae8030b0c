"""A rank's part of a training run of the lab's Llama: model, stories, optimizer, steps, and what it leaves behind."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm.recorder import recorder
from distlab.comm.traffic import traffic
from distlab.pipeline.activations import SavedActivations
from distlab.rendezvous import ranks as meeting
from distlab.reports import memory
from distlab.run.logs import RankOutput, say
from distlab.run.not_finite import find_cause
from distlab.run.optimizers import build_optimizer
from distlab.run.resumable import ResumableRun
from distlab.run.resume import data_identity
from distlab.run.settings import StageSettings, TrainSettings
from distlab.run.validation import Loss, Validation, perplexity
from simplellm.dataloaders import TinyStories
from simplellm.llama import LLamaPart
from simplellm.losses import causalLLMLoss
from simplellm.sources import choose_source
from simplellm.tokenizers import SPTokenizer

TrainSettingsT = TypeVar("TrainSettingsT", bound=TrainSettings)


class TrainingRun(ResumableRun[TrainSettingsT]):
    """A run that trains the lab's Llama on stories.

    Attributes:
        data: where the stories come from, as rank 0 decided for all.
    """

    def __init__(self, settings: TrainSettingsT, script: Path) -> None:
        super().__init__(settings, script)
        self.data: str = self._decided["data"]
        self._optimizer: torch.optim.Optimizer | None = None
        self._memory: list[list[int]] = []
        self._validation: Validation | None = None

    def _decide(self, script: Path) -> dict[str, Any]:
        args, decided = self.settings, super()._decide(script)
        if isinstance(args, StageSettings):
            decided["layers_per_stage"] = args.split(SPTokenizer(args.tokenizer).vocab_size)
        return decided

    def _choose_data(self) -> dict[str, Any]:
        source, why = choose_source(self.settings.data)
        return {
            "data": source,
            "data_because": why,
            "data_identity": data_identity(source, self.settings.seed),
        }

    def _introduce(self, script: Path) -> None:
        super()._introduce(script)
        say(f"stories from {self._decided['data_because']}")
        if "layers_per_stage" in self._decided:
            say(f"layers of each stage: {', '.join(map(str, self._decided['layers_per_stage']))}")

    def model_options(self) -> dict[str, Any]:
        """Keyword arguments of `simplellm.llama`'s models, as the flags or the checkpoint ask for."""
        args = self.settings
        options = {
            "n_layers": args.n_layers,
            "dmodel": args.dmodel,
            "num_heads": args.num_heads,
            "num_kv_heads": args.num_kv_heads,
            "ctx_size": args.seq_len,
            "device": self.device,
            "dtype": getattr(torch, args.dtype),
            "seed": args.seed,
        }
        if self._checkpoint is not None:  # an imported model may be what no flag asks for
            model = self._checkpoint.record["model"]
            options |= {name: model[name] for name in ("ctx_size", "hidden_dim", "rope_theta", "norm_eps")}
        return options

    def data_options(self) -> dict[str, Any]:
        """Keyword arguments of `simplellm.dataloaders.TinyStories`, as the flags ask for and rank 0 decided."""
        args = self.settings
        return {"batch_size": args.batch_size, "seq_l": args.seq_len, "data": self.data, "seed": args.seed}

    def optimizer(self, net: nn.Module, loss: Loss | None = None) -> torch.optim.Optimizer:
        """The optimizer that `--optimizer` and `--lr` name, of all the parameters that this rank holds.

        Args:
            net: the model, or this rank's part of it, wrapped or not: what checkpoints hold, and `--eval-every` tries.
            loss: (logits of the whole model, token ids) -> the mean loss; by default, the usual one.
        """
        self._net = next(module for module in net.modules() if isinstance(module, LLamaPart))
        self._loss_of = loss or partial(causalLLMLoss, vocab_size=self._net.options["vocab_size"])
        parameters = list(net.parameters())
        self._kept = SavedActivations(parameters)
        self._optimizer = build_optimizer(self.settings.optimizer, parameters, self.settings.lr)
        return self._optimizer

    def steps(self, stories: TinyStories) -> Iterator[tuple[int, Tensor]]:
        """Number the steps and give each its batch of token ids, (batch, seq), on the run's device.

        With `--resume`, the first is the one after the checkpoint, whose state all takes on before it.
        """
        args = self.settings
        if self._optimizer is not None:
            self.register_state(self._net, self._optimizer, stories)
        if args.eval_every:
            self._validation = self._look_at_others()
        tokens = self.grid.dp * args.batch_size * args.seq_len
        for step, batch in self.count_steps(stories, args.steps, tokens, "tokens", after_step=self._validate):
            is_first = step == self.first_step and self._optimizer is not None
            self._batch = batch.to(self.device, non_blocking=True)
            # Count each tensor that autograd keeps; every step keeps as many.
            with self._kept.counting() if is_first else contextlib.nullcontext():
                yield step, self._batch

    def _why_not_finite(self) -> str:
        """Do the forward pass of this step again, and look at every tensor."""
        if self._optimizer is None:
            return ""
        args = self.settings
        again = Validation(self._net, self._loss_of, self.grid, self._batch, args.batch_size, args.dmodel)
        again.batches = self._batch.chunk(args.micro_batches)
        cause = find_cause(self._net, lambda: again.loss(-1), self.grid, self.device)
        return f": {cause} (is --lr {args.lr:g} too large?)"

    def _look_at_others(self) -> Validation:
        """The stories that are not trained on."""
        args = self.settings
        options = {**self.data_options(), "batch_size": args.eval_sequences, "split": "validation"}
        sequences = next(TinyStories(SPTokenizer(args.tokenizer), **options)).to(self.device)
        rows = max(1, args.batch_size // args.micro_batches)
        return Validation(self._net, self._loss_of, self.grid, sequences, rows, args.dmodel)

    def _validate(self, step: int) -> None:
        """With `--eval-every`, look at the loss of stories that are not trained on."""
        args = self.settings
        if self._validation is None or not args.eval_every or (step + 1) % args.eval_every:
            return
        with self._besides_the_steps("validation"):
            loss = self._log.validation_loss = self._validation.loss(step)
        if self.rank == 0:
            say(f"validation after {step + 1} steps: loss {loss:.6f}, perplexity {perplexity(loss):,.2f}")

    def _record(self, steps: int) -> dict[str, Any]:
        return super()._record(steps) | {"model": {**self._net.options, "n_layers": self.settings.n_layers}}

    def close(self) -> None:
        if self._optimizer is not None and self.first_step < self.settings.steps:  # a run with no steps held nothing
            by_rank = torch.zeros(self.world_size, len(memory.KINDS), dtype=torch.int64, device=self.device)
            # A pipeline that is traced counts its activations itself.
            kept_bytes = max([self._kept.peak_bytes, *(kept for _, kept in recorder.kept_bytes)])
            by_rank[self.rank] = torch.tensor(memory.count_bytes(self._optimizer, kept_bytes))
            traffic.all_reduce(by_rank, "what each rank holds", kind="control", op=dist.ReduceOp.SUM).wait()
            self._memory = by_rank.tolist()
        super().close()

    def summarize(self) -> None:
        if self.rank == 0 and self._memory:
            for line in memory.as_table(self._memory):
                say(line)
            memory.keep(self.out / "memory.json", self._memory)
        super().summarize()

    def log(self, step: int, losses: Iterable[Tensor]) -> None:
        """Print the loss of the global batch; the arguments are those of `global_loss`."""
        line = f"{step} {self.global_loss(step, losses):.8f}{self._log.speed()}"
        if self.rank == 0 or not meeting.started_by_torchrun():
            print(line, flush=True)
        elif isinstance(sys.stdout, RankOutput):
            sys.stdout.keep(line + "\n")  # ranks that share a terminal print it once
