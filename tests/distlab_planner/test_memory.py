"""The planner's counts are those of real stages."""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
from support.chapters import load
from support.planner_machines import CLUSTER, MODEL, SIZES, cluster

from distlab.axes.layout import coordinate
from distlab.parallel.options import CPKind
from distlab.pipeline.actions import Result
from distlab.pipeline.activations import MicroBatch, Stage
from distlab.pipeline.stages import build_stage
from distlab.settings.common import parse
from distlab_planner.activations import Activations
from distlab_planner.costs import Costs
from distlab_planner.layouts import CP_KINDS, RECOMPUTE, RunLayout, default_split
from distlab_planner.measuring import build
from distlab_planner.memory import bytes_after_a_death, held, process_bytes
from distlab_planner.model import Dtype
from distlab_planner.sequences import SharedAttention
from simplellm.llama import LLamaStage
from simplellm.losses import causalLLMLoss
from simplellm.saved_activations import SavedActivations

ROWS, MICRO_BATCHES = 2, 3
DTYPES: tuple[Dtype, ...] = get_args(Dtype)


def test_only_ranks_that_compile_have_a_compiler_in_memory() -> None:
    layout = RunLayout({"dp": 1}, ROWS, 1, "dapple", "none", "none", (MODEL.n_layers,))
    for compiled, more in ((False, 0), (True, 1e9)):
        model = replace(MODEL, sizes=replace(SIZES, compiled=compiled))
        without, having = (Costs(machine, model, layout) for machine in (CLUSTER, cluster(compiler_bytes=1e9)))
        holds = held(without, 0)
        assert process_bytes(having, 0, holds) - process_bytes(without, 0, holds) == more
        assert process_bytes(without, 0, holds) == holds.total + 4 * ROWS * SIZES.seq_len * SIZES.vocab_size


def kept_by_worker(layout: RunLayout, worker: int, dtype: Dtype = "float32", **more: Any) -> int:
    """Peak bytes of activations of a worker whose stages are run by themselves."""
    program = layout.programs()[worker]
    options: dict[str, Any] = {"dmodel": SIZES.dmodel, "num_heads": SIZES.num_heads, "num_kv_heads": SIZES.num_kv_heads}
    options |= {"hidden_dim": SIZES.hidden_dim, "ctx_size": SIZES.seq_len, "dtype": getattr(torch, dtype), **more}
    nets = {
        stage: build_stage(stage, layout.split, SIZES.vocab_size, recompute=layout.recompute, **options)
        for stage in {action.stage for action in program}
    }
    kept = SavedActivations(itertools.chain.from_iterable(net.parameters() for net in nets.values()))
    loss, last = partial(causalLLMLoss, vocab_size=SIZES.vocab_size), len(layout.split) - 1
    stages = {index: Stage(net, loss if index == last else None, kept) for index, net in nets.items()}
    batch = torch.zeros(layout.batch_size, SIZES.seq_len, dtype=torch.int64).chunk(layout.micro_batches)
    parts = {(index, k): MicroBatch(stage, ids) for index, stage in stages.items() for k, ids in enumerate(batch)}
    for action in program:
        action.prepare(parts[action.stage, action.micro_batch])
    handed: dict[Result, torch.Tensor] = {}  # from one stage of the worker to another
    for action in program:
        needed = [result for result in action.needs(len(layout.split)) if result.stage != action.stage]
        received = [handed.pop(result, torch.zeros(layout.rows, SIZES.seq_len, SIZES.dmodel)) for result in needed]
        computed = action.run(parts[action.stage, action.micro_batch], *received)
        handed |= {result: computed[result.kind] for result in action.results if result.kind in computed}
    assert not any(part.kept for part in parts.values())
    return kept.peak_bytes


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize(
    ("schedule", "workers"), [("dapple", 1), ("gpipe", 2), ("dapple", 3), ("zb-h1", 3), ("zb-v", 2), ("zb-v", 3)]
)
def test_activations_are_those_that_the_stages_keep(schedule: str, workers: int, recompute: str) -> None:
    stages = workers * (2 if schedule == "zb-v" else 1)
    split = default_split(MODEL, stages)
    layout = RunLayout({"pp": workers}, ROWS * MICRO_BATCHES, MICRO_BATCHES, schedule, recompute, "none", split)  # type: ignore[arg-type]
    for dtype in DTYPES:
        costs = Costs(CLUSTER, replace(MODEL, sizes=replace(SIZES, dtype=dtype)), layout)
        for worker in range(workers):
            counted = kept_by_worker(layout, worker, dtype)
            assert held(costs, worker).activations == pytest.approx(counted, rel=1e-3), (dtype, worker)


