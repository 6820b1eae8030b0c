"""A run that trains the lab's Llama on stories."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distlab.axes.layout import replicas_in
from distlab.reports.memory import MemoryReport
from distlab.run.model import Loss, ModelParts, build_optimizer, own_parameters
from distlab.run.run import Run
from distlab.run.terminal import RankOutput, counted, say
from distlab.settings.training import TrainSettings
from simplellm.dataloaders import TinyStories
from simplellm.errors import require
from simplellm.tokenizers import SPTokenizer

if TYPE_CHECKING:
    from distlab.parallel.gradient_compression import Compressor
    from distlab.parallel.outer import OuterState
    from distlab.run.checkpointer import Batches
    from distlab.run.validation import Validator

# Options of a model in a checkpoint; most have values of their own only in imported models.
OF_CHECKPOINTS = "ctx_size rope_theta norm_eps head_dim rope_scaling attention_bias mlp_bias qk_norm".split()
TrainSettingsT = TypeVar("TrainSettingsT", bound=TrainSettings)


class TrainingRun(Run[TrainSettingsT]):
    """A run that trains the lab's Llama: options for its model and data, and the components that `track` creates."""

    validator: "Validator | None" = None  # with `--eval-every`
    _batch: Tensor  # its token ids

    @property
    def dtype(self) -> torch.dtype:
        """The data type in which the run computes."""
        dtype: torch.dtype = getattr(torch, self.settings.dtype)
        return dtype

    def model_options(self) -> dict[str, Any]:
        """Return keyword arguments for the models of `simplellm.llama`, from the flags or the checkpoint."""
        args = self.settings
        names = "n_layers", "dmodel", "num_heads", "num_kv_heads", "hidden_dim", "seed"
        options: dict[str, Any] = {name: getattr(args, name) for name in names}
        options |= {"ctx_size": args.seq_len, "device": self.device, "dtype": self.dtype}
        options |= {"recompute": args.recompute, "residual": getattr(torch, args.residual)}
        if args.document_mask:
            options["document_end"] = SPTokenizer(args.tokenizer).eos_id
        options |= args.mixture_options()
        if self.resumed is not None:  # an imported model may have values for which there is no flag
            model = self.resumed.record["model"]
            options |= {name: model[name] for name in OF_CHECKPOINTS if name in model}
        return options

    def pipeline_options(self) -> dict[str, Any]:
        """Return keyword arguments for a `Pipeline`: width, messages, cores, from the flags of `StageSettings`."""
        args: Any = self.settings
        dtype = torch.bfloat16 if self.dtype == torch.bfloat16 else None  # of activations
        costs = args.pass_costs(SPTokenizer(args.tokenizer).vocab_size)  # by which an action uses cores of idle stages
        return {"width": args.dmodel, "run_on": args.run_on, "dtype": dtype, "cores": self.shared_cores, "costs": costs}

    def data_options(self) -> dict[str, Any]:
        """Return keyword arguments for `simplellm.dataloaders.TinyStories`, from the flags and rank 0's decision."""
        args, data, revision = self.settings, self.decided["data"], self.decided.get("data_revision")
        options = {"batch_size": args.batch_size, "seq_l": args.seq_len, "data": data, "seed": args.seed}
        return options | ({"revision": revision} if revision else {})

    def optimizer(self, model: nn.Module | Mapping[int, nn.Module] | Mapping[str, nn.Parameter]) -> Optimizer:
        """Make the optimizer that the flags give, for all parameters of a model or stages, or for given parameters."""
        parts: Iterable[nn.Module | nn.Parameter] = model.values() if isinstance(model, Mapping) else [model]
        parameters = [
            parameter
            for part in parts
            for parameter in ([part] if isinstance(part, nn.Parameter) else own_parameters(part).values())
        ]
        args = self.settings
        betas = args.betas if args.has_moments else None
        return build_optimizer(args.optimizer, parameters, args.lr, args.weight_decay, betas)

    def track(
        self,
        model: nn.Module | Mapping[int, nn.Module],
        optimizer: Optimizer,
        loss: Loss | None = None,
        owners: Sequence[int] | None = None,
        outer: "OuterState | None" = None,
        compressor: "Compressor | None" = None,
        shards: Mapping[str, nn.Parameter] | None = None,
        gather: Callable[[], object] = lambda: None,
    ) -> None:
        """Register the script's model, optimizer and loss: for checkpoints, the learning rate, validation, diagnosis.

        Args:
            model: the model or this rank's part of it, wrapped or not; a mapping by index for several stages.
            loss: (logits of the whole model, token ids) -> mean loss; by default the usual cross-entropy.
            owners: by stage, the rank in the pipeline that holds it; by default, each rank has one stage.
            outer: the outer optimizer of replicas that train independently; its weights are saved and validated.
            compressor: of the gradients; the state that it keeps between steps is also saved.
            shards: if this rank updates only parts of the parameters: these parts, by the parameters' names.
            gather: called when shards have been restored: gives all ranks all shards.
        """
        args = self.settings
        state: dict[str, Any] = {"shards": shards or {}, "gather": gather, "outer": outer, "compressor": compressor}
        parts = ModelParts.of(model, self.grid, owners, loss, self._sizes(), **state)
        self._track(parts, optimizer)
        if self.rank == 0 and self.recorder.programs:
            from distlab.pipeline.stages import remark_on_weight_gradients

            remark_on_weight_gradients(parts.stages.values(), self.recorder.programs)
        whole = [p for stage in parts.stages.values() for p in stage.parameters()] if shards else None
        held = [state.held_bytes for state in (outer, compressor) if state is not None]
        self.memory = MemoryReport(optimizer, parts.sharded.values(), held, whole)
        if getattr(args, "experts", 0):
            from distlab.parallel.expert_parallel import most_rows_bytes

            self.memory.rows_bytes = partial(most_rows_bytes, parts.stages.values())
        if args.eval_every:
            from distlab.run.validation import Validator

            options = {**self.data_options(), "batch_size": args.eval_sequences, "split": "validation"}
            sequences = next(TinyStories(SPTokenizer(args.tokenizer), **options)).to(self.device)
            self.validator = Validator(parts, sequences, rows=args.batch_size // args.micro_batches)

    def _sizes(self) -> dict[str, Any]:
        """Return the sizes of the model by the flags, as a checkpoint records them."""
        args = self.settings
        sizes = {name: getattr(args, name) for name in ("dmodel", "num_heads", "n_layers")}
        sizes |= {"num_kv_heads": args.num_kv_heads or args.num_heads, "hidden_dim": args.hidden_dim or 4 * args.dmodel}
        context = self.resumed.record["model"]["ctx_size"] if self.resumed else args.seq_len
        return {**sizes, "vocab_size": SPTokenizer(args.tokenizer).vocab_size, "ctx_size": context}

    def steps(self, stories: "Batches[Tensor]") -> Iterator[tuple[int, Tensor]]:
        """Number the steps and give each its batch of token ids, (batch, seq), on the run's device.

        With `--resume`, the checkpoint's state is loaded first, and the first step is the one after the checkpoint.
        Before each step, the optimizer's learning rate is set.

        Raises:
            InputError: the run is to be saved, resumed, validated or compiled, or its learning rate changes, but the
                script has not called `track`.
        """
        args, compiler = self.settings, None
        changes = args.warmup_steps or args.lr_schedule != "constant"
        asked = (args.eval_every, "--eval-every needs"), (changes, "--warmup-steps and --lr-schedule need")
        for is_asked, flags in (*asked, (args.compile, "--compile needs")):
            require(self.has_tracked or not is_asked, f"{flags} a script that calls run.track before its first step")
        if args.compile:
            from distlab.run.compiling import compile_before_steps

            compiler = compile_before_steps(self._parts, args, self.joined, self.records, self.is_first)
        tokens = replicas_in(self.grid.layout) * args.batch_size * args.seq_len
        for step, batch in self.kind_of_steps(self, stories, args.steps, tokens, "tokens", self._validate):
            self.records.values["lr"] = lr = args.learning_rate(step)
            for group in self._optimizer.param_groups if self.has_tracked else ():
                group["lr"] = lr
            pinned = batch.pin_memory() if self.device.type == "cuda" else batch  # so that the copy is asynchronous
            self._batch = pinned.to(self.device, non_blocking=True)
            with contextlib.ExitStack() as contexts:
                if self.memory is not None and step == self.first_step:  # all steps save the same activations
                    contexts.enter_context(self.memory.counting())
                if compiler is not None:
                    contexts.enter_context(compiler.applied())
                yield step, self._batch

    def _is_validation_due(self, step: int) -> bool:
        return self.validator is not None and (step + 1) % (self.settings.eval_every or 1) == 0

    def _needs_loss(self, step: int) -> bool:
        """Return whether the loss of a step must be known at its end."""
        steps = self.settings.steps
        is_saved = self.checkpointer is not None and self.checkpointer.is_due(step, steps)
        return step + 1 == steps or is_saved or self._is_validation_due(step)

    def _is_reported(self, step: int) -> bool:
        return (step + 1) % getattr(self.settings, "report_every", 1) == 0 or self._needs_loss(step)

    def _validate(self, step: int) -> None:
        """With `--eval-every`, evaluate on the validation split."""
        if self.validator is not None and self._is_validation_due(step):
            model = self._parts.outer.as_model() if self._parts.outer else contextlib.nullcontext()
            with self.records.timing_apart("validation", f"validation after {counted(step + 1, 'steps')}"), model:
                loss = self.records.values["validation_loss"] = self.validator.loss(step)
            if self.is_first and not self.records.has(step):
                say(f"validation after {counted(step + 1, 'steps')}: {self.validator.described(loss)}")

    def surviving(self) -> contextlib.AbstractContextManager[Sequence[int]]:
        """Return a context for a step, and its ranks: all; in a `RepairableRun`, those that are left."""
        return contextlib.nullcontext(self.grid.alive)

    def _why_not_finite(self, step: int, own_loss: float) -> str:
        """Repeat the forward pass of a step and check every tensor."""
        if not self.has_tracked:
            return super()._why_not_finite(step, own_loss)
        from distlab.run.not_finite import find_in_step

        return f": {find_in_step(self._parts, step, self._batch.chunk(self.settings.micro_batches))}"

    def log(self, step: int, losses: Iterable[Tensor]) -> None:
        """Print the loss of the global batch; the arguments are as in `global_loss`.

        With `--report-every N`, the ranks add it up only after every N-th step; the records of other steps have no
        loss. Call this before the update, which a non-finite loss prevents.
        """
        if self._is_reported(step):
            self._print_loss(step, self.global_loss(step, losses))

    def clip(self, optimizer: Optimizer) -> None:
        """With `--clip-norm`, limit the norm of a step's gradients; see `ClippingRun`.

        Call it between `log` and `optimizer.step`, on all ranks.
        """

    def _print_loss(self, step: int, loss: float) -> None:
        line = f"{step} {loss:.8f}{self.records.speed()}"
        if self.has_terminal:
            print(line, flush=True)
        elif isinstance(sys.stdout, RankOutput):
            sys.stdout.keep(line + "\n")  # on a shared terminal, only rank 0 prints it
