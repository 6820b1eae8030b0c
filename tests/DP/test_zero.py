"""Replicas that share out optimizer state, gradients or weights: the run of one process, the bytes of the formulas."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from support.chapters import FEW_TOKENS, MODEL, STEPS, OneProcess, assert_equal, assert_same_run, records, train_on
from torch import nn

from distlab.parallel.sharded import Sharded

PLAIN, SCRIPT = "DP/zero/intro_DP_ZeRO.py", "DP/fsdp/intro_DP_FSDP.py"
SHARDED: list[Sharded] = ["optimizer", "gradients", "weights"]
N_LAYERS = int(MODEL[MODEL.index("--n-layers") + 1])


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.quick)])
@pytest.mark.parametrize("shard", SHARDED)
def test_is_the_run_of_one_process(shard: Sharded, world_size: int, one_process: OneProcess, tmp_path: Path) -> None:
    recipe = [*FEW_TOKENS, *("--weight-decay 0.1 --clip-norm 0.3".split() if world_size == 2 else [])]
    expected = one_process(world_size * 2, *recipe)
    transport = {2: "gloo", 3: "shared"}.get(world_size, "auto")
    flags = ["--world-size", str(world_size), "--batch-size", "2", "--shard", shard, "--transport", transport, *recipe]
    assert_same_run(train_on(world_size, SCRIPT, tmp_path, *flags), expected)

    weights = sum(weight.numel() for weight in expected[0].values())
    all_reduced_bytes = 2 * (world_size - 1) * 4 * weights // world_size  # what averaging gradients sends
    record = records(tmp_path)[STEPS - 1]
    sent_bytes = record["sent_bytes"].get("weights", 0) + record["sent_bytes"].get("gradients", 0)
    expected_bytes = all_reduced_bytes * (1.5 if shard == "weights" else 1)
    # Two ranks divide every bucket. Otherwise the last shards are filled up, by less than an element for each rank.
    filled_up_bytes = 0 if world_size <= 2 else 4 * world_size * 3 * (N_LAYERS + 2)
    assert expected_bytes <= sent_bytes <= expected_bytes + filled_up_bytes


@pytest.mark.parametrize("shard", SHARDED)
def test_in_bfloat16_weights_travel_as_the_passes_use_them(
    shard: Sharded, one_process: OneProcess, tmp_path: Path
) -> None:
    """The bits of one process, with a micro-batch in place of each rank: sums of two numbers, and halves, are exact."""
    dtype, transport = (*FEW_TOKENS, "--dtype", "bfloat16"), "gloo" if shard == "optimizer" else "shared"
    expected_parameters, expected_gradients, expected_losses = one_process(
        4, "--batch-size", "4", "--micro-batches", "2", *dtype
    )
    flags = ["--world-size", "2", "--batch-size", "2", "--shard", shard, "--transport", transport, *dtype]
    parameters, gradients, own_losses = train_on(2, SCRIPT, tmp_path, *flags)
    assert own_losses == expected_losses
    for own, expected in ((parameters, expected_parameters), (gradients, expected_gradients)):
        for rank, (name, tensor) in itertools.product(range(2), expected.items()):
            assert own[rank][name].dtype == torch.float32
            assert own[rank][name].equal(tensor), f"{name} on rank {rank}"

    sent_bytes = records(tmp_path)[-1]["sent_bytes"]
    numbers = {name: weight.numel() for name, weight in expected_parameters.items()}
    gathered_bytes = sum(n * (2 if "proj" in name or "head" in name else 4) for name, n in numbers.items())
    assert sent_bytes["weights"] == gathered_bytes / 2 * (2 if shard == "weights" else 1)
    assert sent_bytes["gradients"] == 4 * sum(numbers.values()) / 2


@pytest.mark.quick
@pytest.mark.parametrize(
    ("world_size", "transport", "micro_batches"), [(1, "auto", 1), (2, "gloo", 3), (3, "shared", 2)]
)
def test_by_hand_it_is_the_run_of_one_process(
    world_size: int, transport: str, micro_batches: int, one_process: OneProcess, tmp_path: Path
) -> None:
    decay, batch_size = (*FEW_TOKENS, "--weight-decay", "0.1"), 2 * micro_batches
    expected_parameters, expected_gradients, expected_losses = one_process(world_size * batch_size, *decay)
    flags = f"--world-size {world_size} --batch-size {batch_size} --micro-batches {micro_batches}".split()
    flags += ["--transport", transport, *decay]
    parameters, gradients, own_losses = train_on(world_size, PLAIN, tmp_path, *flags)
    assert own_losses == pytest.approx(expected_losses, rel=1e-6)
    for rank in range(world_size):
        assert_equal(parameters[rank], expected_parameters)
    # A rank has the mean gradient of its own range only.
    flat = [nn.utils.parameters_to_vector(own.values()) for own in gradients]
    length = -(-len(flat[0]) // world_size)
    mean = torch.cat([own[rank * length : (rank + 1) * length] for rank, own in enumerate(flat)])
    torch.testing.assert_close(mean, nn.utils.parameters_to_vector(expected_gradients.values()), rtol=0, atol=1e-6)

    record = records(tmp_path)[STEPS - 1]
    sent_bytes = record["sent_bytes"].get("weights", 0) + record["sent_bytes"].get("gradients", 0)
    assert sent_bytes == 2 * (world_size - 1) * 4 * length, "what one all-reduce sends"


@pytest.mark.parametrize("shard", ["gradients", "weights"])
def test_micro_batches_change_nothing(shard: Sharded, one_process: OneProcess, tmp_path: Path) -> None:
    flags = ["--world-size", "2", "--batch-size", "3", "--micro-batches", "3", "--shard", shard, *FEW_TOKENS]
    assert_same_run(train_on(2, SCRIPT, tmp_path, *flags), one_process(6, *FEW_TOKENS))


def held_bytes(out: Path) -> list[dict[str, int]]:
    held: list[dict[str, int]] = json.loads((out / "memory.json").read_text())
    return held


def test_memory_is_that_of_the_formulas(one_process: OneProcess, tmp_path: Path) -> None:
    """Adam in float32: 16 bytes for a weight in one process; shared out, as Rajbhandari et al., §3.3, count."""
    parameters, _, _ = one_process(6, *FEW_TOKENS)
    weights = sum(weight.numel() for weight in parameters.values())
    block = sum(weight.numel() for name, weight in parameters.items() if ".layers.0." in name)
    n = 3
    formulas = {"optimizer": 8 + 8 / n, "gradients": 4 + 12 / n, "weights": 16 / n}
    unit = max(block, parameters["lm_head.weight"].numel() + 32)
    whole = {  # for a while, in weights: at least, at most
        "optimizer": (weights, weights),  # what gloo brings; the model is one bucket
        "gradients": (2 * weights, 2 * weights),  # the bucket, and the shared memory in which it is added up
        "weights": (2 * unit, 4 * unit),  # this memory, and a block, the next one, which is on its way, its gradients
    }
    for shard, per_weight in formulas.items():
        out, transport = tmp_path / shard, "gloo" if shard == "optimizer" else "shared"
        flags = ["--world-size", str(n), "--batch-size", "2", "--steps", "2", "--optimizer", "adam", *FEW_TOKENS]
        train_on(n, SCRIPT, out, *flags, "--shard", shard, "--transport", transport)
        for held in held_bytes(out):
            all_the_time = held["parameters"] + held["gradients"] + held["optimizer state"]
            assert all_the_time == pytest.approx(per_weight * weights, rel=1e-3)
            least, most = whole[shard]
            assert 4 * least <= held["gathered"] <= 4 * most * (1 + 1e-3)


def test_by_hand_a_rank_holds_its_range_of_the_optimizers_state(one_process: OneProcess, tmp_path: Path) -> None:
    parameters, _, _ = one_process(6, *FEW_TOKENS)
    weights = sum(weight.numel() for weight in parameters.values())
    flags = [*"--world-size 3 --batch-size 2 --steps 1 --optimizer adam".split(), *FEW_TOKENS]
    train_on(3, PLAIN, tmp_path, *flags)
    for held in held_bytes(tmp_path):
        assert held["parameters"] == held["gradients"] == 4 * weights
        assert held["optimizer state"] == pytest.approx(8 * weights / 3, rel=1e-3)
