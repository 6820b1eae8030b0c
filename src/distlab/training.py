"""A rank's part of a training run of the lab's Llama: model, stories, optimizer, steps, and what it leaves behind."""

import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab import meeting, memory, resume
from distlab.activations import KeptActivations
from distlab.checkpoints import Checkpoint, last_whole, part_of, restore, save, state_of, supersede
from distlab.logs import RankOutput, say
from distlab.not_finite import find_cause
from distlab.optimizers import build_optimizer
from distlab.runtime import Run
from distlab.settings import StageSettings, TrainSettings, as_json
from distlab.trace import recorder
from distlab.traffic import traffic
from distlab.validation import Loss, Validation, perplexity
from simplellm.dataloaders import TinyStories
from simplellm.errors import InputError
from simplellm.losses import causalLLMLoss
from simplellm.sources import choose_source
from simplellm.tokenizers import SHIPPED_MODEL, SPTokenizer

TrainSettingsT = TypeVar("TrainSettingsT", bound=TrainSettings)


class TrainingRun(Run[TrainSettingsT]):
    """A run that trains the lab's Llama on stories.

    Attributes:
        data: where the stories come from, as rank 0 decided for all.
        first_step: 0, or the number of steps that the checkpoint has taken which this run goes on from.
    """

    def __init__(self, settings: TrainSettingsT, script: Path) -> None:
        super().__init__(settings, script)
        self.data: str = self._decided["data"]
        self._optimizer: torch.optim.Optimizer | None = None
        self._memory: list[list[int]] = []
        self._validation: Validation | None = None
        self._tokenizer = Path(settings.tokenizer or SHIPPED_MODEL).read_bytes()  # it may lie in a checkpoint that goes
        self._besides_seconds: defaultdict[str, float] = defaultdict(float)

    @cached_property
    def _checkpoint(self) -> Checkpoint | None:
        """The one to go on from, as rank 0 chose it."""
        folder = self._decided.get("resume")
        return None if folder is None else last_whole(Path(folder), at_a_glance=True)

    @property
    def first_step(self) -> int:
        return 0 if self._checkpoint is None else self._checkpoint.step

    @property
    def _goes_on(self) -> bool:
        return self._checkpoint is not None and self.out.resolve() in self._checkpoint.folder.resolve().parents

    def _decide(self, script: Path) -> dict[str, Any]:
        args = self.settings
        source, why = choose_source(args.data)
        decided = {**super()._decide(script), "data": source, "data_because": why}
        decided["data_identity"] = resume.data_identity(source, args.seed)
        if isinstance(args, StageSettings):
            decided["layers_per_stage"] = args.split(SPTokenizer(args.tokenizer).vocab_size)
        if args.resume is not None:
            checkpoint = last_whole(args.resume, say)
            resume.check(checkpoint, args)
            resume.check_data(checkpoint, decided["data_identity"])
            goes_on = Path(decided["out"]).resolve() in checkpoint.folder.resolve().parents
            if args.steps < checkpoint.step + (not goes_on):  # in its own folder, a run may find that all is done
                raise InputError(
                    f"--steps {args.steps}: {checkpoint.folder} has taken {checkpoint.step} steps already; give more"
                )
            decided["resume"] = str(checkpoint.folder.absolute())
        return decided

    def _introduce(self, script: Path) -> None:
        super()._introduce(script)
        say(f"stories from {self._decided['data_because']}")
        if "layers_per_stage" in self._decided:
            say(f"layers of each stage: {', '.join(map(str, self._decided['layers_per_stage']))}")
        if self._checkpoint is not None:
            say(f"going on from {self._checkpoint.folder}, after {self._checkpoint.step} steps")

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
        self._net = part_of(net)
        self._loss_of = loss or partial(causalLLMLoss, vocab_size=self._net.options["vocab_size"])
        parameters = list(net.parameters())
        self._kept = KeptActivations(parameters)
        self._optimizer = build_optimizer(self.settings.optimizer, parameters, self.settings.lr)
        return self._optimizer

    def steps(self, stories: TinyStories) -> Iterator[tuple[int, Tensor]]:
        """Number the steps and give each its batch of token ids, (batch, seq), on the run's device.

        With `--resume`, the first is the one after the checkpoint, whose state all takes on before it.
        """
        args, first = self.settings, self.first_step
        self._stories = stories
        if self._checkpoint is not None and self._optimizer is not None:
            restore(self._checkpoint, self._net, self._optimizer, self.rank)
            if self._checkpoint.record.get("position"):
                stories.load_state_dict(self._checkpoint.record["position"])
            if self._goes_on and self.rank == 0:
                supersede(self.out, first)
        if args.eval_every:
            self._validation = self._look_at_others()
        numbered = self.count_steps(
            stories,
            args.steps,
            self._tokens_a_step,
            "tokens",
            first=first,
            before=self._tokens(first),
            after_step=self._validate,
            after_record=self._save,
        )
        for step, batch in numbered:
            counting = (
                self._kept.counting() if step == first and self._optimizer is not None else contextlib.nullcontext()
            )
            self._batch = batch.to(self.device, non_blocking=True)
            with counting:  # each tensor that autograd keeps; every step keeps as many
                yield step, self._batch

    @property
    def _tokens_a_step(self) -> int:
        return self.grid.dp * self.settings.batch_size * self.settings.seq_len

    def _tokens(self, steps: int) -> int:
        """Of the first so many steps, those before the checkpoint included."""
        before = 0 if self._checkpoint is None else int(self._checkpoint.record["tokens"])
        return before + (steps - self.first_step) * self._tokens_a_step

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

    def _save(self, step: int) -> None:
        """With `--save-every`, write a checkpoint."""
        args = self.settings
        if not args.save_every or ((step + 1) % args.save_every and step + 1 < args.steps) or self._optimizer is None:
            return
        record = {
            "step": step + 1,
            "tokens": self._tokens(step + 1),
            "position": self._stories.state_dict(),
            "model": {**self._net.options, "n_layers": args.n_layers},
            "data": self._decided["data_identity"],
            "settings": as_json(args),
            "layout": args.layout,
            "world_size": self.world_size,
            "own_moments": args.own_moments,
            "torch": torch.__version__,
        }
        with self._besides_the_steps("checkpoints"):
            tensors = state_of(self._net, self._optimizer, self.rank, args.own_moments)
            save(self.out, tensors, record, self._tokenizer, args.keep)

    @contextlib.contextmanager
    def _besides_the_steps(self, what: str) -> Iterator[None]:
        """Count the time that something takes which is no part of a step."""
        started = time.perf_counter()
        yield
        self._besides_seconds[what] += time.perf_counter() - started

    def close(self) -> None:
        if self._optimizer is not None:
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
        for what, seconds in self._besides_seconds.items() if self.rank == 0 else ():
            say(f"besides the steps, {what} took {seconds:.2f} s")

    def log(self, step: int, losses: Iterable[Tensor]) -> None:
        """Print the loss of the global batch; the arguments are those of `global_loss`."""
        line = f"{step} {self.global_loss(step, losses):.8f}{self._log.speed()}"
        if self.rank == 0 or not meeting.started_by_torchrun():
            print(line, flush=True)
        elif isinstance(sys.stdout, RankOutput):
            sys.stdout.keep(line + "\n")  # ranks that share a terminal print it once
