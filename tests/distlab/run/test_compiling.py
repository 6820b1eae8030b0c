"""--compile: the run of one process, by gradients and parameters, and the parts that it cannot compile."""

import errno
import importlib
import json
import re
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chapters import MODEL, OneProcess, assert_equal, load, merged, records, train_on
from support.planner_machines import cluster
from support.processes import LAB, run_ranks
from support.refusals import refuse
from torch import Tensor
from torch._functorch.aot_autograd import make_boxed_func

from distlab.axes.grid import Grid
from distlab.machine.compilers import import_compiler
from distlab.parallel.context_parallel import ContextParallel
from distlab.parallel.sharded import ShardedDP
from distlab.run.compiling import parts_to_compile
from distlab.run.model import ModelParts
from distlab.run.training import TrainingRun
from distlab.settings.common import parse
from distlab.settings.training import TrainSettings
from distlab_page.planned import costs_of, memory_of
from distlab_page.records import read
from distlab_planner.machine import write_machine
from distlab_planner.memory import held
from distlab_planner.sent import sent_in_step
from simplellm import mixed_precision
from simplellm.blocks import Block, logits
from simplellm.compiler import keep_distutils
from simplellm.errors import InputError
from simplellm.llama import CausalLLama, LLama

HYBRID, ZERO_BUBBLE = "hybrid/intro_hybrid.py", "PP/schedules/intro_PP_schedules.py"
pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or not Path(sysconfig.get_paths()["include"], "Python.h").exists(),
    reason="needs g++ and Python's headers",
)


@pytest.fixture(scope="module", autouse=True)
def _compiler_is_imported() -> Iterator[None]:
    """Once, instead of in each rank, as the launcher does; its kernels have no vectors, which take g++ longer."""
    import torch._inductor.config as inductor

    with inductor.patch({"cpp.vec_isa_ok": False}):
        import_compiler()
        torch.compile(torch.sin, backend=without_kernels)(torch.ones(1))  # the first call imports more
        yield


def without_kernels(graph: Any, inputs: Any, **_: Any) -> Any:
    """A backend of torch.compile: derives and divides the passes as the usual one, and runs them as they are."""
    from torch._inductor.compile_fx import compile_fx

    def run(part: Any, *_: Any, **__: Any) -> Any:
        return make_boxed_func(part)

    return compile_fx(graph, inputs, inner_compile=run)


def leave_out_kernels(monkeypatch: pytest.MonkeyPatch, *but_of: Any) -> None:
    """Have torch.compile leave out the kernels from g++, but for those of some functions."""
    compile_usually = torch.compile

    def compile_without(function: Any, *, options: dict[str, Any], **more: Any) -> Any:
        if function in but_of:
            return compile_usually(function, options=options, **more)
        guards = {"guard_filter_fn": options["guard_filter_fn"]}
        return compile_usually(function, backend=without_kernels, options=guards, **more)

    monkeypatch.setattr(torch, "compile", compile_without)