@pytest.mark.parametrize(("schedule", "workers"), [("dapple", 2), ("zb-h1", 3), ("zb-h2", 2)])
def test_activations_of_experts_are_at_least_those_that_the_stages_keep_and_little_more(
    schedule: str, workers: int
) -> None:
    """All tokens use both experts, so that loads are equal. With one of the schedules, there are further norms."""
    mixture: dict[str, Any] = {"experts": 2, "experts_per_token": 2, "qk_norm": schedule == "dapple"}
    split = default_split(MODEL, workers)
    layout = RunLayout({"pp": workers}, ROWS * MICRO_BATCHES, MICRO_BATCHES, schedule, "none", "none", split)
    for dtype in DTYPES:
        costs = Costs(CLUSTER, replace(MODEL, sizes=replace(SIZES, dtype=dtype, **mixture)), layout)
        for worker in range(workers):
            counted = kept_by_worker(layout, worker, dtype, **mixture)
            assert counted <= held(costs, worker).activations <= 1.04 * counted, (dtype, worker)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("schedule", ["dapple", "zb-h1"])
def test_activations_of_a_head_alone(schedule: str, recompute: str, dtype: Dtype) -> None:
    split = (MODEL.n_layers, 0)
    layout = RunLayout({"pp": 2}, ROWS * MICRO_BATCHES, MICRO_BATCHES, schedule, recompute, "none", split)  # type: ignore[arg-type]
    costs = Costs(CLUSTER, replace(MODEL, sizes=replace(SIZES, dtype=dtype)), layout)
    for worker in range(2):
        counted = kept_by_worker(layout, worker, dtype)
        assert held(costs, worker).activations == pytest.approx(counted, rel=1e-3), worker


def test_weights_are_those_of_the_model() -> None:
    layout = RunLayout({}, 1, 1, "dapple", "none", "none", (MODEL.n_layers,))
    options: dict[str, Any] = {"dmodel": 32, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 96}
    mixture = {"experts": 3, "experts_per_token": 2, "qk_norm": True}
    for more, shared in ((dict[str, Any](), 0), (mixture, 0), (mixture, 1)):
        flags = {"shared_expert": bool(shared)} if more else {}
        net = build_stage(0, layout.split, SIZES.vocab_size, **options, **more, **flags)
        model = replace(MODEL, sizes=replace(SIZES, shared_experts=shared, **more))
        counts = held(Costs(CLUSTER, model, layout), 0)
        assert counts.parameters == sum(p.nbytes for p in net.parameters()), "with the corrections of scores"
        assert counts.gradients == sum(p.nbytes for p in net.parameters() if p.requires_grad)
        assert counts.optimizer_state == 2 * counts.gradients


def test_without_shared_memory_the_last_bucket_of_a_pass_is_whole_beside_the_first_of_the_next() -> None:
    sizes = replace(SIZES, dmodel=192, num_heads=4, vocab_size=40_000)
    gathered = {}
    for micro_batches in (1, 2):
        layout = RunLayout({"dp": 2}, micro_batches, micro_batches, "dapple", "none", "gradients", (12,))
        gathered[micro_batches] = held(Costs(CLUSTER, replace(MODEL, sizes=sizes, n_layers=12), layout), 0).gathered
    vocabulary_bytes = 40_000 * 192 * 4
    assert vocabulary_bytes < gathered[1] < 2 * vocabulary_bytes < gathered[2]


