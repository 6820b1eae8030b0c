"""Faults put into users' models at random, from a seed, and whether `compare` names each; and pairs that are equal.

    python tests/faults.py                         20 faults, each beside one process, and 20 equal pairs
    python tests/faults.py --again                 the same, with a new process for each fault (--with-one-process)
    python tests/faults.py --count 40 --seed 7
    python tests/faults.py --only 17 --show

A fault is a change of a few lines of a script in examples/, which begins at some step, often on one rank and in one
parameter: a gradient is scaled, a sum is missing or over the wrong group, a parameter drifts, a batch is skipped. It is
found if `compare` names the step, the parameter and, where the fault has one, the rank and the factor. Equal pairs are
two layouts of the same model, with a recipe chosen at random.
"""

import argparse
import contextlib
import io
import os
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: `compare` computes here, and forks inherit no threads

from support.chapters import load
from support.processes import LAB, free_port, run_ranks

from distlab.launching.local_ranks import temporary_folder
from distlab.run.main import training_run
from distlab.settings.common import parse
from distlab_compare.command import Request, compare

STEPS = 4
FLAGS = f"--dmodel 32 --num-heads 4 --n-layers 3 --seq-len 24 --device cpu --steps {STEPS} --data sample".split()
BATCH = 12  # sequences of a step in every layout
RECIPES = ["--optimizer sgd --lr 0.5", "--optimizer adam --lr 1e-2", "--optimizer adamw --lr 1e-2 --clip-norm 0.5"]
SGD = RECIPES[0]
INNER = "attention.q.weight", "attention.v.bias", "attention.o.weight", "mlp_norm.weight", "up.bias", "down.weight"
FIRST, LAST = ["tokens.weight", "positions.weight"], ["norm.weight", "norm.bias", "head.weight"]
BLOCKS = [f"blocks.{block}.{name}" for block in range(3) for name in INNER]


@dataclass(frozen=True)
class Way:
    """A layout of a model."""

    script: str
    ranks: int
    replicas: int
    flags: str

    @property
    def batch(self) -> str:
        return f"--batch-size {BATCH // self.replicas}"


ONE = Way("examples/gpt_dp.py", 1, 1, "--world-size 1")
DP = [Way("examples/gpt_dp.py", n, n, f"--world-size {n}") for n in (2, 3)]
MYDP = [Way("examples/gpt_mydp.py", n, n, f"--world-size {n}") for n in (2, 3)]
SHARDED = ("optimizer", "gradients", "weights")
ZERO = [Way("examples/gpt_zero.py", n, n, f"--world-size {n} --shard {kind}") for n in (2, 3) for kind in SHARDED]
PP = [Way("examples/gpt_pp.py", 2, 1, f"--world-size 2 --schedule {kind}") for kind in ("gpipe", "dapple", "zb-h1")]
TP = [Way("examples/gpt_tp.py", 2, 1, "--world-size 2")]
LLAMA = [
    Way("primer/intro.py", 1, 1, ""),
    Way("DP/gradient_aggr/intro_DP_GA.py", 3, 3, "--world-size 3"),
    Way("DP/buckets/intro_DP_buckets.py", 2, 2, "--world-size 2"),
    Way("DP/zero/intro_DP_ZeRO.py", 3, 3, "--world-size 3"),
    Way("DP/fsdp/intro_DP_FSDP.py", 2, 2, "--world-size 2 --shard weights"),
    Way("DP/ddp/intro_DP_DDP.py", 2, 2, "--world-size 2"),
    Way("PP/1F1B/intro_PP_1F1B.py", 3, 1, "--world-size 3"),
    Way("PP/schedules/intro_PP_schedules.py", 2, 1, "--world-size 2 --schedule zb-v"),
    Way("TP/intro_TP.py", 2, 1, "--world-size 2"),
    Way("CP/intro_CP.py", 2, 1, "--world-size 2"),
    Way("hybrid/intro_hybrid.py", 4, 2, "--dp 2 --pp 2"),
    Way("hybrid/intro_hybrid.py", 4, 1, "--dp 1 --pp 2 --tp 2"),
    Way("hybrid/intro_5d.py", 4, 2, "--dp 2 --pp 1 --tp 2 --shard gradients"),
]

