"""A rank's device, backend and number of threads."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distlab.machine.cores import asked_threads, cores
from simplellm.errors import InputError, require

SHARE_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"  # NCCL's own variable; with 1, ranks may share a GPU over NCCL


@dataclass(frozen=True)
class Place:
    """A rank's host and GPUs."""

    host: str
    gpus: tuple[str, ...] = ()  # UUIDs of the GPUs that the rank sees; none for a rank on the CPU


def pick_device_type(name: str, ranks_here: int = 1) -> str:
    """Return the device type, "cpu" or "cuda", for a value of `--device`; `auto` is CUDA if present.

    Also sets the environment variables that CUDA reads at its start. With "cpu", this process no longer sees any GPU.

    Args:
        ranks_here: number of ranks on this host, for processes that no launcher has started.

    Raises:
        InputError: CUDA was requested but is not available.
    """
    if name == "cpu":  # otherwise torch's checkpoint writer would open a visible GPU and use some of its memory
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return "cpu"
    # Over NCCL, the groups and links of a hybrid need more streams than the default of 8 queues, and streams that share
    # a queue wait for each other (CUDA C++ Programming Guide, CUDA_DEVICE_MAX_CONNECTIONS; 32 is the maximum). Ranks
    # that share a GPU over gloo do without: an H100 gave so many queues to 5 processes only, and refused others.
    has_own_gpu = int(os.environ.get("LOCAL_WORLD_SIZE", ranks_here)) <= torch.cuda.device_count()
    if has_own_gpu or os.environ.get(SHARE_GPUS) == "1":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    is_there = torch.cuda.is_available()
    require(is_there or name != "cuda", "--device cuda: torch sees no CUDA device here; use --device cpu")
    return "cuda" if is_there else "cpu"


def visible_gpus(device_type: str) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that this process sees; none on the CPU."""
    gpus = range(torch.cuda.device_count() if device_type == "cuda" else 0)
    return tuple(str(torch.cuda.get_device_properties(gpu).uuid) for gpu in gpus)


def local_ranks(places: Sequence[Place], rank: int) -> list[int]:
    """Return all ranks on the host of `rank`, given the places of all ranks."""
    return [other for other, place in enumerate(places) if place.host == places[rank].host]


def pick_device(places: Sequence[Place], rank: int) -> torch.device:
    """Return the device of `rank`: the CPU, or one of the GPUs that it sees."""
    return torch.device("cuda", _gpu_of(places, rank)) if places[rank].gpus else torch.device("cpu")


def _gpu_of(places: Sequence[Place], rank: int) -> int:
    """Return the index of the GPU that a rank uses: the ranks of a host are assigned to its GPUs in turn."""
    return local_ranks(places, rank).index(rank) % len(places[rank].gpus)


def ranks_on_one_gpu(places: Sequence[Place]) -> list[int]:
    """Return the first ranks that use the same GPU; [] if each has its own."""
    users: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        users.setdefault(place.gpus[_gpu_of(places, rank)], []).append(rank)
    return next((ranks for ranks in users.values() if len(ranks) > 1), [])


def pick_backend(name: str, places: Sequence[Place]) -> str:
    """Return the backend for a value of `--backend`; `auto` is NCCL when every rank has its own GPU, else gloo.

    Raises:
        InputError: NCCL was requested but cannot work, for example with two ranks on one GPU that are not meant to
            share it; or only some of the ranks see a GPU.
    """
    other = next((rank for rank, place in enumerate(places) if bool(place.gpus) != bool(places[0].gpus)), 0)
    kinds = ["cuda" if places[rank].gpus else "cpu" for rank in (0, other)]
    both = f"--device auto: rank 0 would compute on {kinds[0]} and rank {other} on {kinds[1]}"
    require(other == 0, f"{both}; give all ranks --device cpu")
    if not places[0].gpus:
        on_cpu = "--backend nccl: NCCL moves CUDA tensors only and this run computes on the CPU; use gloo"
        require(name != "nccl", on_cpu)
        return "gloo"
    shared = ranks_on_one_gpu(places)
    if shared and name == "nccl" and os.environ.get(SHARE_GPUS) != "1":
        who = f"ranks {shared[0]} and {shared[1]} share a GPU of {places[shared[0]].host}"
        raise InputError(f"--backend nccl: {who}, which NCCL refuses; use --backend gloo, or set {SHARE_GPUS}=1")
    return name if name != "auto" else "gloo" if shared else "nccl"


def tf32_override() -> str | None:
    """Return the environment variable that makes float32 products use TF32 (10 bits of fraction); None if not set."""
    names = "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
    return next((f"{name}={os.environ[name]}" for name in names if os.environ.get(name) == "1"), None)


def threads_per_rank(local_ranks: int) -> int:
    """Return the number of threads for each rank that shares this host's cores; OMP_NUM_THREADS overrides it."""
    return asked_threads() or max(1, cores() // local_ranks)


def cores_to_share(parties: int) -> int | None:
    """Return this host's cores for each of `parties`, at least 1; None if OMP_NUM_THREADS sets the threads."""
    return None if asked_threads() else max(1, cores() // parties)
