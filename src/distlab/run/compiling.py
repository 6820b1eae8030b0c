"""`--compile`: the ranks of a host compile each part of the model once, before the first step."""

import contextlib
import hashlib
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from distlab.axes.placement import placement_of
from distlab.comm.waits import TrafficError
from distlab.rendezvous.groups import WorldGroup, world_group
from distlab.rendezvous.ranks import busy, ranks_store
from distlab.run.logs import RunLog
from distlab.run.model import ModelParts
from distlab.run.starting import Joined
from distlab.run.terminal import say
from distlab.settings.training import TrainSettings
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
    positions = getattr(args, "positions", -(-args.seq_len // parts.grid.axis("cp").size))
    compile_model(compiler, parts, rows, positions, joined, args.timeout)
    seconds = records.seconds_apart["compiling"] = time.perf_counter() - started
    if is_first:
        say(f"compiled in {seconds:.1f} s")
    return compiler


def compile_model(compiler: Compiler, parts: ModelParts, batch: int, seq: int, joined: Joined, seconds: float) -> None:
    """Compile this rank's part of the model for micro-batches (batch, seq), and wait until all ranks have done so.

    The first rank of a host that comes to a part compiles it, while others of the host that need the same wait; they
    then load it from torch's cache of the host. No wait is longer than `seconds` after the last sign of work.

    Raises:
        InputError: the model is not the lab's Llama, or the compiler fails.
        TrafficError: another rank exits.
    """
    rank, host = joined.grid.rank, joined.places[joined.grid.rank].host
    programs = joined.context.recorder.programs or ()
    letters = {action.letter for program in programs for action in program}
    is_split = "W" in letters
    if is_split and rank == 0:
        say("the schedule splits backward passes: blocks and head of these micro-batches stay uncompiled")
    with_weights = not is_split or not letters.isdisjoint("Bb")
    store, check = ranks_store(seconds, joined.store), partial(_check_others, world_group())
    absent = _absent(parts)
    for part in parts_to_compile(parts, batch, seq, with_weights):
        prepare = partial(_prepare, compiler, part, absent)
        if joined.grid.size == 1:
            prepare()
            continue
        with _as_if_gathered(part[1], absent):
            key = f"compiled/{host}/{hashlib.sha256(str(key_of(*part)).encode()).hexdigest()}"
        if store.add(f"{key}/claims") == 1:
            store.set(f"{key}/by", str(rank))
            store.work(busy(rank), prepare)
            store.set(key)
        else:
            by = int(store.wait(f"{key}/by", "the rank that compiles", check=check))
            what = f"rank {by} to compile {name_of(part[0])}"
            store.wait(key, what, check=check, busy=busy(by), own_busy=busy(rank))
            store.work(busy(rank), prepare)
    store.set(f"compiled/{rank}")
    for other in range(joined.grid.size):
        store.wait(f"compiled/{other}", f"rank {other} to compile", check=check, busy=busy(other))


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
        vocab_size = net.options["vocab_size"]
        has_all_logits = net.lm_head is not None and (
            len(net.lm_head.weight) == vocab_size or getattr(parts.loss, "func", None) is causalLLMLoss
        )  # from all of the head, or gathered from its slices
        if is_whole and net.lm_head is not None and has_all_logits:
            yield loss_to_compile(batch, seq, vocab_size, net.lm_head.weight.device)


def _absent(parts: ModelParts) -> set[nn.Parameter]:
    """Return the weights that are whole only while a block computes: the optimizer has shards of them."""
    return {
        parts.stages[stage].get_parameter(name)
        for stage, part in parts.sharded.items()
        for name, own in part.own_parameters().items()
        if part.shard == "weights" and placement_of(own).flat is not None
    }


@contextlib.contextmanager
def _as_if_gathered(arguments: tuple[Any, ...], absent: set[nn.Parameter]) -> Iterator[None]:
    """Inside, those of the absent weights that the arguments have are there, with the shapes of gathered ones."""
    modules = [module for module in arguments if isinstance(module, nn.Module)]
    before = {p: p.data for module in modules for p in module.parameters() if p in absent}
    for p in before:
        p.data = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
    try:
        yield
    finally:
        for p, data in before.items():
            p.data = data


def _check_others(world: WorldGroup | None) -> None:
    """Raise `TrafficError` if another rank has reported why it exits."""
    if world is not None and (causes := world.notices.causes()):
        raise TrafficError(causes, RuntimeError(causes))


def _prepare(compiler: Compiler, part: PartToCompile, absent: set[nn.Parameter]) -> None:
    from torch._dynamo.exc import TorchDynamoException

    function, arguments = part
    try:
        with _as_if_gathered(arguments, absent):
            compiler.prepare(function, *arguments)
    except TorchDynamoException as error:
        told = next((line for line in f"{error}".splitlines() if "rror" in line), f"{error}".partition("\n")[0])
        raise InputError(f"--compile: torch cannot compile {name_of(function)}: {told:.200}") from error
