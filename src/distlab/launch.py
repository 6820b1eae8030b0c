"""`./launch.sh` and `distlab`: start all ranks of a script, and end all of them when one fails.

`subcommands` lists the subcommands. A script that imports mpi4py is started through mpirun. Modules that import torch,
which takes a second or more, are imported where they are used, so that the list of topologies appears at once.
"""

import os
import signal

# Until there are ranks, Ctrl-C only has to end this process. A KeyboardInterrupt would print a traceback during the
# imports below, and would be lost in the import of torch, which continues if its import of numpy fails. (The start of
# the interpreter, some milliseconds before this line, is not covered.)
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import ast
import difflib
import importlib.util
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from distlab.launching.launcher_flags import FLAGS, read_known, refuse_to_tell
from distlab.machine.cores import BINDING, binding
from distlab.machine.processes import leave, require_address_space
from distlab.run.commands import LAB, launcher
from distlab.subcommands import FUNCTIONS, SUBCOMMANDS, run_subcommand
from simplellm.errors import InputError, require
from simplellm.exit_status import status_of

TOPOLOGIES = {  # in the order of the chapters: a script, and flags that are placed before the user's own
    "quickstart": "DP/gradient_aggr/intro_DP_GA.py --world-size 2 --batch-size 2 --dmodel 128 --num-heads 4 "
    "--n-layers 4 --lr 2e-3 --steps 2400 --data sample --save-every 800 --tell 'Once upon a time'",
    "hello": "primer/hello.py",
    "primer": "primer/intro.py",
    "dp-ga": "DP/gradient_aggr/intro_DP_GA.py",
    "dp-wa": "DP/weight_aggr/intro_DP_WA.py",
    "collectives": "collectives/intro_collectives.py",
    "compare-collectives": "collectives/compare_collectives.py",
    "mpi": "mpi/mpi-test.py",
    "dp-overlap": "DP/buckets/intro_DP_overlap.py",
    "dp-buckets": "DP/buckets/intro_DP_buckets.py",
    "dp-hooks": "DP/mydp/intro_DP_hooks.py",
    "ddp": "DP/ddp/intro_DP_DDP.py",
    "mydp": "DP/mydp/intro_DP_MyDP.py",
    "race": "primer/race.py",
    "dist": "primer/dist.py",
    "mlp": "primer/mlp.py",
    "mlp-ddp": "DP/ddp/mlp_ddp.py",
    "mlp-mydp": "DP/mydp/mlp_mydp.py",
    "pp-1f1b": "PP/1F1B/intro_PP_1F1B.py",
    "pp-gpipe": "PP/microbatches/intro_PP_microbatches.py --schedule gpipe",
    "pp-dapple": "PP/microbatches/intro_PP_microbatches.py --schedule dapple",
    "pp-interleaved": "PP/schedules/intro_PP_schedules.py --schedule interleaved",
    "pp-zb": "PP/schedules/intro_PP_schedules.py --schedule zb-h1",
    "pp-zbv": "PP/schedules/intro_PP_schedules.py --schedule zb-v",
    "tp": "TP/intro_TP.py",
    "tp-styles": "TP/intro_TP_styles.py",
    "sentiment": "TP/sentiment/tp_tensor_parallel.py",
    "hybrid-plain": "hybrid/intro_hybrid_plain.py",
    "hybrid": "hybrid/intro_hybrid.py",
    "dp-zero": "DP/zero/intro_DP_ZeRO.py",
    "dp-fsdp": "DP/fsdp/intro_DP_FSDP.py",
    "5d": "hybrid/intro_5d.py",
    "deadlock": "PP/deadlock/intro_deadlock.py",
    "diloco": "DP/diloco/intro_DP_DiLoCo.py",
    "streaming-diloco": "DP/streaming/intro_DP_Streaming.py",
    "cp": "CP/intro_CP.py",
    "cp-ring": "CP/intro_CP_ring.py",
    "ep": "EP/intro_EP.py",
    "dp-repair": "DP/repair/intro_DP_repair.py",
    "hybrid-repair": "hybrid/intro_hybrid_repair.py",
}
QUICKSTART = "Start here: dp-ga with a small model, some minutes on two cores; then the model tells a story."