def test_parts_that_were_not_foreseen_are_compiled_when_a_step_meets_them(
    one_process: OneProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of this file: the tests after it find their kernels in the compiler's cache."""
    monkeypatch.setattr("distlab.run.compiling.compile_model", lambda *_: None)
    expected_parameters, expected_gradients, expected_losses = one_process(6)
    [parameters], [gradients], losses = train_on(
        1, "primer/intro.py", tmp_path, "--compile", *"--batch-size 6 --micro-batches 3".split(), deadline=240
    )
    log = (tmp_path / "rank0.log").read_text()
    for part in ("a block", "the head", "the loss"):
        assert log.count(f"# compiling {part} during this step") == 1, f"{part} is compiled, once"
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert_equal(parameters, expected_parameters)
    assert_equal(gradients, expected_gradients)


@pytest.mark.parametrize(
    ("ranks", "rows", "script", "flags", "kernels"),  # the compiler's cache has kernels for passes of two rows
    [
        (2, 4, "DP/gradient_aggr/intro_DP_GA.py", "--world-size 2 --batch-size 2 --transport shared", True),
        (3, 6, "PP/microbatches/intro_PP_microbatches.py", "--world-size 3 --batch-size 6 --micro-batches 3", True),
        (2, 6, ZERO_BUBBLE, "--world-size 2 --schedule zb-h1 --batch-size 6 --micro-batches 3", True),
        (
            2,
            4,
            "hybrid/intro_hybrid.py",
            "--dp 1 --pp 1 --tp 2 --batch-size 4 --micro-batches 2 --recompute all",
            False,
        ),
        (2, 4, "TP/intro_TP_styles.py", "--world-size 2 --tp-style naive --batch-size 4 --micro-batches 2", False),
        (2, 4, "hybrid/intro_5d.py", "--dp 2 --pp 1 --shard weights --batch-size 2 --micro-batches 1", False),
    ],
)
def test_a_compiled_run_is_the_run_of_one_process(
    ranks: int,
    rows: int,
    script: str,
    flags: str,
    kernels: bool,
    one_process: OneProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By losses, parameters and gradients, without compiling during a step: all parts are compiled before the first."""
    usual_steps = TrainingRun.steps

    def steps(*args: Any) -> Iterator[tuple[int, Tensor]]:
        for step in usual_steps(*args):
            torch.compiler.set_stance("fail_on_recompile")
            yield step

    expected_parameters, expected_gradients, expected_losses = one_process(rows)
    monkeypatch.setattr(TrainingRun, "steps", steps)
    if not kernels:
        leave_out_kernels(monkeypatch)
    parameters, gradients, losses = train_on(ranks, script, tmp_path, "--compile", *flags.split(), deadline=240)
    if "DP/" in script:
        assert_as_planned(script, flags, tmp_path)
    log = (tmp_path / "rank0.log").read_text()
    assert re.search(r"# compiled in \d+\.\d s", log), "it says how long that took"
    assert re.search(r"# compiling took \d+\.\d\d s \(not counted in step times\)", log)
    assert ("blocks and head of these micro-batches stay uncompiled" in log) == ("zb" in flags)
    assert "during this step" not in log
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert_equal(merged(parameters), expected_parameters)
    assert_equal(merged(gradients), expected_gradients)


def assert_as_planned(script: str, flags: str, run: Path) -> None:
    write_machine(cluster(device="cpu"), machine := run / "machine.json")
    arguments = ["0", *MODEL, "--data", "sample", "--compile", *flags.split(), "--transport", "auto"]
    prediction = parse(load(script).DEFAULTS, "", [*arguments, "--machine", str(machine)]).prediction
    counted = json.loads((run / "memory.json").read_text())[0]["activations"]
    assert held(prediction.costs, 0).activations == pytest.approx(counted, abs=8)
    sent = records(run)[-1]["sent_bytes"]["gradients"]
    assert sent_in_step(prediction.costs, 0)["gradients", None].bytes == sent


@pytest.mark.parametrize(
    ("ranks", "rows", "script", "flags", "native"),
    [
        (2, 8, "DP/fsdp/intro_DP_FSDP.py", "--world-size 2 --shard weights", True),
        (2, 8, "hybrid/intro_5d.py", "--dp 2 --pp 1 --shard gradients --recompute blocks", True),
        (2, 4, HYBRID, "--dp 1 --pp 2 --residual bfloat16", True),
        (1, 4, "primer/intro.py", "--residual bfloat16", False),
    ],
)
def test_a_compiled_run_in_bfloat16_is_nearly_the_run_without_and_holds_the_memory_of_the_plan(
    ranks: int,
    rows: int,
    script: str,
    flags: str,
    native: bool,
    one_process: OneProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plan assumes products with bfloat16 factors."""
    leave_out_kernels(monkeypatch, *[logits] * ("pp 2" in flags))  # each kernel in bfloat16 takes g++ a second
    monkeypatch.setattr(mixed_precision, "CPU_IS_FASTER_IN_BFLOAT16", native)
    batch = "--batch-size 4 --micro-batches 2 --dtype bfloat16 --compile".split()
    _, gradients, losses = train_on(ranks, script, tmp_path, *flags.split(), *batch, deadline=240)
    assert "during this step" not in (tmp_path / "rank0.log").read_text()
    costs = costs_of(run := read(tmp_path))
    assert costs is not None
    for rank, counted in enumerate(json.loads((tmp_path / "memory.json").read_text()) if native else []):
        for kind, planned in memory_of(run, costs, rank).items():
            assert planned == pytest.approx(counted[kind], rel=0.01, abs=200), (rank, kind)
    residual = "bfloat16" if "--residual" in flags else "float32"
    _, expected, expected_losses = one_process(rows, "--dtype", "bfloat16", "--residual", residual)
    assert losses == pytest.approx(expected_losses, rel=1e-3)
    own = [(name, gradient) for tensors in gradients for name, gradient in tensors.items()]
    for name, gradient in own:
        assert (gradient - expected[name]).norm() < 0.05 * expected[name].norm(), name
    assert any(not gradient.equal(expected[name]) for name, gradient in own), "something was compiled"


@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16], ids=str)
def test_the_parts_that_are_compiled_before_the_first_step(residual: torch.dtype) -> None:
    sizes = {"dmodel": 8, "num_heads": 2, "n_layers": 1, "ctx_size": 8}
    net = LLama(CausalLLama, 32, **sizes, dtype=torch.bfloat16, residual=residual)
    of_whole = ["compute", "logits", "_next_token_loss"]
    for shard, axes, names in (
        ("gradients", {"dp": 1}, of_whole),
        ("gradients", {"cp": 2}, ["compute", "compute", "logits"]),  # a norm, and a feed-forward layer
        ("weights", {"dp": 1}, ["compute", "compute", of_whole[2]]),  # a norm: the head's weights are gathered inside
    ):
        parts = ModelParts.of(ShardedDP(net, shard), Grid(0, axes))  # type: ignore[arg-type]
        found = list(parts_to_compile(parts, 2, 8))
        assert [function.__name__ for function, _ in found] == names
        assert found[0][0] is not Block.compute or found[0][1][1].dtype == residual, "a block's input"


