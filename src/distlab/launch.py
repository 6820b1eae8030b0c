"""./launch.sh <topology> [flags]: starts all ranks of a script through torchrun, and ends them all when one fails.

A script that imports mpi4py is started through mpirun, which does the same.
"""

import argparse
import ast
import importlib.util
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from distlab.checkpoints.format import has_checkpoints
from distlab.comm.grid import Grid, Layout
from distlab.comm.processes import leave
from distlab.comm.torch_patches import Agent
from distlab.rendezvous.nodes import FLAGS, LOST_NODE_0, ElsewhereError, NodeRendezvous, Nodes, assign_ranks, read_flags
from distlab.rendezvous.store import StoreError
from distlab.run.commands import LAB, LAUNCHED_AS, TEMPERATURE
from distlab.run.logs import new_folder, say, take_over_output
from distlab.run.settings import RunSettings, parse
from distlab.run.train_settings import TrainSettings
from simplellm.errors import InputError, require
from simplellm.generation import prompt_ids
from simplellm.tokenizers import SPTokenizer

TOPOLOGIES = {  # a script, and flags that come before the user's own
    "quickstart": "DP/gradient_aggr/intro_DP_GA.py --world-size 2 --batch-size 2 --dmodel 128 --num-heads 4 "
    "--n-layers 4 --lr 2e-3 --steps 2400 --data sample --save-every 800 --tell 'Once upon a time'",
    "primer": "primer/intro.py",
    "dp-ga": "DP/gradient_aggr/intro_DP_GA.py",
    "dp-wa": "DP/weight_aggr/intro_DP_WA.py",
    "ddp": "DP/ddp/intro_DP_DDP.py",
    "mydp": "DP/mydp/intro_DP_MyDP.py",
    "pp-1f1b": "PP/1F1B/intro_PP_1F1B.py",
    "pp-gpipe": "PP/microbatches/intro_PP_microbatches.py --schedule gpipe",
    "pp-dapple": "PP/microbatches/intro_PP_microbatches.py --schedule dapple",
    "pp-interleaved": "PP/microbatches/intro_PP_microbatches.py --schedule interleaved",
    "pp-zb": "PP/microbatches/intro_PP_microbatches.py --schedule zb-h1",
    "pp-zbv": "PP/microbatches/intro_PP_microbatches.py --schedule zb-v",
    "tp": "TP/intro_TP.py",
    "sentiment": "TP/sentiment/tp_tensor_parallel.py",
    "hybrid": "hybrid/intro_hybrid.py",
    "collectives": "collectives/intro_collectives.py",
    "mlp": "primer/mlp.py",
    "mlp-ddp": "DP/ddp/mlp_ddp.py",
    "mlp-mydp": "DP/mydp/mlp_mydp.py",
    "race": "primer/race.py",
    "dist": "primer/dist.py",
    "mpi": "mpi/mpi-test.py",
    "deadlock": "PP/deadlock/intro_deadlock.py",
}
QUICKSTART = "Start here: dp-ga with a small model, about five minutes on two cores; then the model tells a story."
DEFAULT_PORT = 29500  # where node 0 listens, when there are several machines
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # what asks a launcher to end
SECONDS_TO_END = 4  # after SIGTERM, when a rank has failed; a stopped process does not react to it


def launch(args: list[str]) -> int:
    """Start the topology that `args` name, wait for its end, and return the exit status.

    Raises:
        InputError: there is no such topology, or its flags cannot work.
    """
    if not args or args[0] in ("-h", "--help"):
        print("./launch.sh <topology> [flags]   starts all ranks; --help after a topology's name lists its flags\n")
        for name in TOPOLOGIES:
            script, flags = find_script(name)
            first_line = (ast.get_docstring(ast.parse(script.read_text())) or "").partition("\n")[0]
            about = QUICKSTART if name == "quickstart" else " ".join([first_line, *flags])
            print(f"  {name:<12} {about}")
        print(f"\nbesides a topology's own flags:\n{FLAGS}", end="")
        return 0
    script, flags = find_script(args[0])
    prog, args = f"./launch.sh {args[0]}", [*flags, *args[1:]]
    if re.search(r"^(from|import) mpi4py", script.read_text(), re.MULTILINE):
        become_mpirun(script, args)
    own_flags, args = read_flags(args)
    settings = read_settings(script, args, prog)
    if own_flags.tell is not None:
        trained = check_story(own_flags.tell, settings, script.name)
        if trained.save_every is None:
            args = [*args, "--save-every", str(trained.steps)]
            settings = read_settings(script, args, prog)
    require(settings.rank < 0, f"rank {settings.rank}: launch.sh starts all ranks; leave the rank out")
    nodes = assign_ranks(own_flags, settings.layout, settings.master_addr)
    out, resume = settings.out, getattr(settings, "resume", None)
    reader = "--max-restarts" if own_flags.max_restarts else "--tell" if own_flags.tell is not None else None
    if reader and out is None:  # restarted ranks, and who tells the story, have to find what was saved
        several = f"{reader} on several machines: give --out, a folder that all of them see"
        require(len(nodes.ranks_of) == 1, several)
        out = new_folder(Path("runs") / script.stem)
        args = [*args, "--out", str(out)]
    elif own_flags.max_restarts and out is not None and has_checkpoints(out):
        require(
            resume is not None and Path(resume).resolve().is_relative_to(out.resolve()),
            f"--max-restarts with --out {out}: has checkpoints of another run, from which the ranks would resume; give "
            f"another folder, or --resume {out}",
        )
    status = run_ranks(script, args, settings, nodes, own_flags.max_restarts)
    if status == 0 and own_flags.tell is not None and nodes.rank == 0:
        assert out is not None
        return tell_story(out, own_flags.tell, settings.device)
    return status


