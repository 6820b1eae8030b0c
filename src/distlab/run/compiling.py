"""`--compile`: the ranks of a host compile each part of the model once, before the first step."""

import hashlib
from collections.abc import Iterator
from functools import partial

from distlab.rendezvous.ranks import busy, ranks_store
from distlab.run.model import ModelParts
from distlab.run.starting import Joined
from distlab.run.terminal import say
from simplellm.compiled import PartToCompile
from simplellm.compiler import Compiler, key_of, name_of
from simplellm.errors import InputError, require
from simplellm.llama import LLamaPart
from simplellm.losses import loss_to_compile


def compile_model(compiler: Compiler, parts: ModelParts, batch: int, seq: int, joined: Joined, seconds: float) -> None:
    """Compile this rank's part of the model for micro-batches (batch, seq), and wait until all ranks have done so.

    The first rank of a host that comes to a part compiles it, while others of the host that need the same wait; they
    then load it from torch's cache of the host. No wait is longer than `seconds` after the last sign of work.

    Raises:
        InputError: the model is not the lab's Llama, or the compiler fails.
    """
    rank, host = joined.grid.rank, joined.places[joined.grid.rank].host
    programs = joined.context.recorder.programs or ()
    letters = {action.letter for program in programs for action in program}
    is_split = "W" in letters
    if is_split and rank == 0:
        say("the schedule splits backward passes: blocks and head of these micro-batches stay uncompiled")
    with_weights = not is_split or not letters.isdisjoint("Bb")
    store = ranks_store(seconds, say, joined.store)
    for part in parts_to_compile(parts, batch, seq, with_weights):
        prepare = partial(_prepare, compiler, part)
        if joined.grid.size == 1:
            prepare()
            continue
        key = f"compiled/{host}/{hashlib.sha256(str(key_of(*part)).encode()).hexdigest()}"
        if store.add(f"{key}/claims") == 1:
            store.set(f"{key}/by", str(rank))
            store.work(busy(rank), prepare)
            store.set(key)
        else:
            by = int(store.wait(f"{key}/by", "the rank that compiles"))
            what = f"rank {by} to compile {name_of(part[0])}"
            store.wait(key, what, busy=busy(by), own_busy=busy(rank))
            store.work(busy(rank), prepare)
    store.set(f"compiled/{rank}")
    for other in range(joined.grid.size):
        store.wait(f"compiled/{other}", f"rank {other} to compile", busy=busy(other))


def parts_to_compile(parts: ModelParts, batch: int, seq: int, with_weights: bool = True) -> Iterator[PartToCompile]:
    """Yield the parts of the model that a step compiles, as far as their inputs are known before it.

    Without `with_weights`, only the loss.
    """
    stages = list(parts.stages.values())
    nets = [net for net in stages if isinstance(net, LLamaPart)]
    require(len(nets) == len(stages), "--compile: this script trains a model that is not the lab's Llama")
    is_gathered_when_used = any(part.shard == "weights" for part in parts.sharded.values())
    if parts.grid.axis("cp").size > 1 or is_gathered_when_used:
        return
    for net in nets:
        if with_weights:
            yield from net.parts_to_compile(batch, seq)
        if net.lm_head is not None and len(net.lm_head.weight) == net.options["vocab_size"]:  # no rank's shard of it
            yield loss_to_compile(batch, seq, net.options["vocab_size"], net.lm_head.weight.device)


def _prepare(compiler: Compiler, part: PartToCompile) -> None:
    from torch._dynamo.exc import TorchDynamoException

    function, arguments = part
    try:
        compiler.prepare(function, *arguments)
    except TorchDynamoException as error:
        told = next((line for line in f"{error}".splitlines() if "rror" in line), f"{error}".partition("\n")[0])
        raise InputError(f"--compile: torch cannot compile {name_of(function)}: {told:.200}") from error