@pytest.mark.parametrize("seq", [24, 26, 29])
@pytest.mark.parametrize("flags", ["--cp-order zigzag", "--cp-order contiguous"])
def test_ranks_that_share_sequences_compile_for_the_positions_that_they_have(seq: int, flags: str) -> None:
    args = parse(
        load("CP/intro_CP_ring.py").DEFAULTS, "", ["0", "--world-size", "4", "--seq-len", str(seq), *flags.split()]
    )
    way = ContextParallel(Grid(0, args.layout).axis("cp"), args.cp_kind, args.cp_order)
    assert args.positions == way.part(torch.zeros(1, seq, dtype=torch.int64)).ids.shape[1]


def test_a_machine_without_a_compiler_is_told_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        InputError, match=r"--compile: torch needs the C\+\+ compiler no-such-compiler, which is not here"
    ):
        parse(TrainSettings(), "", ["--compile"])
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    with pytest.raises(InputError, match=r"--compile: torch needs /nowhere/Python\.h, which is not here"):
        parse(TrainSettings(), "", ["--compile"])


def import_setuptools(_: int) -> list[str]:
    """The warnings of a first import."""
    for name in [name for name in sys.modules if name.startswith(("setuptools", "distutils", "_distutils_hack"))]:
        del sys.modules[name]
    with warnings.catch_warnings(record=True) as said:
        warnings.resetwarnings()
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # as Python does by default
        keep_distutils()
        importlib.import_module("setuptools")
    return [str(warning.message) for warning in said]


def test_setuptools_says_nothing_when_torchs_compiler_imports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SETUPTOOLS_USE_DISTUTILS", raising=False)
    assert run_ranks(1, import_setuptools) == [[]]


def test_a_cache_that_cannot_be_written_does_not_end_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks say so."""
    for number in (errno.EROFS, errno.EACCES, errno.ENOSPC):
        monkeypatch.setattr("torch._inductor.cpu_vec_isa.pick_vec_isa", refuse(number))
        import_compiler()


def test_another_model_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(LAB / "examples"))
    with pytest.raises(AssertionError, match="--compile: this script trains a model that is not the lab's Llama"):
        train_on(1, "examples/gpt_dp.py", tmp_path, "--world-size", "1", "--compile")