CODE = '''

def parameters_of(net):
    own = net.own_parameters() if hasattr(net, "own_parameters") else dict(net.named_parameters())
    return {{name.removeprefix("model."): parameter for name, parameter in own.items()}}


@torch.no_grad()
def fault(run, net, step, when, kept={{}}):
    """Do what is wrong: `NAME` on `RANKS` from step `STEP` on."""
    found = parameters_of(net)
    if run.rank in {ranks} and step >= {step}:
        for name, parameter in found.items():
            if {name!r} in (name, "all"):
                {code}
'''
BEFORE, AFTER = "if when == 'before': ", "if when == 'after': "
KEEP = "kept['weights'] = kept.get('weights', parameter.clone()) if when == 'after' else parameter.clone(); "


@dataclass(frozen=True)
class Fault:
    """A script with a fault, and what `compare` has to say.

    Attributes:
        told: regular expressions that its lines must match.
    """

    kind: str
    way: Way
    text: str
    told: Sequence[str]
    recipe: str
    micro_batches: int = 1

    @property
    def flags(self) -> list[str]:
        return f"{self.way.flags} {self.way.batch} --micro-batches {self.micro_batches} {self.recipe}".split()


def number(factor: float) -> str:
    return re.escape(f"{factor:.4g}")


def held_by(way: Way, rank: int, chance: random.Random) -> str:
    """The name of a parameter of which a rank has a part."""
    names = [*FIRST, *BLOCKS, *LAST]
    if way in PP:
        names = [*FIRST, *(name for name in BLOCKS if ".0." in name)] if rank == 0 else LAST
    return chance.choice(names)


def with_code(way: Way, ranks: Sequence[int], step: int, name: str, code: str) -> str:
    """A way's script that calls `fault` before and after each update."""
    text = (LAB / way.script).read_text()
    call = "        fault(run, net, step, {!r})\n".format
    text = text.replace("        optimizer.step()\n", f"{call('before')}        optimizer.step()\n{call('after')}")
    head, tail = text.split("\n\ndef train(")
    code = CODE.format(ranks=[*ranks], step=step, name=name, code=code)
    return "".join(["import torch\n", head.replace('"""', "'''"), code, "\n\ndef train(", tail])


def scaled(chance: random.Random, factor: float, everything: bool = False) -> Fault:
    way = chance.choice([*DP, *MYDP, *ZERO, *PP, *TP])
    rank, step = chance.randrange(way.ranks), chance.randrange(STEPS)
    name = "all" if everything else held_by(way, rank, chance)
    ranks = [rank] if way not in ZERO else [*range(way.ranks)]
    text = with_code(way, ranks, step, name, f"{BEFORE}parameter.grad.mul_({factor})")
    shown = r"\S+, like every other parameter," if everything else re.escape(name)
    on = f"rank {rank}" if way not in ZERO else ""
    micro_batches = 2 if way in PP else chance.choice([1, 2])
    told = [f"step {step}: the gradient of {shown} .*{on}.*factor {number(factor)}"]
    return Fault("gradient scaled", way, text, told, chance.choice(RECIPES), micro_batches)


def scaled_one(chance: random.Random) -> Fault:
    return scaled(chance, chance.choice([0.5, 1.01, 1.5, 2, 3, -1]))


def scaled_all(chance: random.Random) -> Fault:
    return scaled(chance, chance.choice([0.25, 1.1, 4]), everything=True)


