"""The model on the GPU beside the same on the CPU, in this process; and the chapters that train no Llama."""

import re
from pathlib import Path

import pytest
import torch
from support.gpu_runs import DEADLINE, DEVICE, launch
from support.processes import run_script

from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss

VOCAB_SIZE = 128
SIZES = {"dmodel": 96, "num_heads": 4, "n_layers": 3, "ctx_size": 64}


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_logits_and_gradients(dtype: torch.dtype, tolerance: float, num_kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(5)
    ids, results = torch.randint(VOCAB_SIZE, (3, 50), generator=generator), []
    for device in ("cpu", DEVICE):
        net = LLama(CausalLLama, VOCAB_SIZE, **SIZES, num_kv_heads=num_kv_heads, dtype=dtype, device=device)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(2)  # fresh weights give almost uniform predictions, which hide mistakes
        logits = net(ids.to(device))
        causalLLMLoss(logits, ids, VOCAB_SIZE).backward()  # the targets stay on the CPU
        gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
        results.append({"logits": logits.detach(), **gradients})
    expected, found = results
    for name, tensor in expected.items():
        assert tensor is not None
        assert tensor.norm() > 0, name
        assert (found[name].cpu() - tensor).norm() < tolerance * tensor.norm(), name


def test_initial_weights_do_not_depend_on_the_device() -> None:
    states = [LLama(CausalLLama, VOCAB_SIZE, **SIZES, seed=3, device=device).state_dict() for device in ("cpu", DEVICE)]
    expected, found = states
    assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "line",
    [
        "primer/intro.py --clip-norm 0.3",
        "PP/schedules/intro_PP_schedules.py 0 --world-size 1 --run-on",
        "PP/schedules/intro_PP_schedules.py 0 --world-size 1 --run-on --clip-norm 100",
    ],
)
def test_the_host_reads_no_tensor_within_a_step(line: str, tmp_path: Path) -> None:
    flags = f"--steps 5 --data sample --dmodel 96 --num-heads 4 --device {DEVICE} --out {tmp_path}"
    ended = run_script("tests/gpu/host_reads.py", *line.split(), *flags.split(), deadline=DEADLINE)
    assert ended.status == 0, ended.err
    reads = re.findall(r"^# reads of step (\d):(.*)$", ended.out, re.MULTILINE)
    assert [step for step, _ in reads] == [*"01234"]
    assert all(not where for step, where in reads[1:-1]), reads  # the first step also sets up, the last one waits


def test_matrix_products_on_three_ranks(tmp_path: Path) -> None:
    ended = launch("dist --shapes 512x256x128 --rounds 2", tmp_path).ended
    assert re.search(r"^# 512x256x128 +\d", ended.out, re.MULTILINE), ended.out


@pytest.mark.parametrize("case", ["both-send", "order", "skipped"])
def test_deadlocks_are_cured(case: str, tmp_path: Path) -> None:
    ended = launch(f"deadlock --case {case} --cure", tmp_path).ended
    assert f"# {case}: all ranks have finished" in ended.out
