"""The bytes that a run of each kind has sent and holds are those of the formulas beside them on its page."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.chapters import MODEL, TRAINING
from support.page_numbers import STEPS, computed
from support.terminals import fork_launcher

from distlab import collectives
from distlab.collectives.simulation import SimulatedWorld
from distlab_page.beside_plans import ledger
from distlab_page.contents import contents
from distlab_page.planned import costs_of, sent_by
from distlab_page.records import read

WITHOUT = {"control", "check", "checkpoints", "weights at the start"}  # which are not sent in each step
# Of memory: rows dropped, an unknown order, a whole vocabulary, masks, shards over gloo, blocks that wait.
NOT_PLANNED = "--capacity", "auto", "tp --world-size", "--document-mask", "--transport gloo", "--pp 1 --schedule zb-h1"
RUNS = {  # commands of one run or of several, and the kinds that have formulas
    "experts, all of which each token uses": (
        "5d --dp 4 --ep 2 --pp 1 --batch-size 2 --micro-batches 2 --recompute all --experts 4 "
        "--experts-per-token 4 --record-routes ROUTES; "
        "5d --dp 1 --cp 2 --pp 1 --batch-size 8 --micro-batches 8 --experts 4 "
        "--experts-per-token 4 --capacity 2 --replay-routes ROUTES",
        "rows of experts, counts of rows, loads, gradients, loss; choices of experts, other routes, keys and values",
    ),
    "auto, run on, and a residual in bfloat16": (
        "5d --dp 1 --pp 2 --batch-size 2 --micro-batches 2 --schedule auto --run-on "
        "--dtype bfloat16 --residual bfloat16 --recompute all --document-mask",
        "activations, gradients of activations, loss",
    ),
    "auto with a stage on each rank, and two stages, also with a mask that they share": (
        "5d --dp 1 --pp 2 --batch-size 2 --micro-batches 2 --schedule auto --chunks-per-stage 1; "
        "5d --dp 1 --pp 3 --n-layers 6 --batch-size 3 --micro-batches 3 --schedule zb-v --recompute all; "
        "5d --dp 1 --cp 2 --cp-kind gather --pp 2 --n-layers 4 --batch-size 2 --micro-batches 2 --schedule zb-v "
        "--recompute except-attention",
        "activations, loss; activations, gradients of activations, loss; activations, keys and values, loss",
    ),
    "outer steps and a ring": (
        "5d --dp 2 --cp 2 --pp 1 --batch-size 2 --micro-batches 2 --outer diloco --sync-every 2 "
        "--compress int4 --report-every 2 --dtype bfloat16 --steps 4",
        "outer gradients, gradients, keys and values, gradients of keys and values, loss",
    ),
    "fragments": ("streaming-diloco --sync-every 2 --fragments 2 --compress int8 --steps 4", "outer gradients, loss"),
    "averaged weights, resumed": (
        "dp-wa --sync-every 3 --save-every 3 --steps 4; dp-wa --sync-every 3 --resume RUN --steps 6",
        "weights, loss; weights, loss",
    ),
    "a sum for each replica, and a copy of the state": (
        "dp-repair --repair exact; 5d --dp 2 --pp 1 --batch-size 3 --shard weights --run-on --optimizer adam",
        "gradients, loss; gradients, loss",
    ),
    "buckets that wait for delayed gradients": (
        "5d --dp 2 --pp 2 --dmodel 192 --n-layers 4 --layers-per-stage 2,2 --batch-size 2 --micro-batches 2 "
        "--schedule zb-h1 --shard gradients --dtype bfloat16",
        "gradients, weights, loss",
    ),
    "stages by hand, and several on each rank": (
        "pp-dapple --batch-size 2 --micro-batches 2 --dtype bfloat16; "
        "pp-interleaved --world-size 2 --n-layers 4 --batch-size 2 --micro-batches 2 --dtype bfloat16",
        "activations, loss; activations, loss",
    ),
    "averages in each pass": ("ddp --batch-size 2 --micro-batches 2", "gradients, loss"),
    "shards by hand": ("dp-zero --optimizer adam", "gradients, weights, loss"),
    "shards, and whole weights at the start": (
        "dp-fsdp --world-size 2 --shard gradients; dp-fsdp --world-size 2 --shard optimizer --transport gloo; "
        "dp-fsdp --world-size 1 --shard gradients; 5d --dp 2 --pp 1 --schedule zb-h1 --batch-size 3 --shard weights; "
        "cp-ring --cp-kind heads --document-mask",
        "gradients, weights, loss; gradients, weights, loss; ; gradients, weights, loss; gradients, loss",
    ),
    "low rank": ("dp-buckets --compress powersgd --hidden-dim 3", "gradients, loss"),
    "the largest": ("dp-buckets --compress topk", "gradients, loss"),
    "by hand, over 3 ranks": (
        "dp-buckets --all-reduce tree; dp-buckets --all-reduce ring",
        "gradients, loss; gradients, loss",
    ),
    "slices": ("tp --world-size 2", "layer activations, layer gradients, loss"),
    "a residual in bfloat16": (
        "5d --dp 1 --pp 3 --n-layers 4 --layers-per-stage 1,2,1 --batch-size 2 --micro-batches 2 --recompute all "
        "--dtype bfloat16 --residual bfloat16; "
        "5d --dp 1 --pp 2 --layers-per-stage 1,1,1,1 --n-layers 4 --batch-size 2 --micro-batches 2 --schedule zb-v "
        "--dtype bfloat16 --residual bfloat16",
        "activations, loss; activations, loss",
    ),
    "slices of sequences": (
        "tp-styles --world-size 2 --sequence-parallel --micro-batches 2 --batch-size 2",
        "layer activations, layer gradients, vocabulary activations, vocabulary gradients, norm gradients, loss",
    ),
    "slices of sequences of unequal lengths, computed again in bfloat16": (
        "tp-styles --world-size 3 --num-heads 3 --dmodel 48 --sequence-parallel --batch-size 2; "
        "tp-styles --world-size 2 --sequence-parallel --micro-batches 2 --batch-size 2 --dtype bfloat16 "
        "--recompute blocks; "
        "tp-styles --world-size 2 --sequence-parallel --micro-batches 2 --batch-size 2 --dtype bfloat16 "
        "--recompute all",
        "layer activations, norm gradients; layer activations, norm gradients; layer activations, norm gradients",
    ),
    "slices of stages, and shards": (
        "5d --dp 1 --pp 2 --tp 2 --schedule interleaved --recompute blocks --batch-size 6 --micro-batches 2 "
        "--dtype bfloat16; "
        "5d --dp 1 --pp 2 --tp 2 --recompute all --batch-size 2 --micro-batches 2 --dtype bfloat16; "
        "5d --dp 2 --pp 1 --tp 2 --shard weights --batch-size 3 --micro-batches 3 --dtype bfloat16; "
        "5d --dp 3 --pp 1 --shard optimizer --batch-size 3 --dtype bfloat16",
        "activations, layer activations; layer activations; weights, layer gradients; weights, gradients",
    ),
    "shards of several stages, of several buckets, and of ranks that share sequences": (
        "5d --dp 2 --pp 2 --shard gradients --batch-size 2 --micro-batches 2 --dtype bfloat16 --schedule interleaved; "
        "5d --dp 2 --pp 1 --shard gradients --batch-size 3 --dmodel 288 --num-heads 6; "
        "5d --dp 2 --pp 1 --cp 2 --shard gradients --batch-size 4 --micro-batches 2",
        "gradients, weights; gradients, weights; gradients, keys and values",
    ),
    "sequences that do not divide among the ranks": (
        "5d --dp 1 --pp 1 --cp 3 --cp-kind gather --batch-size 2 --micro-batches 2 --seq-len 25 --dtype bfloat16; "
        "5d --dp 1 --pp 1 --cp 3 --cp-kind heads --num-heads 6 --num-kv-heads 2 --dmodel 48 --seq-len 25; "
        "5d --dp 1 --pp 2 --cp 2 --cp-order contiguous --schedule zb-h1 --recompute blocks --seq-len 25; "
        "5d --dp 1 --pp 2 --cp 2 --cp-kind gather --recompute all --batch-size 4 --micro-batches 2 --seq-len 25",
        "keys and values; heads; gradients of keys and values; keys and values",
    ),
    "fewer key heads than ranks, and parts of slices": (
        "5d --dp 1 --pp 1 --cp 2 --cp-kind heads --recompute except-attention --num-heads 4 --num-kv-heads 1; "
        "5d --dp 1 --cp 2 --tp 2 --pp 1 --num-heads 4 --num-kv-heads 2",
        "heads; keys and values, layer activations",
    ),
    "experts with shards, stages and slices": (
        "5d --dp 4 --pp 1 --ep 2 --experts 2 --shard weights --hidden-dim 40 --recompute blocks --dtype bfloat16; "
        "5d --dp 4 --pp 1 --ep 2 --experts 4 --experts-per-token 4 --shard gradients --dtype bfloat16 --qk-norm; "
        "5d --dp 2 --pp 2 --ep 2 --experts 2 --shared-expert --schedule zb-h1 --micro-batches 2 --batch-size 4; "
        "5d --dp 2 --pp 1 --ep 2 --tp 2 --experts 2 --recompute all --dtype bfloat16 --qk-norm",
        "rows of experts; rows of experts; rows of experts; rows of experts",
    ),
}


@pytest.mark.parametrize("topology", ["naive", "tree", "butterfly"])
def test_an_all_reduce_by_hand_sends_what_it_sends_in_a_simulated_world(topology: str, alone: Path) -> None:
    run, all_reduce = read(alone), getattr(collectives, f"allreduce_{topology}")

    def simulated(ranks: int, numbers: int) -> list[int]:
        world = SimulatedWorld(ranks)
        world.run(lambda endpoint: all_reduce(torch.empty(numbers, device="meta"), endpoint=endpoint))
        return [rank.sent_bytes for rank in world.counts]

    for ranks in range(2, 10):
        config = {"settings": run.settings | {"all_reduce": topology}, "layout": {"dp": ranks}}
        own = replace(run, config=run.config | config)
        costs = costs_of(own)
        assert costs is not None
        formulas = [sent_by(own, costs, rank, STEPS).get(("gradients", None)) for rank in range(ranks)]
        assert [one.bytes if one else 0 for one in formulas] == simulated(ranks, costs.weights(0)), ranks


@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize("which", RUNS)
def test_a_run_sends_and_holds_the_bytes_of_the_formulas(which: str, tmp_path: Path) -> None:
    for number, (command, kinds) in enumerate(zip(*(part.split("; ") for part in RUNS[which]), strict=True)):
        out, earlier = tmp_path / f"run{number}", tmp_path / f"run{number - 1}"
        name, *flags = command.replace("ROUTES", f"{tmp_path}/routes").replace("RUN", str(earlier)).split()
        ended = fork_launcher(name, *MODEL, *TRAINING, "--steps", 2, *flags, "--out", out).finish()
        assert ended.status == 0, ended.err
        page = contents(run := read(out))
        rows = page["ledger"]["table"]["rows"] if kinds else []  # a rank alone sends nothing
        of_rank_0 = ledger(replace(run, ledger=[]))  # as on the page of a run without ledger.json
        assert (of_rank_0 is None) == (not kinds)
        for kind, _, each, formula, words in of_rank_0["table"]["rows"] if of_rank_0 else ():
            assert not words or each == pytest.approx(formula, rel=1e-4), kind
        lack = {kind for kind, *_, words in rows if not words}
        assert lack <= WITHOUT | ({"broadcast"} if name == "ddp" else set())
        assert {kind for kind, *_ in rows} - lack >= {*filter(None, kinds.split(", "))}
        for kind, _, _, _, each, formula, words in (row for row in rows if row[-1]):
            assert each == pytest.approx(formula, rel=1e-4), kind
            assert computed(words) == pytest.approx(formula, rel=1e-3, abs=1), words
        pairs = page["ledger"]["pairs"]["rows"] if kinds else []
        assert all(formula is not None for *_, kind, _, formula in pairs if kind == "activations"), "of each receiver"
        assert all(formula is None or size == pytest.approx(formula, rel=0.03) for *_, size, formula in pairs)
        assert "activations without recomputation" not in page["memory"]["bars"], "they were not held"
        assert (page["memory"]["plan"] is None) == any(flag in command for flag in NOT_PLANNED)
        for kind, planned in (page["memory"]["plan"] or {}).items():
            off = 0.011 if kind == "activations" and "--cp" not in command else 1e-3
            assert planned == pytest.approx(page["memory"]["bars"][kind], rel=off, abs=20), kind
