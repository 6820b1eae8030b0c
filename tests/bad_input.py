"""Inputs that cannot work, made by the hundred from a seed, and what the lab does with each of them.

    python tests/bad_input.py                      200 of them, each in a process of its own
    python tests/bad_input.py --count 500 --seed 7
    python tests/bad_input.py --only 17 --keep DIR the 17th alone; its files stay in DIR

Every input is bad by construction: nothing here could be a legal wish. It has to end with a status that is not 0,
within 15 seconds, with one sentence on stderr that names what is wrong, without a traceback and without a process left
behind.
"""

import argparse
import contextlib
import itertools
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.bad_inputs.commands import figures, launcher, mpi, rendezvous
from support.bad_inputs.flags import combinations, flags
from support.bad_inputs.inputs import BadInput
from support.bad_inputs.models import checkpoints, models
from support.bad_inputs.texts import data, tokenizers
from support.bad_inputs.trials import Outcome, run, shown

from distlab.run.progress import each

KINDS: dict[Callable[[random.Random, int, Path], Iterator[BadInput]], int] = {  # and their shares, in percent
    flags: 30,
    combinations: 12,
    data: 15,
    tokenizers: 5,
    checkpoints: 14,
    models: 10,
    figures: 6,
    launcher: 4,
    mpi: 1,
    rendezvous: 3,
}


def generate(count: int, seed: int, folder: Path) -> list[BadInput]:
    """`count` inputs of all kinds, the same for the same seed; their files are to be in `folder`."""
    shares = {kind: max(1, count * share // 100) for kind, share in KINDS.items()}
    shares[flags] += max(0, count - sum(shares.values()))
    found: list[BadInput] = []
    for kind, share in shares.items():
        chance = random.Random(f"{seed} {kind.__name__}")
        found += itertools.islice(kind(chance, max(share, 9), folder / kind.__name__), share)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="inputs that are tried at a time")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of inputs, from 0")
    parser.add_argument("--kind", choices=[kind.__name__ for kind in KINDS])
    parser.add_argument("--keep", type=Path, help="an empty folder for the files, which stay")
    parser.add_argument("--show", action="store_true", help="print each sentence")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cwd = folder / "work"
        cwd.mkdir(parents=True)
        numbered = [
            (number, bad)
            for number, bad in enumerate(generate(args.count, args.seed, folder.absolute()))
            if (args.only is None or number in args.only) and args.kind in (None, bad.kind)
        ]
        outcomes: list[Outcome] = []
        with ThreadPoolExecutor(args.jobs) as pool:
            tried = pool.map(lambda pair: run(pair[1], cwd), numbered)
            for (number, _), outcome in zip(each(numbered, "inputs"), tried, strict=True):
                outcomes.append(outcome)
                if args.show or outcome.problems:
                    verdict = "FAILED" if outcome.problems else "ok"
                    print(f"{number} {outcome.bad.kind} {verdict} {outcome.seconds:.1f} s: {outcome.sentence[:400]}")
                if outcome.problems:
                    print("   ", *(shown(command) for command in outcome.bad.commands), sep="\n    $ ")
                    print("    " + "\n".join(outcome.problems).replace("\n", "\n    "), flush=True)
    summarize(outcomes)
    return any(outcome.problems for outcome in outcomes)


def summarize(outcomes: Sequence[Outcome]) -> None:
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_kind[outcome.bad.kind].append(outcome)
    print(f"{'kind':<14}{'inputs':>8}{'one sentence':>14}{'median s':>10}{'worst s':>9}")
    for kind, group in [*by_kind.items(), ("all", list(outcomes))]:
        seconds = sorted(outcome.seconds for outcome in group)
        good = sum(not outcome.problems for outcome in group)
        print(f"{kind:<14}{len(group):>8}{good:>14}{seconds[len(seconds) // 2]:>10.1f}{seconds[-1]:>9.1f}")


if __name__ == "__main__":
    sys.exit(main())
