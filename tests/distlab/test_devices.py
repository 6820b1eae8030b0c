"""Which backend and how many threads, without the hardware."""

import pytest
import torch

from distlab.devices import pick_backend, pick_device, threads_per_rank
from simplellm.errors import InputError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("asked", "device", "local_ranks", "gpus", "backend"),
    [
        ("auto", CPU, 3, 0, "gloo"),
        ("auto", CUDA, 3, 1, "gloo"),
        ("auto", CUDA, 2, 2, "nccl"),
        ("gloo", CUDA, 1, 1, "gloo"),
        ("nccl", CUDA, 1, 1, "nccl"),
    ],
)
def test_backend(
    asked: str, device: torch.device, local_ranks: int, gpus: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert pick_backend(asked, device, local_ranks) == backend


def test_nccl_with_two_ranks_on_one_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="--backend nccl: 2 ranks share 1 GPU"):
        pick_backend("nccl", CUDA, 2)
    with pytest.raises(InputError, match="--backend nccl: NCCL moves CUDA tensors only"):
        pick_backend("nccl", CPU, 2)


def test_cuda_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto", 0) == CPU
    with pytest.raises(InputError, match="--device cuda"):
        pick_device("cuda", 0)


def test_ranks_share_the_cores_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads_per_rank(ranks) for ranks in (1, 3, 8, 20)] == [8, 2, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads_per_rank(3) == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert threads_per_rank(8) == 1