def test_experts_that_all_replicas_hold_are_reduced_together_with_the_rest_of_a_block() -> None:
    sizes = replace(SIZES, experts=2)
    layout = RunLayout({"dp": 2}, 1, 1, "dapple", "none", "weights", (MODEL.n_layers,))
    block_bytes = 4 * sum(one.numbers for one in sizes.parameters("block", 1, 1))
    costs = Costs(cluster(device="cpu"), replace(MODEL, sizes=sizes), layout)
    assert held(costs, 0).gathered == 4 * block_bytes, "a block, its gradient, the block before, and a buffer for one"


def test_slices_that_are_measured_have_the_parameters_of_the_plan() -> None:
    mixture = replace(SIZES, experts=2, shared_experts=1, qk_norm=True)
    for sizes, tp in itertools.product((SIZES, mixture), (1, 2)):
        net = build(LLamaStage, sizes, 1, tp, torch.device("cpu"))
        trained = [parameter.numel() for parameter in net.parameters() if parameter.requires_grad]
        assert trained == [one.numbers for one in sizes.parameters("block", tp)], (sizes, tp)
    assert SIZES.multiply_adds("block", 2) == SIZES.multiply_adds("block") / 2


@pytest.mark.parametrize("tp", [1, 2])
def test_a_process_needs_what_it_holds_and_the_gradient_of_the_logits_and_what_its_allocator_keeps(tp: int) -> None:
    layout = RunLayout(
        {"pp": 2, "tp": tp}, ROWS * MICRO_BATCHES, MICRO_BATCHES, "dapple", "none", "none", default_split(MODEL, 2)
    )
    gpus, cpus = cluster(process_bytes=1e9), cluster(process_bytes=1e9, device="cpu")
    gradient = torch.zeros(ROWS, SIZES.seq_len, -(-SIZES.vocab_size // tp)).nbytes
    for worker, more in enumerate((0, gradient)):
        costs = Costs(gpus, MODEL, layout)
        holds = held(costs, worker)
        assert process_bytes(costs, worker, holds) == 1e9 + holds.total + more
        on_a_cpu = process_bytes(Costs(cpus, MODEL, layout), worker, holds)
        assert on_a_cpu == pytest.approx(1e9 + 1.3 * (holds.total + 2.5 * more))  # and the logits


@pytest.mark.parametrize("kind", CP_KINDS)
def test_a_slice_of_shared_attention_is_that_of_a_model_half_as_wide(kind: CPKind) -> None:
    """Of two key heads, each slice has one, which its ranks cannot share among them."""
    half = replace(SIZES, dmodel=SIZES.dmodel // 2, num_heads=SIZES.num_heads // 2, num_kv_heads=1)
    own = SharedAttention(SIZES, ROWS, ranks=2, kind=kind, tp=2)
    right = SharedAttention(half, ROWS, ranks=2, kind=kind)
    for name in ("keys", "heads", "kept_bytes", "copied_bytes"):
        assert getattr(own, name) == getattr(right, name), name


def test_slices_of_a_sequence_that_they_do_not_divide_are_as_long_as_the_longest() -> None:
    slices = RunLayout({"tp": 3}, ROWS, 1, "dapple", "none", "none", (4,), sequence_parallel=True)
    uneven, even = (Activations(replace(SIZES, seq_len=length), slices) for length in (16, 18))
    assert uneven.residual_tokens == even.residual_tokens == ROWS * 6
    assert uneven.message_bytes < even.message_bytes, "between slices, there are whole sequences"


@pytest.mark.parametrize(("repair", "sums"), [("on", 1), ("exact", 2)])
def test_after_a_death_all_ranks_hold_two_copies_of_their_state(repair: str, sums: int) -> None:
    flags = f"0 --dp 2 --pp 2 --tp 2 --batch-size 6 --micro-batches 3 --n-layers 4 --repair {repair}"
    settings: Any = parse(load("hybrid/intro_hybrid_repair.py").DEFAULTS, "", flags.split())
    costs, needed = Costs.in_bytes(settings, settings.layout, (2, 2)), 0.0
    for rank in range(8):
        one = held(costs, coordinate(settings.layout, rank, "pp"))
        needed += 2 * (one.parameters + one.optimizer_state) + sums * one.gradients
        needed += settings.growth() * one.activations
    assert bytes_after_a_death(settings, (2, 2)) == pytest.approx(needed)