def launch(args: list[str], prog: str | None = None) -> int:
    """Start the topology named in `args`, or run the subcommand, and return the exit status.

    `prog` is the command in the help text, by default launch.sh with the topology's name.

    Raises:
        InputError: there is no such topology, or its flags cannot work.
    """
    if args[:1] == ["launch"]:
        args = args[1:]
    if not args or args[0] in ("-h", "--help"):
        print(f"{launcher()} <topology> [flags]   starts all ranks; --help after a topology's name lists its flags\n")
        for name in TOPOLOGIES:
            script, flags = find_script(name)
            first_line = (ast.get_docstring(ast.parse(script.read_bytes())) or "").partition("\n")[0]
            about = QUICKSTART if name == "quickstart" else " ".join([first_line, *flags])
            print(f"  {name:<19} {about}")
        for when, subcommands in SUBCOMMANDS.items():
            print(f"\nand {when}:")
            for name, (_, about) in subcommands.items():
                print(f"  {name:<16} {about}")
        print(f"\nflags of {Path(launcher()).name} itself:\n{FLAGS}", end="")
        return 0
    if args[0] in FUNCTIONS:
        raise_interrupts()
        return run_subcommand(args[0], args[1:])
    script, flags = find_script(args[0])
    prog, args = prog or f"{launcher()} {args[0]}", [*flags, *args[1:]]
    if re.search(rb"^(from|import) mpi4py", script.read_bytes(), re.MULTILINE):
        become_mpirun(script, args)
    unbind()
    require_address_space()
    from distlab.launching.start import start  # torch takes seconds; the list of topologies does not need it

    return start(script, args, prog)


def find_script(name: str) -> tuple[Path, list[str]]:
    """Return the script of a topology and its flags, or any script by its path."""
    if name in TOPOLOGIES:
        script, *flags = shlex.split(TOPOLOGIES[name])
        is_there = (LAB / script).exists()
        require(is_there, f"{name}: {script} is not in {LAB}; launch a script by its path, or use the lab's checkout")
        return LAB / script, flags
    require(not name.startswith("-"), f"{name}: give a topology or a script first, then its flags")
    is_script = Path(name).is_file() and name.endswith(".py")
    require(is_script, f"{name}: no such topology or script; {suggestion(name)}")
    return Path(name), []


def suggestion(name: str) -> str:
    """Return what may have been meant: topologies with that script, or similar names; else all topologies."""
    names = [*TOPOLOGIES, *FUNCTIONS]
    like = difflib.get_close_matches(name.lower().replace("_", "-"), names, n=3, cutoff=0.75)
    like = [each for each, command in TOPOLOGIES.items() if Path(command.split()[0]).name == Path(name).name] or like
    return f"did you mean {' or '.join(like)}?" if like else f"there are {', '.join(TOPOLOGIES)}"


def become_mpirun(script: Path, args: list[str]) -> NoReturn:
    """Replace this process by mpirun, which runs all ranks of `script`.

    Raises:
        InputError: MPI is not installed, or `--world-size`, which is not a flag of the script itself, is not valid.
    """
    ours, flags = read_known(args, {"world-size": 8}, texts=["tell"])
    if ours.tell is not None:
        raise refuse_to_tell(script.name)
    require(ours.world_size >= 1, f"--world-size {ours.world_size}: every size must be at least 1")
    beside_python = str(Path(sys.executable).parent)
    mpirun = shutil.which("mpirun", path=os.pathsep.join([beside_python, os.environ.get("PATH", "")]))
    if mpirun is None or importlib.util.find_spec("mpi4py") is None:
        raise InputError(f"{script.name} needs MPI, with mpirun on the PATH: pip install mpi4py mpich")
    os.execv(mpirun, [mpirun, "-n", str(ours.world_size), sys.executable, str(script), *flags])


def unbind() -> None:
    """Remove OpenMP's variables that bind threads to cores from the environment, before torch reads them.

    OpenMP binds each process's threads from the first core on: this process and all its ranks would share one core.
    """
    if bound := binding():
        say = f"# {' and '.join(bound)} left out: all ranks of a machine would be bound to its first cores"
        print(say, file=sys.stderr, flush=True)
    for name in BINDING:
        os.environ.pop(name, None)


def raise_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, for a command that ends processes it has started."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as it is in the background of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> NoReturn:
    # A thread of `distlab.launching.nodes` may still be in a call to the store.
    leave(status_of(lambda: launch(sys.argv[1:])))


if __name__ == "__main__":
    main()
