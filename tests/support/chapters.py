"""Runs chapters' own `train` in forked ranks, so that tests can compare what they come to with one process."""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distlab.axes.placement import place, placement_of
from distlab.checkpoints.slices import Slice, as_held
from distlab.parallel.sharded import ShardedDP
from distlab.run.main import training_run
from distlab.run.training import TrainingRun
from distlab.settings.common import parse
from distlab.settings.training import TrainSettings
from simplellm.errors import InputError
from simplellm.layers import RMSNorm
from simplellm.llama import CausalLLama, LLama
from simplellm.tokenizers import SPTokenizer
from support.processes import LAB, free_port, run_ranks

STEPS = 3  # of the runs of `train_on`, which need no more to show in weights and gradients what is wrong
MODEL = "--dmodel 32 --num-heads 2 --n-layers 2 --seq-len 24 --device cpu".split()
# 602 tokens, with which a rank takes a quarter less time. `small_tokenizers.trained` has written the file, with the
# options vocab_size=602, normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False.
FEW_TOKENS = "--tokenizer", str(Path(__file__).with_name("small.model"))
TRAINING = "--steps 4 --optimizer sgd --lr 0.5 --data sample".split()
BATCH = 6  # sequences to a step in each of the layouts, of all replicas together
LAYOUTS = {  # ranks, script, flags
    "primer": (1, "primer/intro.py", "--batch-size 6"),
    "dp-ga": (3, "DP/gradient_aggr/intro_DP_GA.py", "--world-size 3 --batch-size 2"),
    "dp-buckets": (3, "DP/buckets/intro_DP_buckets.py", "--world-size 3 --batch-size 2"),
    "dp-zero": (3, "DP/zero/intro_DP_ZeRO.py", "--world-size 3 --batch-size 2"),
    "dp-fsdp": (3, "DP/fsdp/intro_DP_FSDP.py", "--world-size 3 --batch-size 2 --shard weights"),
    "dp-wa": (2, "DP/weight_aggr/intro_DP_WA.py", "--world-size 2 --batch-size 3"),
    "ddp": (3, "DP/ddp/intro_DP_DDP.py", "--world-size 3 --batch-size 2"),
    "mydp": (3, "DP/mydp/intro_DP_MyDP.py", "--world-size 3 --batch-size 2"),
    "pp-1f1b": (2, "PP/1F1B/intro_PP_1F1B.py", "--world-size 2 --batch-size 6"),
    "pp-dapple": (3, "PP/microbatches/intro_PP_microbatches.py", "--world-size 3 --batch-size 6"),
    "pp-zbv": (2, "PP/schedules/intro_PP_schedules.py", "--world-size 2 --schedule zb-v --batch-size 6"),
    "hybrid": (4, "hybrid/intro_hybrid.py", "--dp 2 --pp 2 --batch-size 3"),
    "tp": (2, "TP/intro_TP.py", "--world-size 2 --batch-size 6"),
    "3d": (4, "hybrid/intro_hybrid.py", "--dp 1 --pp 2 --tp 2 --batch-size 6 --micro-batches 2 --schedule interleaved"),
}

State = dict[str, Tensor]
OneProcess = Callable[..., tuple[State, State, list[float]]]  # parameters, gradients and losses
Ranks = tuple[list[State], list[State], list[float]]  # the parameters and gradients of each


def load(script: str) -> ModuleType:
    """A chapter's script as a module."""
    path = LAB / script
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def train(rank: int, script: str, flags: list[str], exact: bool = False) -> tuple[State, State]:
    """Run a chapter's own `train` in this process; with `exact`, in float64.

    Returns:
        Its parameters, and its gradients of the last step; a slice has its placement.
    """
    module, settings = prepared(script, tuple(flags))
    if exact:
        torch.set_default_dtype(torch.float64)  # of parameters, and of what is received
    built: list[nn.Module] = []
    builder = next(name for name in ("LLama", "build_stages", "build_stage", "GPT") if hasattr(module, name))
    build = getattr(module, builder)

    def build_and_keep(*args: Any, **options: Any) -> nn.Module | dict[int, nn.Module]:
        made: nn.Module | dict[int, nn.Module] = build(*args, **options)
        built.extend(made.values() if isinstance(made, dict) else [made])
        for norm in (part for net in built for part in net.modules() if exact and isinstance(part, RMSNorm)):
            norm.dtype = torch.float64
        return made

    setattr(module, builder, build_and_keep)
    sharded: list[ShardedDP] = []

    def shard(*args: Any, **options: Any) -> ShardedDP:
        sharded.append(ShardedDP(*args, **options))
        return sharded[-1]

    module.ShardedDP = shard  # type: ignore[attr-defined]
    run: TrainingRun[Any] = training_run(dataclasses.replace(settings, rank=rank), LAB / script)
    module.train(run)
    if sharded:
        result = whole(sharded)
        run.close()
        return result
    run.close()
    parameters = {name: p for net in built for name, p in net.named_parameters()}
    gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    copies = {name: p.detach().clone() for name, p in parameters.items()}
    for name, tensor in [*copies.items(), *gradients.items()]:
        place(tensor, placement_of(parameters[name]))
    return copies, gradients