def find_script(name: str) -> tuple[Path, list[str]]:
    """The script of a topology and its flags, or the path of any script."""
    if name in TOPOLOGIES:
        script, *flags = shlex.split(TOPOLOGIES[name])
        return LAB / script, flags
    is_script = Path(name).is_file() and name.endswith(".py")
    require(is_script, f"{name}: no such topology or script; there are {', '.join(TOPOLOGIES)}")
    return Path(name), []


def read_settings(script: Path, args: list[str], prog: str) -> RunSettings:
    """A script's defaults, changed by `args`: a wrong flag is found here, before any rank starts."""
    spec = importlib.util.spec_from_file_location("launched_script", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its settings' annotations are looked up
    sys.path.insert(0, str(script.parent))
    spec.loader.exec_module(module)
    defaults = getattr(module, "DEFAULTS", None)
    if not isinstance(defaults, RunSettings):
        raise InputError(f"{script}: launch.sh starts scripts that have DEFAULTS, a distlab.run.settings.RunSettings")
    return parse(defaults, module.__doc__ or script.stem, args, prog=prog)


def check_story(prompt: str, settings: RunSettings | None, script: str) -> TrainSettings:
    """The settings of a run whose model can tell a story; `InputError` if it cannot, or not with this prompt."""
    if not isinstance(settings, TrainSettings):
        raise InputError(f"--tell: {script} trains no Llama, which could tell a story; leave --tell out")
    if settings.resume is None:  # otherwise the model may read more tokens than --seq-len
        try:
            prompt_ids(prompt, SPTokenizer(settings.tokenizer), settings.seq_len)
        except InputError as error:
            raise InputError(str(error).replace("--prompt", "--tell")) from None
    return settings


def tell_story(run: Path, prompt: str, device: str) -> int:
    """Have the model that a run has saved tell a story, in lines that begin with `#`; returns the exit status."""
    teller = [sys.executable, str(LAB / "primer/tell_story.py"), str(run), "--prompt", prompt, "--device", device]
    teller += ["--temperature", str(TEMPERATURE)]
    with subprocess.Popen(teller, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line.rstrip() if line.startswith("#") else f"# {line}".rstrip(), flush=True)
    return process.returncode


def become_mpirun(script: Path, args: list[str]) -> NoReturn:
    """Replace this process by mpirun, which runs all ranks of `script`.

    Raises:
        InputError: MPI is not installed, or `--world-size`, the one flag that is not the script's own, is not a number.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--world-size", "--world_size", type=int, default=8)
    parser.add_argument("--tell")
    try:
        ours, flags = parser.parse_known_args(args)
    except argparse.ArgumentError as error:
        raise InputError(str(error)) from error
    if ours.tell is not None:
        check_story(ours.tell, None, script.name)
    require(ours.world_size >= 1, f"--world-size {ours.world_size}: every size must be at least 1")
    beside_python = str(Path(sys.executable).parent)
    mpirun = shutil.which("mpirun", path=os.pathsep.join([beside_python, os.environ.get("PATH", "")]))
    if mpirun is None or importlib.util.find_spec("mpi4py") is None:
        raise InputError(f"{script.name} needs MPI, with mpirun on the PATH: pip install mpi4py mpich")
    os.execv(mpirun, [mpirun, "-n", str(ours.world_size), sys.executable, str(script), *flags])


def run_ranks(script: Path, args: list[str], settings: RunSettings, nodes: Nodes, max_restarts: int) -> int:
    """Run this machine's ranks of `script` under torchrun's agent to the end of the run; returns the exit status.

    When a rank fails, the agent ends all and restarts them, `max_restarts` times; they then resume from the last
    checkpoint (see `distlab.run.main`). If the status is not 0, the last line on stderr says which rank failed and why.
    """
    logging.disable()  # torchrun's agent says at length what we say in a line
    os.environ |= {"LAB_LAUNCHER": str(os.getpid()), LAUNCHED_AS: shlex.join(sys.argv[1:])}
    take_over_output(0, has_terminal=True)  # what it prints is above a status line that a rank may have left
    port = settings.master_port or (0 if len(nodes.ranks_of) == 1 else DEFAULT_PORT)
    rendezvous: NodeRendezvous | None = None  # until this launcher has found node 0's
    status, sentence, cause = 0, "", ""  # the cause is what the other machines are told
    with tempfile.TemporaryDirectory() as errors:
        try:
            for sent in ENDING:  # as torchrun's agent does once it has started ranks
                signal.signal(sent, raise_signal)
            rendezvous = NodeRendezvous(nodes, settings.master_addr, port, settings.timeout, max_restarts, say)
            spec = WorkerSpec(
                role="rank",
                local_world_size=nodes.ranks_of[nodes.rank],
                entrypoint=sys.executable,
                args=("-u", str(script), *args),
                rdzv_handler=rendezvous,
                max_restarts=max_restarts,
                monitor_interval=0.1,
            )
            try:
                failures = Agent(spec, errors, SECONDS_TO_END).run().failures
            finally:
                for sent in ENDING:  # the ranks have ended: a signal may now end the wait for the other machines
                    signal.signal(sent, signal.SIG_DFL)
            if failures:
                status, sentence, is_cause = root_cause(failures, settings.layout)
                if not is_cause and len(nodes.ranks_of) > 1:
                    rendezvous.await_cause()
                    sentence += "; no report from the other machines"
                cause = sentence
        except SignalException as end:
            status, sentence = 128 + end.sigval, f"ended by {signal.Signals(end.sigval).name}"
            cause = f"the launcher was {sentence}"
        except InputError as error:
            status, sentence, cause = 2, str(error), str(error)
        except ElsewhereError as error:
            status, sentence = 1, str(error)
        except StoreError as error:
            status, sentence = 1, LOST_NODE_0 if rendezvous else str(error)
    if sentence:
        print(f"# {sentence}", file=sys.stderr, flush=True)
    if rendezvous:
        rendezvous.leave(cause)
    return status


def raise_signal(number: int, _: object) -> NoReturn:
    raise SignalException(f"got signal {number}", signal.Signals(number))


def root_cause(failures: Mapping[int, ProcessFailure], layout: Layout) -> tuple[int, str, bool]:
    """The exit status and one sentence for the rank that failed first, other than by losing a peer or by our SIGTERM.

    The third value is whether such a rank is on this machine; if not, the sentence is about the first that lost a peer.
    """
    first = min(failure.timestamp for failure in failures.values())

    def is_consequence(failure: ProcessFailure) -> bool:
        by_us = failure.exitcode == -signal.SIGKILL and failure.timestamp > first + SECONDS_TO_END / 2  # it was stopped
        return by_us or failure.exitcode == -signal.SIGTERM or bool(failure.error_file_data.get("lost_a_peer"))

    # Of failures in the same second the one that torchrun found first counts; before that we had not sent SIGTERM.
    rank, failure = min(failures.items(), key=lambda item: (is_consequence(item[1]), item[1].timestamp))
    who = Grid.of(rank, layout).describe(rank)
    is_cause = not is_consequence(failure) or failure.exitcode == -signal.SIGTERM
    sentence = f"{who} failed with exit status {failure.exitcode}"
    if failure.exitcode < 0:
        sentence = f"{who} failed: it was ended by {failure.signal_name()}"
    elif "status" in failure.error_file_data:  # written by distlab.run.failure
        names_rank = failure.error_file_data.get("names_rank")
        sentence = str(failure.message) if names_rank else f"{who} failed: {failure.message}"
    return max(1, failure.exitcode), sentence, is_cause


def main() -> NoReturn:
    try:
        status = launch(sys.argv[1:])
    except InputError as error:
        print(f"# {error}", file=sys.stderr)
        status = 2
    leave(status)  # a thread of `distlab.rendezvous.nodes` may still be in a call to the store


if __name__ == "__main__":
    main()