def drifting(chance: random.Random) -> Fault:
    way = chance.choice([*DP, *MYDP, *PP, *TP])
    rank, step, factor = chance.randrange(way.ranks), chance.randrange(STEPS), chance.choice([0.98, 1.01, 1.1])
    name = held_by(way, rank, chance)
    text = with_code(way, [rank], step, name, f"{AFTER}parameter.mul_({factor})")
    told = [f"after step {step}: the weights {re.escape(name)} on .*rank {rank}.* {number(factor)} times what they"]
    return Fault("parameter drifts", way, text, told, SGD, 2 if way in PP else 1)


def not_updated(chance: random.Random) -> Fault:
    way = chance.choice([*DP, *MYDP, *PP, *TP])
    rank, step = chance.randrange(way.ranks), chance.randrange(STEPS)
    name = held_by(way, rank, chance)
    text = with_code(way, [rank], step, name, f"{KEEP}parameter.copy_(kept['weights'])")
    told = [f"after step {step}: the weights {re.escape(name)} on .*rank {rank}.* are those before the update"]
    return Fault("parameter not updated", way, text, told, chance.choice(RECIPES), 2 if way in PP else 1)


def wrong_rate(chance: random.Random) -> Fault:
    way = chance.choice([*DP, *MYDP, *PP, *TP])
    rank, step, factor = chance.randrange(way.ranks), chance.randrange(STEPS), chance.choice([0.5, 2, 3])
    name = held_by(way, rank, chance)
    code = f"{KEEP}when == 'after' and parameter.copy_(kept.pop('weights').lerp(parameter, {factor}))"
    text = with_code(way, [rank], step, name, code)
    told = [f"after step {step}: the weights {re.escape(name)} on .*rank {rank}.* changed by {number(factor)} times"]
    return Fault("wrong learning rate", way, text, told, chance.choice(RECIPES), 2 if way in PP else 1)


def edited(kind: str, way: Way, told: str, before: str, after: str, micro_batches: int, recipe: str = SGD) -> Fault:
    text = (LAB / way.script).read_text()
    assert before in text
    return Fault(kind, way, text.replace(before, after), [told], recipe, micro_batches)


SUM = "            dist.all_reduce(gradients, ReduceOp.AVG)\n"


def sum_missing(chance: random.Random) -> Fault:
    way, step, name = chance.choice(DP), chance.randrange(STEPS), chance.choice([*FIRST, *BLOCKS, *LAST])
    code = f"            parameter = dict(net.named_parameters())[{name!r}]\n"
    code += f"            own = parameter.grad.clone()\n{SUM}"
    code += f"            if step >= {step}:\n                parameter.grad.copy_(own)\n"
    told = f"step {step}: the gradient of {re.escape(name)} on all ranks is that of this rank's own sequences"
    return edited("sum missing", way, told, SUM, code, chance.choice([1, 2]), chance.choice(RECIPES[:2]))


def not_divided(chance: random.Random) -> Fault:
    way, step = chance.choice(DP), chance.randrange(STEPS)
    code = SUM.replace("ReduceOp.AVG", f"ReduceOp.AVG if step < {step} else ReduceOp.SUM")
    told = f"step {step}: the gradient of tokens.weight, like every other.* on all ranks is .*factor {way.ranks}"
    return edited("sum not divided", way, told, SUM, code, chance.choice([1, 2]), chance.choice(RECIPES[:2]))


def wrong_group(chance: random.Random) -> Fault:
    step, lonely = chance.randrange(STEPS), chance.randrange(3)
    others = [rank for rank in range(3) if rank != lonely]
    code = f"            group = PAIR[0] if step >= {step} else None\n"
    code += f"            if run.rank != {lonely} or step < {step}:\n    "
    code += SUM.replace("ReduceOp.AVG)", "ReduceOp.AVG, group=group)")
    told = f"step {step}: the gradient of tokens.weight, like every other.* on rank {others[0]} and rank {others[1]} "
    told += f"looks as if rank {lonely}'s share was lost; the others count 1.5 times"
    found = edited("wrong group", DP[1], told, SUM, code, chance.choice([1, 2]), chance.choice(RECIPES[:2]))
    track = "    run.track(net, optimizer)\n"
    text = found.text.replace(track, f"{track}    PAIR = [dist.new_group({others})]\n")
    return Fault(found.kind, found.way, text, found.told, found.recipe, found.micro_batches)