@functools.lru_cache(1)
def prepared(script: str, flags: tuple[str, ...]) -> tuple[ModuleType, Any]:
    """A chapter's script and settings; if they are read before its ranks are forked, none of them takes the time."""
    module = load(script)
    return module, parse(module.DEFAULTS, "", ["0", *MODEL, *TRAINING, *flags])


def whole(sharded: list[ShardedDP]) -> tuple[State, State]:
    """The parameters and the gradients that replicas have shared out, gathered."""
    parameters = {name: weight.clone() for part in sharded for name, weight in part.whole_parameters().items()}
    frozen = {name for part in sharded for name, weight in part.own_parameters().items() if not weight.requires_grad}
    for part in sharded:
        with torch.no_grad():
            for shard in part.own_parameters().values():
                shard.copy_(torch.full_like(shard, torch.nan) if shard.grad is None else shard.grad)
        part.gather_weights()
    gradients = {name: grad.clone() for part in sharded for name, grad in part.whole_parameters().items()}
    for part in sharded:
        for name, held in part.model.named_parameters():
            place(parameters[name], placement_of(held))
            place(gradients[name], placement_of(held))
    return parameters, {name: grad for name, grad in gradients.items() if name not in frozen}


def train_on(world_size: int, script: str, out: Path, *flags: str, exact: bool = False, deadline: float = 60) -> Ranks:
    """A chapter on several ranks: each rank's parameters and gradients, and the run's losses."""
    arguments = ["--steps", str(STEPS), "--out", str(out), *flags, "--master-port", str(free_port())]
    with contextlib.suppress(InputError):  # each rank raises it itself
        prepared(script, tuple(arguments))
    ended = run_ranks(world_size, train, script, arguments, exact, deadline=deadline)
    assert json.loads((out / "memory.json").read_text()), "the script has told the run what it trains"
    return [parameters for parameters, _ in ended], [gradients for _, gradients in ended], losses(out)


def records(out: Path) -> list[dict[str, Any]]:
    """A run's records, one for each step."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in records(out)]


def validation_losses(out: Path) -> list[float]:
    return [record["validation_loss"] for record in records(out) if "validation_loss" in record]


def train_alone(folder: Path) -> OneProcess:
    """The run of `primer/intro.py` that the others have to equal, by the size of its batch and other flags."""

    @functools.cache
    def run(batch_size: int, *model: str) -> tuple[State, State, list[float]]:
        out = folder / " ".join([str(batch_size), *model])
        flags = ["--steps", str(STEPS), "--batch-size", str(batch_size), "--out", str(out), *model]
        [(parameters, gradients)] = run_ranks(1, train, "primer/intro.py", flags)
        for name, weight in initial_weights(*model).items():
            assert (parameters[name] - weight).abs().max() > 5e-5, f"{name} was trained"
        return parameters, gradients, losses(out)

    return run


def initial_weights(*model: str) -> State:
    args = parse(TrainSettings(), "", [*MODEL, *model])
    sizes = {
        "dmodel": args.dmodel,
        "num_heads": args.num_heads,
        "num_kv_heads": args.num_kv_heads,
        "hidden_dim": args.hidden_dim,
        "n_layers": args.n_layers,
    }
    net = LLama(CausalLLama, SPTokenizer(args.tokenizer).vocab_size, **sizes, ctx_size=args.seq_len, seed=args.seed)
    return {name: weight.detach() for name, weight in net.named_parameters()}


def assert_equal(own: State, expected: State, rtol: float = 0) -> None:
    assert own.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(own[name], tensor, rtol=rtol, atol=1e-6, msg=f"{name}: {{}}".format)


def assert_same_run(
    own: Ranks,
    expected: tuple[State, State, list[float]],
    part: Callable[[State, int], State] = lambda whole, _: whole,
    rtol: float = 0,
) -> None:
    """Ranks have the losses, parameters and gradients of one process; `part` returns what a rank holds of them."""
    assert own[2] == pytest.approx(expected[2], rel=1e-6)
    for of_ranks, whole in zip(own[:2], expected[:2], strict=True):
        for rank, state in enumerate(of_ranks):
            assert_equal(state, part(whole, rank), rtol)


def merged(states: list[State]) -> State:
    """Return the whole tensors of all ranks; where several hold the same elements, they agree bit for bit."""
    found: State = {}
    for state in states:
        for name, tensor in state.items():
            held, shape, views = as_held(tensor, tensor), tensor.shape, {torch.Size([0] * tensor.dim()): tensor}
            if isinstance(held, Slice):
                shape, views = held.whole, held.views
            whole = found.setdefault(name, tensor.new_full(shape, torch.nan))
            for offsets, view in views.items():
                region = whole[tuple(slice(a, a + n) for a, n in zip(offsets, view.shape, strict=True))]
                assert region.isnan().all() or region.equal(view), f"{name}: the ranks agree"
                region.copy_(view)
    return found
