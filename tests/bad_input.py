"""Inputs that cannot work, made by the hundred from a seed, and what the lab does with each of them.

    python tests/bad_input.py                      300 of them
    python tests/bad_input.py --count 500 --seed 7
    python tests/bad_input.py --only 17 --keep DIR the 17th alone; its files stay in DIR

Every input is bad by construction: nothing here could be a legal wish. It has to end with a status that is not 0,
within 15 seconds, with one sentence on stderr that names what is wrong, without a traceback and without a process left
behind. Each is tried in forks of this process; a third of them, if root starts it, as a user without rights.
"""

import argparse
import contextlib
import itertools
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from support.bad_inputs.commands import figures, launcher, mpi, rendezvous
from support.bad_inputs.flags import flags
from support.bad_inputs.inputs import BadInput
from support.bad_inputs.models import checkpoints, models
from support.bad_inputs.paths import paths
from support.bad_inputs.texts import data, tokenizers
from support.bad_inputs.trials import Outcome, can_be_nobody, import_before_forks, run, shown
from support.processes import before_forks, run_ranks

from distlab.launching.local_ranks import temporary_folder

KINDS: dict[Callable[[random.Random, int, Path], Iterator[BadInput]], int] = {  # and their shares, in percent
    flags: 38,
    data: 12,
    tokenizers: 4,
    checkpoints: 9,
    models: 4,
    figures: 5,
    launcher: 4,
    mpi: 1,
    rendezvous: 3,
    paths: 20,
}


def generate(count: int, seed: int, folder: Path) -> list[BadInput]:
    """`count` inputs of all kinds, the same for the same seed; their files are to be in `folder`."""
    shares = {kind: max(1, count * share // 100) for kind, share in KINDS.items()}
    shares[flags] += max(0, count - sum(shares.values()))
    found: list[BadInput] = []
    for kind, share in shares.items():
        chance = random.Random(f"{seed} {kind.__name__}")
        found += itertools.islice(kind(chance, max(share, 9), folder / kind.__name__), share)
    for number, bad in enumerate(found):
        bad.as_nobody = can_be_nobody() and bad.kind != "mpi" and (bad.kind == "paths" or number % 5 == 0)
    return found


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A temporary folder in which every user may write."""
    with temporary_folder() as folder:
        folder.chmod(0o777)
        yield folder


def try_all(inputs: Sequence[BadInput], folder: Path, jobs: int, say: Callable[[int, Outcome], None]) -> list[Outcome]:
    """What becomes of each, tried by `jobs` processes; `say` is called with its number when it has ended."""
    before_forks()
    import_before_forks()
    cwd = folder / "work"
    cwd.mkdir()
    for path in (cwd, *folder.iterdir()):
        path.chmod(0o777)

    def work(job: int) -> dict[int, Outcome]:
        import_before_forks()
        outcomes = {}
        for number in range(job, len(inputs), jobs):
            outcomes[number] = run(inputs[number], cwd)
            say(number, outcomes[number])
        return outcomes

    found = {number: outcome for part in run_ranks(jobs, work, deadline=3600) for number, outcome in part.items()}
    return [found[number] for number in range(len(inputs))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="inputs that are tried at a time")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of inputs, from 0")
    parser.add_argument("--kind", choices=[kind.__name__ for kind in KINDS])
    parser.add_argument("--keep", type=Path, help="an empty folder for the files, which stay")
    parser.add_argument("--show", action="store_true", help="print each sentence")
    args = parser.parse_args()
    with contextlib.nullcontext(args.keep) if args.keep else open_folder() as folder:
        numbered = [
            (number, bad)
            for number, bad in enumerate(generate(args.count, args.seed, folder.absolute()))
            if (args.only is None or number in args.only) and args.kind in (None, bad.kind)
        ]

        def say(at: int, outcome: Outcome) -> None:
            number, bad = numbered[at]
            if args.show or outcome.problems:
                verdict = "FAILED" if outcome.problems else "ok"
                print(f"{number} {bad.kind} {verdict} {outcome.seconds:.1f} s: {outcome.sentence[:400]!a}")
            if outcome.problems:
                user = "as nobody " if bad.as_nobody else ""
                print("   ", *(f"{user}$ {shown(command)}" for command in bad.commands), sep="\n    ")
                print("    " + "\n".join(outcome.problems).replace("\n", "\n    "), flush=True)

        inputs = [bad for _, bad in numbered]
        outcomes = try_all(inputs, folder.absolute(), args.jobs, say)
    summarize(inputs, outcomes)
    return any(outcome.problems for outcome in outcomes)


def summarize(inputs: Sequence[BadInput], outcomes: Sequence[Outcome]) -> None:
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for bad, outcome in zip(inputs, outcomes, strict=True):
        for name in (bad.kind, "as nobody" if bad.as_nobody else "as this user"):
            groups[name].append(outcome)
    groups["all"] = list(outcomes)
    print(f"{'kind':<14}{'inputs':>8}{'one sentence':>14}{'median s':>10}{'worst s':>9}")
    for name, group in groups.items():
        seconds = sorted(outcome.seconds for outcome in group)
        good = sum(not outcome.problems for outcome in group)
        print(f"{name:<14}{len(group):>8}{good:>14}{seconds[len(seconds) // 2]:>10.1f}{seconds[-1]:>9.1f}")


if __name__ == "__main__":
    sys.exit(main())