def batch_skipped(chance: random.Random) -> Fault:
    way, step = chance.choice([*DP, *MYDP]), chance.randrange(1, STEPS)
    rank = chance.randrange(way.ranks)
    before = "    for step, batch in run.steps(stories):\n"
    code = f"    last = None\n{before}        is_again = step == {step} and run.rank == {rank}\n"
    code += "        last, batch = batch, last if is_again else batch\n"
    told = f"step {step}: the gradient of tokens.weight, like every other .*on all ranks is no (combination|multiple)"
    return edited("batch repeated", way, told, before, code, 1, chance.choice(RECIPES[:2]))


def micro_batch_skipped(chance: random.Random) -> Fault:
    way, step = chance.choice(DP), chance.randrange(STEPS)
    rank = chance.randrange(way.ranks)
    before = "            loss.backward()\n"
    code = f"            if losses or step != {step} or run.rank != {rank}:\n    {before}"
    told = rf"step {step}: the gradient of tokens.weight, like .* rank {rank}'s micro-batch 0 not at all"
    return edited("micro-batch skipped", way, told, before, code, 2, chance.choice(RECIPES[:2]))


def not_cleared(chance: random.Random) -> Fault:
    way, step = chance.choice(DP), chance.randrange(1, STEPS)
    before = "        gradients.zero_()\n"
    told = (
        f"step {step}: the gradient of tokens.weight, like every other .*still contains the gradient of the step before"
    )
    code = f"        if step != {step}:\n    {before}"
    return edited("not cleared", way, told, before, code, chance.choice([1, 2]))


def slices_not_summed(chance: random.Random) -> Fault:
    """The gradient of an input is not added up below a layer in slices, from the first step on."""
    before = "return F.linear(copy_to(x, self._slices), self.weight, self.bias)"
    told = "step 0: the gradient of tokens.weight and .* other parameters on all ranks is no"
    code = "return F.linear(x, self.weight, self.bias)"
    return edited("sum missing below slices", TP[0], told, before, code, chance.choice([1, 2]), chance.choice(RECIPES))


KINDS: list[Callable[[random.Random], Fault]] = [
    scaled_one,
    sum_missing,
    wrong_group,
    drifting,
    batch_skipped,
    slices_not_summed,
    scaled_all,
    not_divided,
    micro_batch_skipped,
    not_updated,
    not_cleared,
    wrong_rate,
]


def faults(count: int, seed: int) -> Iterator[Fault]:
    """Faults of all kinds, the same for the same seed."""
    for index in range(count):
        yield KINDS[index % len(KINDS)](random.Random(f"{seed} {index}"))


def pairs(count: int, seed: int) -> Iterator[list[tuple[Way, list[str]]]]:
    """Two layouts of a model each, with their flags."""
    for index in range(count):
        chance = random.Random(f"{seed} pair {index}")
        family = LLAMA if index % 2 else [ONE, *DP, *MYDP, *ZERO, *PP, *TP]
        recipe = chance.choice(RECIPES)
        found = []
        for way in chance.sample(family, 2):
            micro_batches = chance.choice([1, 2])
            has_only_one = "1F1B" in way.script
            flags = f"{way.flags} {way.batch} --micro-batches {1 if has_only_one else micro_batches} {recipe}"
            found.append((way, flags.split()))
        yield found


def train(rank: int, script: str, flags: list[str]) -> None:
    """A rank's part of a run."""
    module = load(script)
    settings = parse(module.DEFAULTS, "", [str(rank), *FLAGS, *flags])
    run = training_run(settings, LAB / script)
    module.train(run)
    run.close()


