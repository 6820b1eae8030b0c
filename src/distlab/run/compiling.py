"""`--compile`: the ranks of a host compile each part of the model once, before the first step."""

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from distlab.comm.together import texts_of_all, together
from distlab.machine.devices import local_ranks
from distlab.pipeline.actions import FACTORS, GRADIENTS, WEIGHT_GRADIENTS
from distlab.run.logs import RunLog
from distlab.run.model import ModelParts
from distlab.run.starting import Joined
from distlab.run.terminal import say
from distlab.settings.training import TrainSettings
from simplellm.absent_weights import is_absent
from simplellm.compiled import PartToCompile
from simplellm.compiler import Compiler, key_of, name_of, parts_of_model
from simplellm.errors import InputError, require
from simplellm.llama import LLamaPart
from simplellm.losses import causalLLMLoss, loss_to_compile


def compile_before_steps(
    parts: ModelParts, args: TrainSettings, joined: Joined, records: RunLog, is_first: bool
) -> Compiler:
    """Compile this rank's part of the model for the run's micro-batches; see `compile_model`."""
    compiler, started = Compiler(say), time.perf_counter()
    if is_first:
        say("compiling the blocks, the head and the loss; a later run with the same sizes finds them in a cache")
    rows = args.batch_size // args.micro_batches
    compile_model(compiler, parts, rows, args.positions, joined)
    seconds = records.seconds_apart["compiling"] = time.perf_counter() - started
    if is_first:
        say(f"compiled in {seconds:.1f} s")
    return compiler


def compile_model(compiler: Compiler, parts: ModelParts, batch: int, seq: int, joined: Joined) -> None:
    """Compile this rank's part of the model for micro-batches (batch, seq), and wait until all ranks have done so.

    The ranks of a host divide the parts that they need: each compiles some, and then loads the others from torch's
    cache of the host.

    Raises:
        InputError: the model is not the lab's Llama, or the compiler fails.
        TrafficError: another rank exits.
    """
    rank = joined.grid.rank
    programs = joined.context.recorder.programs or ()
    gives = {action.gives for program in programs for action in program}
    is_split = any(FACTORS in results for results in gives)
    if is_split and rank == 0:
        say("the schedule splits backward passes: blocks and head of these micro-batches stay uncompiled")
    with_weights = not is_split or any({GRADIENTS, WEIGHT_GRADIENTS} <= {*results} for results in gives)
    needed: dict[str, PartToCompile] = {}
    for part in parts_to_compile(parts, batch, seq, with_weights):
        with _as_if_gathered(part[1]):
            needed[hashlib.sha256(str(key_of(*part)).encode()).hexdigest()[:16]] = part
    of_ranks = [json.loads(keys) for keys in texts_of_all(json.dumps([*needed]), "what each rank compiles")]
    here = local_ranks(joined.places, rank)
    users = {key: [one for one in here if key in of_ranks[one]] for one in here for key in of_ranks[one]}
    first = {key: ranks[place % len(ranks)] for place, (key, ranks) in enumerate(users.items())}
    for is_first in (True, False):
        own = [part for key, part in needed.items() if (first[key] == rank) == is_first]
        together("the ranks that compile", partial(_prepare, compiler, own))


def parts_to_compile(parts: ModelParts, batch: int, seq: int, with_weights: bool = True) -> Iterator[PartToCompile]:
    """Yield the parts of the model that a step compiles, as far as their inputs are known before it.

    Without `with_weights`, only the loss.
    """
    stages = list(parts.stages.values())
    nets = [net for net in stages if isinstance(net, LLamaPart)]
    require(len(nets) == len(stages), "--compile: this script trains a model that is not the lab's Llama")
    is_whole = parts.grid.axis("cp").size == 1
    for net in nets:
        if with_weights:
            yield from parts_of_model(net, batch, seq, is_whole)
        head, vocab_size = net.lm_head, net.options["vocab_size"]
        if head is None or not is_whole:
            continue
        are_gathered = getattr(parts.loss, "func", None) is causalLLMLoss  # logits, from slices of the head
        if len(head.weight) == vocab_size or are_gathered:
            yield loss_to_compile(batch, seq, vocab_size, head.weight.device)


@contextlib.contextmanager
def _as_if_gathered(arguments: tuple[Any, ...]) -> Iterator[None]:
    """Inside, the weights that are absent until the ranks gather them for a block are zeros of their shapes."""
    modules = [module for module in arguments if isinstance(module, nn.Module)]
    before = {p: p.data for module in modules for p in module.parameters() if is_absent(p)}
    for p in before:
        p.data = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
    try:
        yield
    finally:
        for p, data in before.items():
            p.data = data


def _prepare(compiler: Compiler, parts: Sequence[PartToCompile]) -> None:
    from torch._dynamo.exc import TorchDynamoException

    for function, arguments in parts:
        try:
            with _as_if_gathered(arguments):
                compiler.prepare(function, *arguments)
        except TorchDynamoException as error:
            told = next((line for line in f"{error}".splitlines() if "rror" in line), f"{error}".partition("\n")[0])
            raise InputError(f"--compile: torch cannot compile {name_of(function)}: {told:.200}") from error