def trained(ranks: int, script: str, flags: list[str], out: Path, records: bool = True) -> Path:
    """Return a run's folder; it trains unless that is there."""
    if not out.exists():
        keep = ["--record-gradients", str(STEPS)] * records
        run_ranks(ranks, train, script, [*keep, *flags, "--out", str(out), "--master-port", str(free_port())])
    return out


def trained_pair(pair: Sequence[tuple[Way, list[str]]], folder: Path) -> tuple[Path, Path]:
    one, other = (trained(way.ranks, way.script, flags, folder / str(side)) for side, (way, flags) in enumerate(pair))
    return one, other


def compared(request: Request) -> tuple[int, str]:
    """The exit status of `compare`, and its lines."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = compare(request)
    return status, printed.getvalue()


def beside_one_process(fault: Fault, folder: Path, again: bool) -> tuple[int, str]:
    """What `compare` says of a fault: beside a new run of one process, or beside one that others use, too."""
    script = folder / "faulty.py"
    script.write_text(fault.text)
    run = trained(fault.way.ranks, str(script), fault.flags, folder / "run")
    if again:
        return compared(Request(run, with_one_process=True, script=LAB / ONE.script))
    parts = fault.way.replicas * fault.micro_batches
    flags = f"{ONE.flags} {ONE.batch} --micro-batches {parts} {fault.recipe}"
    name = re.sub(r"\W+", "-", flags)
    return compared(Request(run, trained(1, ONE.script, flags.split(), folder.parent / name)))


def tried_faults(numbers: Sequence[int], seed: int, again: bool, folder: Path) -> Iterator[tuple[bool, str, str]]:
    """Yield for each fault whether it is found, a line about it, and what `compare` says."""
    for index, fault in enumerate(faults(max(numbers, default=-1) + 1, seed)):
        if index in numbers:
            (place := folder / f"fault{index}").mkdir()
            status, said = beside_one_process(fault, place, again)
            is_found = status == 1 and all(re.search(told, said) for told in fault.told)
            layout = f"{Path(fault.way.script).stem} {fault.way.flags} --micro-batches {fault.micro_batches}"
            yield is_found, f"{fault.kind}: {layout} {fault.recipe}", said


def tried_pairs(numbers: Sequence[int], seed: int, folder: Path) -> Iterator[tuple[bool, str, str]]:
    """Yield for each pair whether it is equal, a line about it, and what `compare` says."""
    for index, pair in enumerate(pairs(max(numbers, default=-1) + 1, seed)):
        if index in numbers:
            status, said = compared(Request(*trained_pair(pair, folder / f"pair{index}")))
            names = " and ".join(f"{Path(way.script).stem} {' '.join(flags)}" for way, flags in pair)
            yield status == 0, names, said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="of faults, and of equal pairs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of faults and pairs, from 0")
    parser.add_argument("--kind", choices=["faults", "pairs"], help="only these")
    parser.add_argument("--again", action="store_true", help="run one process for each fault by --with-one-process")
    parser.add_argument("--show", action="store_true", help="print what compare says")
    args = parser.parse_args()
    numbers, missed = args.only or range(args.count), 0
    with temporary_folder() as folder:
        for kind, word, tried in (
            ("faults", "named", tried_faults(numbers, args.seed, args.again, folder)),
            ("pairs", "equal", tried_pairs(numbers, args.seed, folder)),
        ):
            right = 0
            if args.kind in (None, kind):
                for is_right, about, said in tried:
                    right += is_right
                    print(f"{word if is_right else f'NOT {word}'}: {about}", flush=True)
                    if args.show or not is_right:
                        print(said, flush=True)
                print(f"# {right} of {len(numbers)} {kind} {word}", flush=True)
                missed += len(numbers) - right
    return int(missed > 0)


if __name__ == "__main__":
    sys.path.insert(0, str(LAB / "examples"))
    sys.exit(main())
